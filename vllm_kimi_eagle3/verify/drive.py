# SPDX-License-Identifier: Apache-2.0
"""Run requests on an engine step by step, so that they join and leave batches when they are told to.

Works on anything with vLLM's ``LLMEngine`` methods (0.15 to 0.33): ``add_request``, ``step``, ``collective_rpc``,
``has_unfinished_requests``. With the engine core in this process a step is exactly one step of the scheduler; in a
process of its own it runs ahead, and joins are only roughly where they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kimi_eagle3.reference.ops import Media
from vllm_kimi_eagle3.verify import capture
from vllm_kimi_eagle3.verify.capture import Call


@dataclass(frozen=True)
class Request:
    """A greedy request: prompt token ids, max_tokens, stop token ids, and the step before which it joins.

    ``media`` is what vLLM takes as ``multi_modal_data``; the prompt has one placeholder for each item.
    """

    prompt_ids: list[int]
    max_tokens: int
    stop_ids: Collection[int] = ()
    joins_at: int = 0
    media: Mapping[str, Any] | None = None


@dataclass
class Served:
    """A request and what came of it; ``calls`` are its drafter calls, in order.

    With pictures, ``prompt_ids`` become the engine's, each placeholder as often as its picture has tokens, and
    ``media`` is what stands in for them, by place in the prompt, if somebody works it out; ``rounded_media`` is that
    worked out in the engine's dtype.
    """

    name: str
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list[int])
    calls: list[Call] = field(default_factory=list[Call])
    media: Media | None = None
    rounded_media: Media | None = None


class CaptureError(RuntimeError):
    """The engine cannot be observed. One sentence."""


class Driver:
    """An engine whose drafter is observed.

    Args:
        engine: an ``LLMEngine``.
        record: whether to observe the drafter. It needs the engine core in this process.

    Raises:
        CaptureError: the ranks disagree about what they capture.
    """

    def __init__(self, engine: Any, *, record: bool = True) -> None:
        self.engine = engine
        self.record = record
        self.calls_seen = 0
        self._count = 0
        self.info: dict[str, Any] = {}
        if record:
            infos: list[dict[str, Any]] = engine.collective_rpc(capture.install)
            if any(info["captured"] != infos[0]["captured"] for info in infos):
                raise CaptureError(f"the ranks capture different layers: {[info['captured'] for info in infos]}")
            self.info = {**infos[0], "ranks": len(infos)}

    def close(self) -> None:
        """Stop observing."""
        if self.record:
            self.engine.collective_rpc(capture.remove)

    def run(
        self,
        requests: Sequence[Request],
        progress: Callable[[int], None] | None = None,
        on_calls: Callable[[list[Call]], list[Call]] | None = None,
    ) -> list[Served]:
        """Serve the requests to their end.

        Args:
            requests: each joins before its step, counted from 0 within this run.
            progress: told how many requests have ended.
            on_calls: sees the calls of each step, and returns those to keep.

        Raises:
            CaptureError: rows were lost, or the ranks gave their drafters different rows.
        """
        served = [Served(f"r{self._count + i}", list(r.prompt_ids)) for i, r in enumerate(requests)]
        by_name = {s.name: s for s in served}
        pictured = {s.name for s, r in zip(served, requests, strict=True) if r.media is not None}
        self._count += len(served)
        waiting = sorted(range(len(requests)), key=lambda i: requests[i].joins_at)
        step, ended = 0, 0
        while waiting or self.engine.has_unfinished_requests():
            while waiting and (requests[waiting[0]].joins_at <= step or not self.engine.has_unfinished_requests()):
                index = waiting.pop(0)
                self._add(served[index].name, requests[index])
            for output in self.engine.step():
                if output.finished:
                    one = by_name[output.request_id]
                    one.output_ids = list(output.outputs[0].token_ids)
                    if one.name in pictured:
                        one.prompt_ids = list(output.prompt_token_ids)
                    ended += 1
                    if progress is not None:
                        progress(ended)
            if self.record:
                calls = self._drain()
                for call in on_calls(calls) if on_calls else calls:
                    # vLLM appends a random suffix to the names it is given.
                    name = call.request if call.request in by_name else call.request.rpartition("-")[0]
                    if name in by_name:
                        by_name[name].calls.append(call)
            step += 1
        return served

    def _add(self, name: str, request: Request) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0,
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop_ids),
            ignore_eos=True,
            detokenize=False,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
        if request.media is not None:
            prompt["multi_modal_data"] = request.media
        self.engine.add_request(name, prompt, parameters)

    def _drain(self) -> list[Call]:
        ranks: list[tuple[list[Call], int]] = self.engine.collective_rpc(capture.drain)
        (first, dropped), others = ranks[0], ranks[1:]
        if dropped:
            raise CaptureError(f"{dropped} drafter calls held more rows than there was room for; use shorter prompts")
        self.calls_seen += len(first)
        for calls, _ in others:
            same = len(calls) == len(first) and all(
                a.ids == b.ids and a.positions == b.positions and a.drafts == b.drafts and _embed_alike(a, b)
                for a, b in zip(first, calls, strict=True)
            )
            # Ranks hold the same all-reduced states, so their norms agree to rounding.
            if not same or any(
                not a.rows.float().norm(dim=-1).allclose(b.rows, rtol=1e-2) for a, b in zip(first, calls, strict=True)
            ):
                raise CaptureError("tensor-parallel ranks gave their drafters different inputs")
        return first


def _embed_alike(a: Call, b: Call) -> bool:
    """Whether two ranks' drafters were given the same embeddings in place of their ids'."""
    if a.embeds is None or b.embeds is None:
        return a.embeds is b.embeds
    return a.embeds.keys() == b.embeds.keys() and all(
        row.float().allclose(b.embeds[i].float(), rtol=1e-2, atol=1e-3) for i, row in a.embeds.items()
    )
