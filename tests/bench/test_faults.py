# SPDX-License-Identifier: Apache-2.0
"""Faults put into the speculative loop, one at a time: named right, or "not enough evidence"; never a wrong name.

The loop is the torch reference's, on the trained tiny pair, counted as a server counts; the calibration always sees
true states, as it does in real life. Ten healthy variations raise no alarm. The matrix is printed: ``pytest -s``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kimi_eagle3.bench.statistics import Share
from vllm_kimi_eagle3.bench.verdict import Evidence, Name, Verdict, decide
from vllm_kimi_eagle3.calibrate import measure, texts
from vllm_kimi_eagle3.calibrate.texts import Written
from vllm_kimi_eagle3.calibrate.trials import lay_out
from vllm_kimi_eagle3.reference import Cache, Drafter, Target
from vllm_kimi_eagle3.reference.drafter import DrafterSession
from vllm_kimi_eagle3.tiny_kimi import held_out_prompts
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize

RIGHT, EARLY, LATE, DEFAULT = (4, 7, 9), (3, 6, 8), (5, 8, 10), (2, 5, 7)
K = 3
Streams = dict[int, torch.Tensor]


@dataclass
class Fault:
    """What the server does wrong.

    Attributes:
        names: the verdicts that are right for it, ``UNKNOWN`` besides.
        captured: the boundaries that the server says it captures.
        fed: those that really reach the drafter, in that order; None: as captured.
        spoil: changes the streams on their way.
        breaks: changes the drafter itself, for the server and for the calibration alike.
        session: how the server's drafter runs.
        speedup: as measured.
        must: whether "not enough evidence" is too little.
    """

    names: set[Name]
    captured: tuple[int, ...] = RIGHT
    fed: tuple[int, ...] | None = None
    spoil: Callable[[Streams], Streams] = lambda streams: streams
    breaks: Callable[[Drafter], None] = lambda drafter: None
    session: type[DrafterSession] = DrafterSession
    speedup: float | None = 1.5
    must: bool = True


class LostKeys(DrafterSession):
    """Later passes see none of the rows that the earlier ones of this step wrote."""

    def later_cache(self, confirmed: int) -> Cache:
        self.cache.truncate(confirmed)
        return self.cache

    @torch.inference_mode()
    def propose(self, rows: torch.Tensor, token_ids: Sequence[int], first_position: int, k: int) -> Any:
        d, ids, drafts = self.drafter, list(token_ids), list[int]()
        hidden = d.combine_hidden_states(rows)
        confirmed, cache = self.cache.length + len(ids), self.cache
        for _ in range(k):
            normed, carried = d.forward(ids, hidden, cache)
            ids = [int(d.draft_to_target[d.logits(normed[-1]).argmax()])]
            drafts += ids
            hidden = carried[-1:]
            cache = self.later_cache(confirmed)
        self.cache.truncate(confirmed)
        return type("Proposal", (), {"token_ids": drafts})


class NoKeys(LostKeys):
    """Later passes see no keys at all, as with a block table of zeros."""

    def later_cache(self, confirmed: int) -> Cache:
        self.cache.truncate(confirmed)
        return Cache()


class LateKeys(LostKeys):
    """Later passes have lost the newest confirmed rows as well: their positions lag behind."""

    def later_cache(self, confirmed: int) -> Cache:
        cache = Cache()
        cache._layers = dict(self.cache._layers)
        cache.truncate(max(confirmed - 12, 1))
        self.cache.truncate(confirmed)
        return cache


class LostCarry(LostKeys):
    """Later passes are given zeros for the state that the pass before carried over."""

    @torch.inference_mode()
    def propose(self, rows: torch.Tensor, token_ids: Sequence[int], first_position: int, k: int) -> Any:
        d, ids, drafts = self.drafter, list(token_ids), list[int]()
        hidden = d.combine_hidden_states(rows)
        confirmed = self.cache.length + len(ids)
        for _ in range(k):
            normed, carried = d.forward(ids, hidden, self.cache)
            ids = [int(d.draft_to_target[d.logits(normed[-1]).argmax()])]
            drafts += ids
            hidden = torch.zeros_like(carried[-1:])
        self.cache.truncate(confirmed)
        return type("Proposal", (), {"token_ids": drafts})


class PadEmbeddings(DrafterSession):
    """The embedding of a pad token instead of the newest tokens'."""

    def propose(self, rows: torch.Tensor, token_ids: Sequence[int], first_position: int, k: int) -> Any:
        return super().propose(rows, [268] * len(token_ids), first_position, k)


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Streams], Streams]:
    return lambda streams: {b: change(s) for b, s in streams.items()}


