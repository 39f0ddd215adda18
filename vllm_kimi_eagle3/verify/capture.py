# SPDX-License-Identifier: Apache-2.0
"""Record what the drafter receives, in the worker that runs it.

The functions here are sent to every worker by vLLM's ``collective_rpc``, so they work wherever the model lives, with
tensor parallelism too: the rows are the same on every rank, so rank 0 keeps them and the others keep their norms.

Known to the recorder are the two model runners' ways to call a drafter: ``drafter.propose`` (V1,
v1/worker/gpu_model_runner.py and v1/spec_decode) and ``speculator.propose`` (V2, v1/worker/gpu). Both are Python in
eager, compiled and CUDA-graph runs alike, so what they are given is seen in each. What happens inside a drafter's
captured graph is not seen; its drafts are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_kimi_eagle3_recorder"


@dataclass
class Call:
    """What the drafter received for one request in one step, and proposed.

    Attributes:
        request: the engine's id of the request.
        step: number of the drafter's call in this worker, from 0; calls of one batch share it.
        rows: (T, n * H), fc's input for the confirmed tokens, on the CPU. The engine carries rejected tokens' rows
            behind them, which nothing that matters attends to. On ranks other than 0: (T,), the rows' norms.
        ids: T token ids; row i's is the token after ``positions[i]``.
        positions: T positions.
        drafts: k token ids.
        scheduled: rows that the target ran for this request, rejected ones included.
        embeds: by index of a row, the embedding that was given in place of its id's, (H_draft,): a picture's. None
            where the runner does not show it.
    """

    request: str
    step: int
    rows: Tensor
    ids: list[int]
    positions: list[int]
    drafts: list[int]
    scheduled: int
    embeds: dict[int, Tensor] | None = None


@dataclass
class _Recorder:
    """One worker's calls since the last drain."""

    rank: int
    limit: int
    """Bytes of rows to hold; what comes after is counted and dropped."""
    owner: Any
    step: int = 0
    held: int = 0
    dropped: int = 0
    calls: list[Call] = field(default_factory=list[Call])
    undo: list[str] = field(default_factory=list[str])
    hooks: list[Any] = field(default_factory=list[Any])
    received: tuple[Tensor, Tensor] | None = None
    embeds: dict[int, Tensor] | None = None
    embedded: bool = False
    count: int = 0
    """Rows of the drafter's first pass (V2)."""

    def add(
        self,
        request: str,
        rows: Tensor,
        ids: Tensor,
        positions: Tensor,
        drafts: Tensor,
        scheduled: int,
        embeds: dict[int, Tensor] | None = None,
    ) -> None:
        kept = rows.detach().to("cpu", copy=True) if self.rank == 0 else rows.detach().float().norm(dim=-1).cpu()
        self.held += sum(row.numel() * row.element_size() for row in (kept, *(embeds or {}).values()))
        if self.held > self.limit:
            self.dropped += 1
            return
        # M-RoPE has three positions a token; text has the same in all of them.
        flat = positions[0] if positions.dim() == 2 else positions
        self.calls.append(
            Call(request, self.step, kept, ids.tolist(), flat.tolist(), drafts.tolist(), scheduled, embeds)
        )

    def replace(self, name: str, function: Any) -> None:
        setattr(self.owner, name, function)
        self.undo.append(name)


