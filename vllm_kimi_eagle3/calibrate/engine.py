# SPDX-License-Identifier: Apache-2.0
"""Text that the target itself writes, and what its layers held meanwhile. On vLLM: any size, quantisation and TP.

The target is served without a drafter, in eager mode, one request at a time. In the worker, hooks on the decoder's
layers take the stream that enters each wanted boundary, which is the same on every tensor-parallel rank, so rank 0
writes it to a file; nothing is held in memory. The drafter reads the file afterwards, as often as there are trials.

Eager mode, because hooks don't run in a compiled graph; not float16, where vLLM scales the stream (D16).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_kimi_eagle3.calibrate.texts import Written
from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.verify.capture import inner_model

_ATTRIBUTE = "_kimi_eagle3_streams"
FILE_BYTES = 64 << 30
"""Largest file of streams: on Kimi-K2.5, with nine boundaries of 14 kB a token, half a million tokens."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class _Streams:
    """In a worker: hooks that append (rows, boundaries, H) to the file, in the model's dtype."""

    def __init__(self, model: Any, boundaries: Sequence[int], path: str | None) -> None:
        self.boundaries = list(boundaries)
        self.file = None if path is None else Path(path).open("ab")  # noqa: SIM115, closed by remove()
        self.next = 0
        """The position of the next row."""
        self.written = 0
        """Rows since the last drain."""
        self.seen: dict[int, Tensor] = {}
        self.handles = [
            self._module(model, b).register_forward_pre_hook(self._hook(b), with_kwargs=True) for b in self.boundaries
        ]
        self.positions: Tensor | None = None
        self.handles.append(model.layers[0].register_forward_pre_hook(self._begin, with_kwargs=True))

    @staticmethod
    def _module(model: Any, boundary: int) -> Any:
        """What boundary b enters: layer b, or behind the last layer the final norm."""
        return model.norm if boundary == len(model.layers) else model.layers[boundary]

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        self.positions = args[0] if args else kwargs["positions"]

    def _hook(self, boundary: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.dim() == 2]
            # (hidden, residual): what the layer before wrote, and the stream before it. Behind the embedding only one.
            self.seen[boundary] = given[0].clone() if len(given) == 1 else given[0] + given[1]
            if boundary == self.boundaries[-1]:
                self._end()

        return hook

    def _end(self) -> None:
        assert self.positions is not None
        flat: list[int] = (self.positions[0] if self.positions.dim() == 2 else self.positions).tolist()
        # Rows that only pad a batch don't continue the text.
        rows = 0
        while rows < len(flat) and flat[rows] == self.next + rows:
            rows += 1
        self.next, self.written = self.next + rows, self.written + rows
        if self.file is not None and rows:
            block = torch.stack([self.seen[b][:rows] for b in self.boundaries], dim=1).cpu().contiguous()
            self.file.write(block.view(torch.uint8).numpy().tobytes())
        self.seen.clear()

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.file is not None:
            self.file.close()


def install(worker: Any, boundaries: Sequence[int], path: str) -> dict[str, Any]:
    """Start to write streams; for ``collective_rpc``. Raises RuntimeError when the layers are not all here."""
    runner = worker.model_runner
    model = inner_model(runner)
    if any(type(layer).__name__ == "PPMissingLayer" for layer in model.layers):
        raise RuntimeError("the layers are spread over pipeline stages")
    rank = int(getattr(worker, "rank", 0))
    setattr(runner, _ATTRIBUTE, _Streams(model, boundaries, path if rank == 0 else None))
    return {"layers": len(model.layers), "device": str(getattr(runner, "device", ""))}


def drain(worker: Any) -> int:
    """How many rows of the text that just ended were seen; begins another text."""
    streams: _Streams = getattr(worker.model_runner, _ATTRIBUTE)
    if streams.file is not None:
        streams.file.flush()
    rows, streams.written, streams.next = streams.written, 0, 0
    return rows


def remove(worker: Any) -> None:
    """Stop writing."""
    getattr(worker.model_runner, _ATTRIBUTE).close()
    delattr(worker.model_runner, _ATTRIBUTE)


# ---------------------------------------------------------------------------------------------------------------------


