# SPDX-License-Identifier: Apache-2.0
"""A server that speculates on pictures, by its OpenAI API; and what it does about pictures that are none.

After each bad request the same good one is asked again: the server lives, the answer is the same, and it speculates.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from settings_pictures import DTYPE, HELD_OUT, ON_GPU

from vllm_kimi_eagle3.bench.client import Client, ServerError
from vllm_kimi_eagle3.bench.serve import serve
from vllm_kimi_eagle3.regression.engine import fresh_cache
from vllm_kimi_eagle3.tiny_kimi.scenes import Scene, question

pytestmark = pytest.mark.engine
ASK = question("row by row")


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Scene.random(HELD_OUT + number).draw().save(buffer, format="PNG")
    return buffer.getvalue()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def server(pictures_pair: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    drafter = {"method": "eagle3", "model": str(pictures_pair["pictures_gqa"]), "num_speculative_tokens": 3}
    arguments = ["--dtype", DTYPE, "--enforce-eager", "--max-model-len", "384", "--max-num-seqs", "4"]
    arguments += ["--limit-mm-per-prompt", '{"vision_chunk": 2}', "--speculative-config", json.dumps(drafter)]
    if ON_GPU:  # which other engines share
        arguments += ["--gpu-memory-utilization", "0.06", "--kv-cache-memory-bytes", str(1 << 30)]
    choice = {"kimi_eagle3": {"layer_rule": "output", "drafter_media": "embedding"}}
    arguments += ["--additional-config", json.dumps(choice)]
    folder = tmp_path_factory.mktemp("server")
    env = {
        "VLLM_CACHE_ROOT": str(fresh_cache(folder / "cache")),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_KIMI_EAGLE3": "on",
    }
    with serve(str(pictures_pair["pictures"]), arguments, folder / "log", environment=env) as url:
        # What loads the model is another process than the one that was given the choice: its log line says so.
        others = [line for line in (folder / "log").read_text().splitlines() if not line.startswith("(APIServer")]
        assert any("the drafter sees the picture's own embedding" in line for line in others)
        yield Client(url, timeout=60)


def chat(server: Client, *content: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    body = {"model": server.model, "messages": messages, "max_tokens": 60, "temperature": 0}
    return server._json("/v1/chat/completions", body)["choices"][0]["message"]


def good(server: Client) -> tuple[str, int]:
    """The good request's answer, and how many drafts were tested for it."""
    before = server.counters()
    answer = chat(server, shown(png(1)), text(ASK))["content"]
    return answer, server.counters().since(before).drafted


# What is asked, and words of the answer to it: of vLLM's own error, or None where it answers.
BAD: dict[str, tuple[list[dict[str, Any]], str | None]] = {
    "bytes that are no picture": ([shown(b"no picture at all"), text(ASK)], "400"),
    "a picture that ends early": ([shown(png(2)[:200]), text(ASK)], "400"),
    "an empty picture": ([shown(b""), text(ASK)], "400"),
    "more pictures than allowed": ([shown(png(3)), shown(png(4)), shown(png(5)), text(ASK)], "400"),
    "a placeholder typed as text": ([text("<|media_pad|> " + ASK)], None),
    "a placeholder typed behind a picture": ([shown(png(6)), text("<|media_pad|> " + ASK)], None),
    "media tokens typed as text": ([text("<|media_begin|>image<|media_content|><|media_end|>" + ASK)], None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_hurts_nobody_else(name: str, server: Client) -> None:
    content, refused = BAD[name]
    first, drafted = good(server)
    assert first and drafted
    if refused is None:
        assert chat(server, *content)["content"]
    else:
        with pytest.raises(ServerError, match=f"answered {refused}: .*message"):
            chat(server, *content)
    assert good(server) == (first, drafted)


def test_a_placeholder_in_a_prompt_of_token_ids_needs_no_picture(server: Client) -> None:
    first = good(server)
    body = {"model": server.model, "prompt": [72, 105, 266, 266, 63], "max_tokens": 8, "temperature": 0}
    assert server._json("/v1/completions", body)["choices"][0]["finish_reason"] in ("length", "stop")
    assert good(server) == first


def test_many_at_once(server: Client) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def one(number: int) -> str:
        return chat(server, shown(png(number)), text(ASK))["content"]

    alone = [one(number) for number in range(10, 16)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(10, 16))) == alone