def install(worker: Any, limit: int = 256 << 20) -> dict[str, Any]:
    """Start to record in this worker.

    Args:
        worker: given by ``collective_rpc``.
        limit: bytes of rows to hold between two drains.

    Returns:
        What the worker knows: runner, rank, the boundaries that the model captures, dtype, the cache's, whether that
        holds latents, block size.

    Raises:
        RuntimeError: no drafter, or recording already.
    """
    runner = worker.model_runner
    v2 = getattr(runner, "speculator", None) is not None
    drafter = runner.speculator if v2 else getattr(runner, "drafter", None)
    if drafter is None:
        raise RuntimeError("this worker has no drafter: is speculation configured?")
    if hasattr(runner, _ATTRIBUTE):
        raise RuntimeError("this worker records already")
    recorder = _Recorder(rank=int(getattr(worker, "rank", 0)), limit=limit, owner=drafter)
    setattr(runner, _ATTRIBUTE, recorder)
    (_record_v2 if v2 else _record_v1)(runner, recorder)
    config = runner.vllm_config
    return {
        "runner": "V2" if v2 else "V1",
        "rank": recorder.rank,
        "drafter": type(drafter.model).__name__,
        "captured": captured_boundaries(runner),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "cache_dtype": config.cache_config.cache_dtype,
        "mla": bool(config.model_config.use_mla),
        "block_size": config.cache_config.block_size,
        "device": str(getattr(runner, "device", "")),
        "drafter_max_model_len": getattr(runner, "effective_drafter_max_model_len", None),
    }


def drain(worker: Any) -> tuple[list[Call], int]:
    """Hand over the calls recorded since the last time, and how many were dropped for want of room."""
    recorder: _Recorder = getattr(worker.model_runner, _ATTRIBUTE)
    calls, dropped = recorder.calls, recorder.dropped
    recorder.calls, recorder.held, recorder.dropped = [], 0, 0
    return calls, dropped


def remove(worker: Any) -> None:
    """Stop recording; the drafter is as it was."""
    recorder: _Recorder = getattr(worker.model_runner, _ATTRIBUTE)
    for name in recorder.undo:
        delattr(recorder.owner, name)
    for hook in recorder.hooks:
        hook.remove()
    delattr(worker.model_runner, _ATTRIBUTE)


def inner_model(runner: Any) -> Any:
    """The target's ``DeepseekV2Model``, whatever wraps it."""
    model: Any = runner.get_model()
    model = getattr(model, "language_model", model)
    return model.model


def captured_boundaries(runner: Any) -> list[int] | None:
    """The boundaries that the target's model says it captures; None where it does not say."""
    model = inner_model(runner)
    layers = getattr(model, "aux_hidden_state_layers", None)
    # The overlay captures the embeddings outside the decoder (D23).
    embeddings = [0] if getattr(model, "kimi_eagle3_embeddings", False) else []
    return None if layers is None else embeddings + [int(i) for i in layers]


def _received(recorder: _Recorder) -> tuple[Tensor, Tensor]:
    """The ids and positions of the first pass that the drafter just ran."""
    if recorder.received is None:
        raise RuntimeError("the drafter ran without announcing its first pass: this vLLM is not known here")
    return recorder.received


def _other_embeds(model: Any, ids: Tensor, rows: Tensor) -> dict[int, Tensor]:
    """By index, those of the embeddings that a drafter is given which are not their id's."""
    other = (rows != model.embed_input_ids(ids)).any(-1).nonzero().flatten().tolist()
    return dict(zip(other, rows[other].detach().cpu().unbind(), strict=True))


def _within(embeds: dict[int, Tensor] | None, span: slice) -> dict[int, Tensor] | None:
    """One request's part of a batch's embeddings, counted from its first row."""
    if embeds is None:
        return None
    return {i - span.start: row for i, row in embeds.items() if span.start <= i < span.stop}