def write(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    boundaries: Iterable[int],
    folder: Path,
    *,
    temperature: float,
    stop: frozenset[int] = frozenset(),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[list[Written], str]:
    """As ``texts.write``: each prompt continued greedily, and sampled at ``temperature`` (0 leaves that out).

    Args:
        engine: an ``LLMEngine`` without speculation and without prefix caching, eager, its core in this process.
        prompts: token ids.
        tokens: to write for each.
        boundaries: whose streams to keep.
        folder: for the file of streams, which is to live as long as the texts.
        temperature: of the sampled texts.
        stop: tokens that end a text.
        progress: told how many texts are written.

    Returns:
        The texts, whose streams are mapped from the file, and the device.

    Raises:
        PlanError: the streams don't fit on the disk, or not all of them were seen.
    """
    from vllm import SamplingParams

    kept, config = sorted(set(boundaries)), engine.vllm_config.model_config
    dtype, width = _DTYPES[str(config.dtype).removeprefix("torch.")], int(config.get_hidden_size())
    modes = [0.0] if temperature == 0 else [0.0, temperature]
    row = len(kept) * width * dtype.itemsize
    _check_room(folder, len(modes) * sum(len(prompt) + tokens for prompt in prompts) * row)
    path = folder / "streams"
    try:
        infos: list[dict[str, Any]] = engine.collective_rpc(install, args=(kept, str(path)))
    except RuntimeError as error:
        raise PlanError(f"{error}; calibrate with --pipeline-parallel-size 1, or --states reference") from None
    texts, starts = list[tuple[list[int], int, list[int], float]](), [0]
    for number, prompt in enumerate(prompts):
        for mode in modes:
            progress(len(texts), len(prompts) * len(modes))
            # One more than is kept, for what the target says after the last one; stops are looked for afterwards.
            parameters = SamplingParams(
                temperature=mode, max_tokens=tokens + 1, ignore_eos=True, detokenize=False, logprobs=1, seed=number
            )
            ids, says = _write_one(engine, f"text-{len(texts)}", list(prompt), parameters)
            rows: list[int] = engine.collective_rpc(drain)
            if any(found != len(prompt) + len(ids) - 1 for found in rows):
                raise PlanError(f"of {len(prompt) + len(ids) - 1} tokens the layers were seen at {rows}; report it")
            ends = next((i for i, token in enumerate(ids[:-1]) if token in stop), len(ids) - 2)
            texts.append(([*prompt, *ids[: ends + 1]], len(prompt), says[: ends + 2], mode))
            starts.append(starts[-1] + rows[0])
    progress(len(texts), len(texts))
    engine.collective_rpc(remove)
    if not path.is_file() or path.stat().st_size != starts[-1] * row:
        raise PlanError(f"{path} does not hold the target's streams: rank 0 has to run on this machine")
    streams = torch.from_file(str(path), shared=False, size=starts[-1] * len(kept) * width, dtype=dtype)
    streams = streams.view(starts[-1], len(kept), width)
    found: list[Written] = []
    for (ids, prompt, says, mode), start in zip(texts, starts, strict=False):
        # What it says after a token of the prompt is not asked for, nor known: no text holds token -1.
        heard = torch.tensor([-1] * (prompt - 1) + says)
        mine = {b: streams[start : start + len(ids), i] for i, b in enumerate(kept)}
        found.append(Written(ids, prompt, heard, mine, mode == 0))
    return found, infos[0]["device"]


def _write_one(engine: Any, name: str, prompt: list[int], parameters: Any) -> tuple[list[int], list[int]]:
    """The tokens that follow, and after each token from the prompt's last on the target's own greedy choice."""
    engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
    last: Any = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output.outputs[0]
    says = [max(entry, key=lambda token: entry[token].logprob) for entry in last.logprobs]
    return list(last.token_ids), says


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > min(FILE_BYTES, free):
        raise PlanError(
            f"the target's streams would take {math.ceil(needed / 2**30)} GiB in {folder}, where {free >> 30} GiB are"
            f" free and at most {FILE_BYTES >> 30} are written; give fewer --tokens or prompts, or set TMPDIR to a"
            " larger disk"
        )
