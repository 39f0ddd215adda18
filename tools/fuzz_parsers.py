# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of everything that reads strangers' bytes: ``make fuzz``, ten minutes.

    python tools/fuzz_parsers.py [SECONDS]      # atheris; the corpus grows by what found new code, and is minimised
    python tools/fuzz_parsers.py --one FILE     # one input, such as the one of a crash that libFuzzer wrote

An input's first byte chooses the parser. What may come out is a result or a ``PlanError`` of one printable sentence;
everything else is a finding, and so is an input that takes more than a second or 64 MiB at once. The corpus is one
file, ``tests/data/fuzz_corpus.json``, and ``tests/trust/test_fuzz_corpus.py`` plays it without atheris.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "data" / "fuzz_corpus.json"
SECONDS = 600
LONGEST = 4096
"""Bytes of one input: enough for a config, a header or a record."""
KEYS = (
    "architectures", "num_hidden_layers", "hidden_size", "vocab_size", "text_config", "n_routed_experts",
    "model_type", "eagle_config", "eagle_aux_hidden_state_layer_ids", "layer_ids", "use_aux_hidden_state",
    "num_aux_hidden_states", "target_hidden_size", "draft_vocab_size", "speculators_config",
    "speculators_model_type", "transformer_layer_config", "dflash_config", "target_layer_ids",
    "dspark_target_layer_ids", "kimi_eagle3_original", "quantization_config", "dtype", "shape", "data_offsets",
    "__metadata__", "fc.weight", "d2t", "F32", "BF16", "U8", "F6_E2M3", "format", "key", "ids", "num_layers",
    "boundaries", "rule", "output", "boundary", "hit_rates", "intervals", "measured_on", "eagle3", "peagle",
    "kimi_k2", "deepseek_v41", "Eagle3DeepseekV2ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
)  # fmt: skip
RELEASES = ("0.15.0", "0.17.1", "0.19.1", "0.21.0", "0.24.0", "0.26.0", "0.28.0", "0.33.0")


class Finding(AssertionError):
    """Something other than a result or a sentence came out."""


@contextlib.contextmanager
def refusing() -> Generator[None]:
    """Let a refusal pass that a person can read."""
    from vllm_kimi_eagle3.layers import PlanError

    try:
        yield
    except PlanError as error:
        text = str(error)
        if not (text.isascii() and text.isprintable() and len(text) < 600):
            raise Finding(f"a sentence that nobody can read: {text[:200]!a}") from None


def pair(body: bytes) -> None:
    """Two configurations, divided by a zero byte: the plan, what stock takes, and the words for both."""
    from vllm_kimi_eagle3.layers import PlanError, config_updates, explain, resolve, stock_boundaries
    from vllm_kimi_eagle3.layers.files import load_json

    first, _, second = body.partition(b"\0")
    target: Any = load_json(first, "the target")
    drafter: Any = load_json(second, "the drafter")
    plan = resolve(target, drafter)
    if sorted(set(plan.boundaries)) != list(plan.boundaries) or not all(
        0 <= boundary <= plan.num_layers for boundary in plan.boundaries
    ):
        raise Finding(f"boundaries {plan.boundaries} of {plan.num_layers} layers")
    if resolve(target, {**drafter, **config_updates(plan, drafter)}) != plan:
        raise Finding("the plan of the resolved configuration is another one")
    explain.plan_text(plan, None)
    json.dumps(plan.to_json())
    for release in RELEASES:
        try:
            explain.stock_text(plan, stock_boundaries(release, target, drafter), "")
        except PlanError:
            raise Finding("resolved, but stock's reading is refused") from None


def header(body: bytes) -> None:
    """A safetensors file."""
    from vllm_kimi_eagle3.layers.headers import CheckpointHeaders, read_header

    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
        file.write(body)
        file.flush()
        tensors = read_header(Path(file.name))
    if tensors and max(info.end for info in tensors.values()) > len(body):
        raise Finding("a tensor beyond the file")
    headers = CheckpointHeaders(tensors)
    headers.has("d2t")
    _ = headers.fc_in_features


def framed(body: bytes) -> None:
    """A safetensors file whose length is right: what follows a zero byte is data."""
    text, _, data = body.partition(b"\0")
    header(len(text).to_bytes(8, "little") + text + data)