def normed(stream: torch.Tensor) -> torch.Tensor:
    return stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-6)


def without_residual(streams: Streams) -> Streams:
    return {b: s - streams[b - 1] if b else s for b, s in streams.items()}


def turn_features(drafter: Drafter) -> None:
    """The features of another model: the same information in another basis."""
    weight = drafter.weights["fc.weight"]
    basis, _ = torch.linalg.qr(
        torch.randn(weight.shape[1], weight.shape[1], generator=torch.Generator().manual_seed(3))
    )
    drafter.weights = {**drafter.weights, "fc.weight": weight @ basis}


def untrain(drafter: Drafter) -> None:
    generator = torch.Generator().manual_seed(4)
    drafter.weights = {
        name: weight if weight.dim() < 2 or "embed" in name else torch.randn(weight.shape, generator=generator) / 16
        for name, weight in drafter.weights.items()
    }


def shuffle(drafter: Drafter) -> None:
    order = torch.randperm(len(drafter.draft_to_target), generator=torch.Generator().manual_seed(5))
    drafter.draft_to_target = drafter.draft_to_target[order]


OFF, BAD, OWN = {Name.MISALIGNED}, {Name.CORRUPTED}, {Name.RECURRENCE}
FAULTS: dict[str, Fault] = {
    "one layer early": Fault(OFF, captured=EARLY),
    "one layer late": Fault(OFF, captured=LATE),
    "default layers": Fault(OFF, captured=DEFAULT),
    "last state one early": Fault(OFF, captured=(4, 7, 8), must=False),
    "first state one early": Fault(OFF, captured=(3, 7, 9), must=False),
    "one early, said to be right": Fault(BAD, fed=EARLY, must=False),
    "states permuted": Fault(BAD, fed=(9, 4, 7)),
    "post-norm states": Fault(BAD, spoil=each(normed), must=False),
    "without residual": Fault(BAD, spoil=without_residual),
    "last step's states": Fault(BAD, spoil=each(lambda s: torch.roll(s, 4, 0))),
    "zeros": Fault(BAD, spoil=each(torch.zeros_like)),
    "half the states doubled": Fault(BAD, spoil=each(lambda s: s * torch.linspace(0.2, 4, s.shape[-1])), must=False),
    "pad embeddings": Fault(BAD, session=PadEmbeddings),
    "another target's drafter": Fault({Name.UNFIT}, breaks=turn_features),
    "untrained drafter": Fault({Name.UNFIT}, breaks=untrain),
    "d2t shuffled": Fault({Name.VOCABULARY}, breaks=shuffle),
    "drafter's KV of later steps lost": Fault(OWN, session=LostKeys, must=False),
    "drafter sees no KV in later steps": Fault(OWN, session=NoKeys),
    "drafter's positions lag in later steps": Fault(OWN, session=LateKeys, must=False),
    "carried state lost": Fault(OWN, session=LostCarry, must=False),
    "slow verify step": Fault({Name.WALL}, speedup=0.66),
}


class Loop:
    """A drafter whose sessions are of a given kind."""

    def __init__(self, drafter: Drafter, session: type[DrafterSession]) -> None:
        self.drafter, self.session = drafter, session

    def start(self) -> DrafterSession:
        return self.session(self.drafter)