def _record_v1(runner: Any, recorder: _Recorder) -> None:
    drafter = recorder.owner
    propose, first_pass = drafter.propose, drafter.set_inputs_first_pass

    def set_inputs_first_pass(*args: Any, **kwargs: Any) -> Any:
        result = first_pass(*args, **kwargs)
        # The buffers that the drafter's model reads, not what they were made from.
        count = result[0]
        recorder.received = drafter.input_ids[:count].clone(), drafter._get_positions(count).clone()
        recorder.embedded, recorder.embeds = False, None
        return result

    def embedding(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        # What the first pass really embeds: its ids, or rows, of which those that are not their id's are kept.
        if recorder.received is None or recorder.embedded:
            return
        recorder.embedded = True
        ids, rows = recorder.received[0], kwargs.get("inputs_embeds")
        if kwargs.get("input_ids") is not None:
            ids.copy_(kwargs["input_ids"][: len(ids)])
            recorder.embeds = {}
        elif rows is not None and hasattr(model, "embed_input_ids"):
            recorder.embeds = _other_embeds(model, ids, rows[: len(ids)])

    def recording(*args: Any, **kwargs: Any) -> Any:
        # The engine reuses its buffers and changes its metadata: copy before it runs.
        rows = kwargs["target_hidden_states"].clone()
        starts = kwargs["common_attn_metadata"].query_start_loc.tolist()
        last = kwargs.get("token_indices_to_sample", kwargs.get("last_token_indices"))
        ends = starts[1:] if last is None else [i + 1 for i in last.tolist()]
        drafts = propose(*args, **kwargs)
        ids, positions = _received(recorder)
        for i, request in enumerate(runner.input_batch.req_ids[: len(ends)]):
            span = slice(starts[i], ends[i])
            scheduled = int(starts[i + 1] - starts[i])
            given = _within(recorder.embeds, span)
            recorder.add(request, rows[span], ids[span], positions[..., span], drafts[i], scheduled, given)
        recorder.step += 1
        return drafts

    if isinstance(drafter.model, torch.nn.Module):  # a wrapper for CUDA graphs is none
        recorder.hooks.append(drafter.model.register_forward_pre_hook(embedding, with_kwargs=True))
    recorder.replace("set_inputs_first_pass", set_inputs_first_pass)
    recorder.replace("propose", recording)


def _record_v2(runner: Any, recorder: _Recorder) -> None:
    speculator = recorder.owner
    propose = speculator.propose
    begin, end = (getattr(speculator, f"on_prefill_{when}", None) for when in ("begin", "end"))

    def on_prefill_begin(*args: Any, **kwargs: Any) -> Any:
        buffers = speculator.input_buffers
        recorder.received = buffers.input_ids.clone(), buffers.positions.clone()
        return begin(*args, **kwargs) if begin is not None else None

    def on_prefill_end(*args: Any, **kwargs: Any) -> Any:
        # The buffer that the model has just read, inside a CUDA graph too. A drafter without one embeds its ids.
        embeds, count = getattr(speculator, "inputs_embeds", None), recorder.count
        ids = _received(recorder)[0][:count]
        recorder.embeds = {} if embeds is None else _other_embeds(speculator.model, ids, embeds[:count])
        return end(*args, **kwargs) if end is not None else None

    def recording(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or kwargs.get("is_profile"):
            return propose(input_batch, *args, **kwargs)
        names = ("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled")
        given = {**dict(zip((*names, "num_rejected"), args, strict=False)), **kwargs}
        rows = torch.cat(given["aux_hidden_states"], dim=-1).clone()
        starts = input_batch.query_start_loc_np.tolist()
        rejected = given["num_rejected"].tolist()
        recorder.received, recorder.embeds, recorder.count = None, None, starts[-1]
        drafts = propose(input_batch, *args, **kwargs).clone()
        ids, positions = _received(recorder)
        for i in range(input_batch.num_reqs):
            span = slice(starts[i], starts[i + 1] - rejected[i])
            scheduled = int(starts[i + 1] - starts[i])
            given = _within(recorder.embeds, span)
            recorder.add(input_batch.req_ids[i], rows[span], ids[span], positions[span], drafts[i], scheduled, given)
        recorder.step += 1
        return drafts

    if begin is not None:
        recorder.replace("on_prefill_begin", on_prefill_begin)
    if end is not None:
        recorder.replace("on_prefill_end", on_prefill_end)
    recorder.replace("propose", recording)
