# SPDX-License-Identifier: Apache-2.0
"""The checkpoint oracle in its two sizes, and what the driver refuses to call observed; no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kimi_eagle3.reference import Cache, Target, fc_rows
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize
from vllm_kimi_eagle3.verify import capture
from vllm_kimi_eagle3.verify.capture import Call
from vllm_kimi_eagle3.verify.drive import CaptureError, Driver, Request
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle, cache_dtype

TOKENS = list(b"1, 2, 3, 4, 5, 6, 7, 8")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return materialize(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("boundaries", [(4, 7, 9), (0, 1, 10), (10,)])
def test_features_are_the_forward_s(pair: dict[str, Path], boundaries: tuple[int, ...]) -> None:
    target = Target.load(pair["kimi_k25"])
    assert torch.equal(target.features(TOKENS, boundaries), fc_rows(target.forward(TOKENS), boundaries))


@pytest.mark.parametrize("wrong", [(), (7, 4), (4, 4), (-1, 3), (3, 11)])
def test_boundaries_that_are_none(pair: dict[str, Path], wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"0\.\.10"):
        Target.load(pair["deepseek_v3"]).features(TOKENS, wrong)


def test_a_model_that_is_read_as_it_goes_says_the_same(pair: dict[str, Path]) -> None:
    whole, lazy = (
        CheckpointOracle(pair["kimi_k25"], None, (4, 7, 9), torch.bfloat16, lazy=lazy) for lazy in (False, True)
    )
    assert torch.equal(whole.features(TOKENS), lazy.features(TOKENS))
    rounded = whole.rounded(TOKENS)
    assert rounded is not None and torch.equal(rounded, lazy.rounded(TOKENS))
    assert 0 < (rounded - whole.features(TOKENS)).norm() / rounded.norm() < 0.1


@pytest.mark.parametrize("latent", [True, False])
def test_a_cache_of_a_smaller_dtype_costs_what_it_rounds(pair: dict[str, Path], latent: bool) -> None:
    def oracle(dtype: torch.dtype, cache: torch.dtype | None) -> CheckpointOracle:
        return CheckpointOracle(pair["kimi_k25"], None, (4, 7, 9), dtype, cache_dtype=cache, latent_cache=latent)

    plain = oracle(torch.float32, None)
    assert plain.rounded(TOKENS) is None
    right = plain.features(TOKENS)
    costs: list[float] = []
    for cache in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        rounded = oracle(torch.float32, cache).rounded(TOKENS)
        assert rounded is not None
        costs.append(float((rounded - right).norm() / right.norm()))
    # Eight bits of mantissa, then four and three with the leading one.
    assert 0 < 8 * costs[0] < costs[1] < costs[2] < 0.3
    # The model itself, and what is compared with it, are not rounded.
    assert torch.equal(oracle(torch.float32, torch.float8_e4m3fn).features(TOKENS), right)


def test_where_a_cache_rounds_matters_only_if_it_does(pair: dict[str, Path]) -> None:
    def rounded(cache: torch.dtype, *, latent: bool) -> torch.Tensor:
        oracle = CheckpointOracle(pair["kimi_k25"], None, (4,), cache_dtype=cache, latent_cache=latent)
        found = oracle.rounded(TOKENS)
        assert found is not None
        return found

    assert torch.equal(rounded(torch.float32, latent=True), rounded(torch.float32, latent=False))
    assert not torch.equal(rounded(torch.float8_e5m2, latent=True), rounded(torch.float8_e5m2, latent=False))


def test_cached_and_at_once_it_rounds_alike(pair: dict[str, Path]) -> None:
    target = Target.load(pair["kimi_k25"], cache_dtype=torch.float8_e4m3fn)
    plain = Target.load(pair["kimi_k25"])
    found = target.features(TOKENS, (4, 7))
    assert torch.equal(found, fc_rows(target.forward(TOKENS), (4, 7)))
    assert not torch.equal(found, plain.features(TOKENS, (4, 7)))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_a_cache_takes_the_largest_for_what_is_beyond_it(dtype: torch.dtype, most: float) -> None:
    (kept,) = Cache(dtype).extend(0, torch.tensor([[1e6, -1e30, 0.3]]))
    assert kept.dtype == torch.float32 and kept[0, :2].tolist() == [most, -most] and 0.29 < kept[0, 2] < 0.33


def test_names_of_caches() -> None:
    assert cache_dtype("auto", "bfloat16") is None and cache_dtype("bfloat16", "bfloat16") is None
    assert cache_dtype("bfloat16", "float32") == torch.bfloat16
    assert cache_dtype("fp8", "bfloat16") == cache_dtype("fp8_e4m3", "float16") == torch.float8_e4m3fn
    assert cache_dtype("fp8_e5m2", "float16") == torch.float8_e5m2
    with pytest.raises(ValueError, match="nvfp4 is not modelled by the reference, but auto, float16"):
        cache_dtype("nvfp4", "bfloat16")


class Engine:
    """Answers ``collective_rpc`` for some ranks, and ends each request in one step."""

    def __init__(self, *ranks: list[Call], dropped: int = 0, captured: Any = None) -> None:
        self.ranks, self.dropped = ranks, dropped
        self.captured = captured or [[4, 7, 9]] * len(ranks)
        self.names: list[str] = []

    def collective_rpc(self, function: Any) -> list[Any]:
        if function is capture.install:
            return [{"captured": captured} for captured in self.captured]
        return [(calls, self.dropped) for calls in self.ranks]

    def add_request(self, name: str, *_: Any) -> None:
        self.names.append(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.names)

    def step(self) -> list[Any]:
        return [SimpleNamespace(finished=True, request_id=self.names.pop(), outputs=[SimpleNamespace(token_ids=[5])])]


def call(rows: torch.Tensor, drafts: list[int], embeds: dict[int, torch.Tensor] | None = None) -> Call:
    return Call("r0-1a2b", 0, rows, [2, 5], [0, 1], drafts, 2, embeds)


ROWS = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
NORMS = torch.tensor([5.0, 10.0])
SEEN = {1: torch.tensor([1.0, 2.0])}


def test_ranks_that_agree_are_one() -> None:
    driver = Driver(Engine([call(ROWS, [1])], [call(NORMS, [1])]))
    (served,) = driver.run([Request([1, 2], 1)])
    assert driver.info["ranks"] == 2
    assert served.output_ids == [5] and served.calls[0].rows is ROWS


def test_ranks_that_embed_the_same_picture_agree() -> None:
    (served,) = Driver(Engine([call(ROWS, [1], SEEN)], [call(NORMS, [1], dict(SEEN))])).run([Request([1, 2], 1)])
    assert served.calls[0].embeds == SEEN


@pytest.mark.parametrize(
    ("engine", "word"),
    [
        (Engine([call(ROWS, [1])], [call(NORMS * 1.1, [1])]), "different inputs"),
        (Engine([call(ROWS, [1])], [call(NORMS, [2])]), "different inputs"),
        (Engine([call(ROWS, [1])], []), "different inputs"),
        (Engine([call(ROWS, [1], SEEN)], [call(NORMS, [1], {1: SEEN[1] * 2})]), "different inputs"),
        (Engine([call(ROWS, [1], SEEN)], [call(NORMS, [1], {0: SEEN[1]})]), "different inputs"),
        (Engine([call(ROWS, [1], SEEN)], [call(NORMS, [1])]), "different inputs"),
        (Engine([call(ROWS, [1])], dropped=3), "3 drafter calls"),
    ],
)
def test_what_was_not_seen_right_is_an_error(engine: Engine, word: str) -> None:
    with pytest.raises(CaptureError, match=word):
        Driver(engine).run([Request([1, 2], 1)])


def test_ranks_that_capture_other_layers() -> None:
    with pytest.raises(CaptureError, match="different layers"):
        Driver(Engine([], [], captured=[[4, 7, 9], [3, 6, 8]]))


def test_rows_beyond_the_limit_are_counted_and_dropped() -> None:
    recorder = capture._Recorder(rank=0, limit=20, owner=None)
    for _ in range(3):
        recorder.add("r0", ROWS, torch.tensor([2, 5]), torch.tensor([0, 1]), torch.tensor([1]), 2)
    assert (len(recorder.calls), recorder.dropped) == (1, 2)
    pictured = capture._Recorder(rank=0, limit=20, owner=None)
    pictured.add("r0", ROWS, torch.tensor([2, 5]), torch.tensor([0, 1]), torch.tensor([1]), 2, SEEN)
    assert (len(pictured.calls), pictured.dropped) == (0, 1), "a picture's embeddings take room, too"