@dataclass
class Bench:
    """What every run starts from."""

    folder: Path
    target: Target
    written: list[Written]
    calibrated: dict[Any, tuple[Drafter, dict[str, Any]]] = field(default_factory=dict)

    def drafter(self, kind: str = "gqa") -> Drafter:
        return Drafter.load(self.folder / f"eagle3_{kind}_nested", self.target)

    def known(self, fault: Fault, kind: str, k: int, chosen: slice) -> tuple[Drafter, dict[str, Any]]:
        """The drafter, and what a calibration says about it; worked out once for faults that leave it alone."""
        key = (fault.breaks.__qualname__, fault.captured, kind, k, chosen.start, chosen.stop)
        if key not in self.calibrated:
            drafter = self.drafter(kind)
            fault.breaks(drafter)
            written = self.written[chosen]
            found = measure.run_trials(drafter, written, [trial for trial in lay_out(EARLY, 10) if trial.whole])
            best = max(found, key=lambda trial: found[trial].share.rate)
            shares: dict[tuple[int, ...], Share] = {trial.boundaries: g.share for trial, g in found.items()}
            if fault.captured not in shares:
                shares[fault.captured] = measure.guess(drafter, written, fault.captured).share
            expected = tuple(measure.simulate(drafter, written, fault.captured, k))
            facts = {"trials": shares, "relabelled": measure.relabelled(found[best]), "reference": expected}
            self.calibrated[key] = drafter, facts
        return self.calibrated[key]

    def evidence(self, fault: Fault, *, kind: str = "gqa", k: int = K, chosen: slice = slice(None)) -> Evidence:
        drafter, facts = self.known(fault, kind, k, chosen)
        spoilt = [replace(text, streams=fault.spoil(text.streams)) for text in self.written[chosen]]
        loop: Any = Loop(drafter, fault.session)
        live = measure.simulate(loop, spoilt, fault.fed or fault.captured, k)
        accepted = tuple(share.hits for share in live)
        return Evidence(live[0].total, accepted, speedup=fault.speedup, captured=fault.captured, **facts)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("pair")
    target = Target.load(materialize(folder)["deepseek_v3"])
    prompts = held_out_prompts()[::3]
    return Bench(folder, target, texts.write(target, prompts, 96, range(11), temperature=0))


def show(name: str, evidence: Evidence, verdict: Verdict) -> None:
    rates = " ".join(f"{share.rate:.2f}" for share in evidence.positions)
    print(f"{name:40} {rates:24} {verdict.name.value}")


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_named_or_nothing_is(bench: Bench, name: str) -> None:
    fault = FAULTS[name]
    evidence = bench.evidence(fault)
    verdict = decide(evidence)
    show(name, evidence, verdict)
    if verdict.name is Name.HEALTHY:
        # Some faults hardly matter to this small drafter: healthy is right where every count is as without the fault.
        assert not fault.must
        pairs = zip(evidence.positions, evidence.reference, strict=True)
        assert all(live.high >= sound.low for live, sound in pairs), (verdict, evidence)
        return
    assert verdict.name in fault.names | (set() if fault.must else {Name.UNKNOWN}), (verdict, evidence)
    if verdict.name is Name.MISALIGNED:
        assert verdict.boundaries == RIGHT
        assert verdict.shift == tuple(right - taken for right, taken in zip(RIGHT, fault.captured, strict=True))


HEALTHY: dict[str, dict[str, Any]] = {
    **{f"k = {k}": {"k": k} for k in (1, 2, 4, 5)},
    "k = 3": {},
    "MLA drafter": {"kind": "mla"},
    "MLA drafter, k = 1": {"kind": "mla", "k": 1},
    "other prompts": {"chosen": slice(0, 11)},
    "more other prompts": {"chosen": slice(3, 14)},
    "half precision's noise": {"noise": 2**-9},
}


@pytest.mark.parametrize("name", list(HEALTHY))
def test_no_alarm_on_a_healthy_pair(bench: Bench, name: str) -> None:
    options = dict(HEALTHY[name])
    noise = options.pop("noise", 0.0)
    generator = torch.Generator().manual_seed(6)
    rounding = each(lambda s: s * (1 + noise * (2 * torch.rand(s.shape, generator=generator) - 1)))
    evidence = bench.evidence(Fault(set(), spoil=rounding), **options)
    verdict = decide(evidence)
    show(name, evidence, verdict)
    assert verdict.name in (Name.HEALTHY, Name.UNKNOWN), (verdict, evidence)
    assert verdict.name is Name.HEALTHY or evidence.drafts < 300
