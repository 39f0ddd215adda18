# SPDX-License-Identifier: Apache-2.0
"""D21: who asks for what, which servers can, and that only their drafters change; the engine is in tests/pictures."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import releases
from vllm_kimi_eagle3.fixes import drafter_media
from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context


def server(choice: Any = None, stages: int = 1, width: int = 64, **speculative: Any) -> Any:
    target = SimpleNamespace(get_hidden_size=lambda: 64, enable_prompt_embeds=speculative.pop("prompt_embeds", False))
    draft = SimpleNamespace(get_hidden_size=lambda: width)
    record = {} if choice is None else {"drafter_media": choice}
    return SimpleNamespace(
        additional_config={"kimi_eagle3": record},
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=SimpleNamespace(target_model_config=target, draft_model_config=draft, **speculative),
    )


def test_the_server_s_configuration_decides_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drafter_media.chosen(server()) == "placeholder"
    assert drafter_media.chosen(SimpleNamespace(additional_config=None)) == "placeholder"
    monkeypatch.setenv("VLLM_KIMI_EAGLE3_DRAFTER_MEDIA", "last-token")
    assert drafter_media.chosen(server()) == "last-token"
    assert drafter_media.chosen(server("embedding")) == "embedding"
    for wrong in ("pixels", "", ["embedding"], {}, 0, False):
        with pytest.raises(PlanError, match=r"drafter_media is .*, but one of placeholder, embedding, last-token"):
            drafter_media.chosen(server(wrong))


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (server("embedding", stages=2), "pipeline"),
        (server("embedding", disable_padded_drafter_batch=True), "disable_padded_drafter_batch"),
        (server("embedding", parallel_drafting=True), "parallel_drafting"),
        (server("embedding", prompt_embeds=True), "enable_prompt_embeds"),
        (server("embedding", width=32), "width, 32, is not the target's, 64"),
    ],
)
def test_a_server_that_cannot_is_told_so(broken: Any, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        drafter_media.check(broken, "embedding")
    drafter_media.check(broken, "placeholder")


@pytest.mark.parametrize(("release", "can"), [("0.17.1", False), ("0.26.0", False), ("0.28.0", True), ("0.33.0", True)])
def test_v2_can_from_0_28_on(release: str, can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = SourceTree(releases.tree(release))
    monkeypatch.setattr(SourceTree, "installed", classmethod(lambda _: tree))
    asks = server("embedding")
    drafter_media.check(asks, "embedding")  # V1 can in every release
    asks.use_v2_model_runner = True
    if can:
        drafter_media.check(asks, "embedding")
    else:
        with pytest.raises(PlanError, match="V2"):
            drafter_media.check(asks, "embedding")
    del asks.use_v2_model_runner
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    if not can:
        with pytest.raises(PlanError, match="V2"):
            drafter_media.check(asks, "embedding")


def test_it_is_wanted_where_it_is_asked_for() -> None:
    def wanted(architecture: str, config: Any) -> bool:
        return drafter_media.with_choice(Context(architecture, "cpu", True, config))

    assert wanted("KimiK25ForConditionalGeneration", server("embedding"))
    assert not wanted("KimiK25ForConditionalGeneration", server())
    assert not wanted("KimiK25ForConditionalGeneration", server("pixels"))  # refused when it is configured
    assert not wanted("KimiK25ForConditionalGeneration", None)
    assert not wanted("DeepseekV3ForCausalLM", server("embedding"))


class Drafter:
    """The part of vLLM's drafters that matters: 20 tokens of width 2, token i's embedding is (i, i)."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.prefix = prefix
        self.config = SimpleNamespace(vocab_size=20)
        self.model = SimpleNamespace(embed_input_ids=lambda ids: ids[:, None].float().expand(-1, 2).clone())

    def embed_input_ids(self, input_ids: Any, multimodal_embeddings: Any = None, is_multimodal: Any = None) -> Any:
        return self.model.embed_input_ids(input_ids)


def made(config: Any) -> Any:
    class Installer:
        new: Any = None

        def original(self, target: str) -> Any:
            return Drafter.__init__

        def replace(self, target: str, new: Any) -> None:
            self.new = new

    installer: Any = Installer()
    drafter_media.install(installer)
    drafter = Drafter.__new__(Drafter)
    installer.new(drafter, vllm_config=config, prefix="model")
    assert drafter.prefix == "model"
    return drafter


IDS = torch.tensor([3, 9, 9, 4])
MASK = torch.tensor([False, True, True, False])
ROWS = [torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])]


def test_only_the_drafter_of_a_server_that_asks_is_changed() -> None:
    for config in (server(), server("placeholder"), SimpleNamespace(additional_config={}), SimpleNamespace()):
        drafter = made(config)
        assert not vars(drafter).keys() & {"embed_input_ids", "supports_multimodal_embeddings"}
        assert drafter.embed_input_ids(IDS, ROWS, MASK)[:, 0].tolist() == [3, 9, 9, 4]


@pytest.mark.parametrize(
    ("choice", "want"),
    [("embedding", [[3, 3], [0.5, 0.5], [0.25, 0.75], [4, 4]]), ("last-token", [[3, 3], [19, 19], [19, 19], [4, 4]])],
)
def test_what_the_drafter_sees(choice: str, want: list[list[float]]) -> None:
    drafter = made(server(choice))
    assert drafter.supports_multimodal_embeddings is True
    assert drafter.embed_input_ids(IDS, ROWS, MASK).tolist() == want
    # Text alone: as V1 calls it in a draft step, with nothing; and as V2's dummy run does, with nothing in it.
    for media in ((), (None, None), ([], torch.zeros(4, dtype=torch.bool))):
        assert drafter.embed_input_ids(IDS, *media)[:, 0].tolist() == [3, 9, 9, 4]


def test_embeddings_that_do_not_fit_are_refused() -> None:
    drafter = made(server("embedding"))
    for rows in (ROWS[:1], ROWS * 2):
        with pytest.raises(ValueError, match=f"{len(rows)} embeddings of pictures for 2 places"):
            drafter.embed_input_ids(IDS, rows, MASK)


def test_a_copy_embeds_with_its_own_weights() -> None:
    drafter = made(server("embedding"))
    other = copy.deepcopy(drafter)
    other.model.embed_input_ids = lambda ids: torch.full((len(ids), 2), 7.0)
    assert other.embed_input_ids(IDS, ROWS, MASK)[0].tolist() == [7, 7]
    assert drafter.embed_input_ids(IDS, ROWS, MASK)[0].tolist() == [3, 3]