def record(body: bytes) -> None:
    """An alignment record."""
    from vllm_kimi_eagle3.layers import alignment
    from vllm_kimi_eagle3.layers.files import load_json

    data: Any = load_json(body, "the record")
    if isinstance(data, dict):
        found = alignment.parse(data, "ab" * 32, "here")
        if alignment.parse(found.to_json(), "ab" * 32, "here") != found:
            raise Finding("a record that does not survive being written")
        found.summary()


def release(body: bytes) -> None:
    """A vLLM version."""
    from vllm_kimi_eagle3.layers import facts_of

    facts_of(body.decode("utf-8", "surrogateescape"))


PARSERS: tuple[Callable[[bytes], None], ...] = (pair, header, framed, record, release)


def one_input(data: bytes) -> None:
    """Give one input to the parser that its first byte chooses.

    Raises:
        Exception: whatever is neither a result nor a readable refusal: a finding.
    """
    if data:
        with refusing():
            PARSERS[data[0] % len(PARSERS)](data[1:])


def read_corpus() -> list[bytes]:
    """The kept inputs."""
    return [base64.b64decode(text) for text in json.loads(CORPUS.read_text())]


def fuzz(arguments: list[str]) -> None:
    """In a process of its own, which libFuzzer ends."""
    atheris: Any = importlib.import_module("atheris")  # where it is installed: it has no types

    with atheris.instrument_imports(include=["vllm_kimi_eagle3.layers"]):
        import vllm_kimi_eagle3.layers.explain

    assert vllm_kimi_eagle3.layers.explain
    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()


def steps(data: bytes) -> set[tuple[str, int, int]]:
    """The steps from line to line that an input takes through its parser."""
    taken: set[tuple[str, int, int]] = set()
    parser = str(data[0] % len(PARSERS)) if data else ""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if f"vllm_kimi_eagle3{os.sep}layers" not in frame.f_code.co_filename:
            return None
        last = [0]

        def line(frame: Any, event: str, argument: Any) -> Any:
            taken.add((parser + frame.f_code.co_filename, last[0], frame.f_lineno))
            last[0] = frame.f_lineno
            return line

        return line

    sys.settrace(trace)
    try:
        one_input(data)
    except Exception as error:
        taken.add((type(error).__name__, 0, 0))
    finally:
        sys.settrace(None)
    return taken


def minimised(inputs: Iterable[bytes]) -> list[bytes]:
    """The shortest inputs first, each kept that takes a step which no kept one takes."""
    kept: list[bytes] = []
    taken: set[tuple[str, int, int]] = set()
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        found = steps(data)
        if not found <= taken:
            kept.append(data)
            taken |= found
    return kept


def main(seconds: int) -> int:
    """Fuzz, minimise and keep the corpus. Returns 0, or 1 after a finding."""
    with tempfile.TemporaryDirectory() as scratch:
        old, words = Path(scratch) / "old", Path(scratch) / "words"
        old.mkdir()
        for number, data in enumerate(read_corpus()):
            (old / str(number)).write_bytes(data)
        words.write_text("".join(f'"\\"{key}\\""\n' for key in KEYS))
        command = [sys.executable, __file__, "--child", f"-dict={words}", f"-max_len={LONGEST}"]
        limits = ["-timeout=1", "-rss_limit_mb=1024", "-malloc_limit_mb=64", f"-artifact_prefix={ROOT}/"]
        run = [*command, *limits, f"-max_total_time={seconds}", "-print_final_stats=1", str(old)]
        found = subprocess.run(run).returncode
        kept = minimised(path.read_bytes() for path in old.iterdir())
    text = json.dumps([base64.b64encode(data).decode() for data in kept], indent=0)
    partial = CORPUS.with_suffix(".tmp")
    partial.write_text(text + "\n")
    partial.replace(CORPUS)
    print(f"{len(kept)} inputs, {sum(map(len, kept))} bytes kept in {CORPUS.relative_to(ROOT)}")
    return 1 if found else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fuzz(sys.argv[2:])
    elif sys.argv[1:2] == ["--one"]:
        one_input(Path(sys.argv[2]).read_bytes())
    else:
        sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else SECONDS))
