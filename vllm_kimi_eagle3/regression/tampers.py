# SPDX-License-Identifier: Apache-2.0
"""Faults of a running engine in eager mode: what every assertion has to notice, and what the verdict has to name.

Each takes the model runner, spoils what it hands the drafter or what the drafter makes of it, and returns a function
that mends it. Used by engine_probe.py, in the engine's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from vllm_kimi_eagle3.verify.capture import captured_boundaries, inner_model
from vllm_kimi_eagle3.verify.drive import Driver, Request

Undo = Callable[[], None]
PAD = 268
SLEPT = [0.0]
"""Seconds that tampers have let the target wait."""
_ABSENT = object()


def _shifted(by: int) -> Callable[[Any], Undo]:
    def tamper(runner: Any) -> Undo:
        model = runner.get_model()
        right = tuple(inner_model(runner).aux_hidden_state_layers)
        model.set_aux_hidden_state_layers(tuple(b + by for b in right))
        return lambda: model.set_aux_hidden_state_layers(right)

    return tamper


def _set_to(boundaries: tuple[int, ...]) -> Callable[[Any], Undo]:
    def tamper(runner: Any) -> Undo:
        model = runner.get_model()
        right = tuple(inner_model(runner).aux_hidden_state_layers)
        model.set_aux_hidden_state_layers(boundaries)
        return lambda: model.set_aux_hidden_state_layers(right)

    return tamper


def _wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Put ``make(what is there)`` in the place of an object's own attribute, or over its class's."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, make(getattr(owner, name)))
    return lambda: delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)


def _changed(change: Callable[[Any, list[torch.Tensor]], list[torch.Tensor]]) -> Callable[[Any], Undo]:
    """Spoil the aux hidden states on their way out of the model."""

    def tamper(runner: Any) -> Undo:
        def spoilt(_module: Any, _args: Any, result: Any) -> Any:
            hidden, aux = result
            return hidden, change(runner, aux)

        return runner.get_model().register_forward_hook(spoilt).remove

    return tamper


def _post_norm(runner: Any, aux: list[torch.Tensor]) -> list[torch.Tensor]:
    model = inner_model(runner)
    norms = [model.layers[b].input_layernorm for b in model.aux_hidden_state_layers]
    return [norm(a.clone()) for norm, a in zip(norms, aux, strict=True)]


def _entering(by: int, state: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any], Undo]:
    """Hand over what ``state`` makes of the branch and the residual that enter the layer ``by`` behind each boundary's.

    The model goes on saying that it captures its own boundaries.
    """

    def tamper(runner: Any) -> Undo:
        model, seen = inner_model(runner), dict[int, torch.Tensor]()
        boundaries = sorted(b + by for b in model.aux_hidden_state_layers)

        def keeping(boundary: int) -> Callable[[Any, Any], None]:
            return lambda module, args: seen.__setitem__(boundary, state(args[1], args[2]))

        hooks = [model.layers[b].register_forward_pre_hook(keeping(b)) for b in boundaries]
        undo = _changed(lambda _, aux: [seen[b] for b in boundaries])(runner)

        def mend() -> None:
            undo()
            for hook in hooks:
                hook.remove()

        return mend

    return tamper


def _stale(runner: Any) -> Undo:
    before: list[torch.Tensor] = []

    def last_step(_: Any, aux: list[torch.Tensor]) -> list[torch.Tensor]:
        old = before[:] or aux
        before[:] = [a.clone() for a in aux]
        # As when a buffer is written too late: what the last step left there, as far as it goes.
        return [torch.cat([o[: len(a)], a[len(o) :]]) for o, a in zip(old, aux, strict=True)]

    return _changed(last_step)(runner)


def _uneven(_: Any, aux: list[torch.Tensor]) -> list[torch.Tensor]:
    return [a * torch.linspace(0.2, 4, a.shape[-1], dtype=a.dtype, device=a.device) for a in aux]


class _LaterPasses:
    """Knows whether the drafter is in its first pass of a step, over the confirmed rows, or in one of a draft each."""

    def __init__(self, drafter: Any) -> None:
        self.later = False

        def first(original: Any) -> Any:
            def set_inputs_first_pass(*args: Any, **kwargs: Any) -> Any:
                self.later = False
                return original(*args, **kwargs)

            return set_inputs_first_pass

        def later(original: Any) -> Any:
            def update(positions: Any, metadata: Any, *args: Any) -> Any:
                self.later = True
                result = original(positions, metadata, *args)
                self.after(metadata)
                return result

            return update

        self.undo = [
            _wrapped(drafter, "set_inputs_first_pass", first),
            _wrapped(drafter, "_update_positions_dependent_metadata", later),
        ]

    def after(self, metadata: Any) -> None:
        """May change a later pass's metadata."""

    def mend(self) -> None:
        for undo in reversed(self.undo):
            undo()


def _keys_lost(runner: Any) -> Undo:
    """What the later passes write into the drafter's cache goes to vLLM's null block."""
    passes = _LaterPasses(runner.drafter)
    passes.after = lambda metadata: metadata.slot_mapping.zero_()
    return passes.mend


def _no_keys(runner: Any) -> Undo:
    """A block table of zeros in the later passes: they read the null block."""
    passes = _LaterPasses(runner.drafter)

    def forget(metadata: Any) -> None:
        metadata.block_table_tensor = torch.zeros_like(metadata.block_table_tensor)

    passes.after = forget
    return passes.mend


def _positions_lag(runner: Any) -> Undo:
    """The later passes run at the position before theirs."""
    passes = _LaterPasses(runner.drafter)

    def lagging(original: Any) -> Any:
        def get_positions(count: int) -> Any:
            return original(count) - 1 if passes.later else original(count)

        return get_positions

    passes.undo.append(_wrapped(runner.drafter, "_get_positions", lagging))
    return passes.mend


def _given(change: Callable[[_LaterPasses, dict[str, Any]], None]) -> Callable[[Any], Undo]:
    """Spoil the arguments that the drafter's model is called with."""

    def tamper(runner: Any) -> Undo:
        passes = _LaterPasses(runner.drafter)

        def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            change(passes, kwargs)
            return args, kwargs

        handle = runner.drafter.model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        passes.undo.append(handle.remove)
        return passes.mend

    return tamper


def _carry_lost(passes: _LaterPasses, kwargs: dict[str, Any]) -> None:
    if passes.later:
        kwargs["hidden_states"] = torch.zeros_like(kwargs["hidden_states"])


def _pad_embedded(passes: _LaterPasses, kwargs: dict[str, Any]) -> None:
    if not passes.later:
        kwargs["input_ids"] = torch.full_like(kwargs["input_ids"], PAD)


def _large_target(step: float, verify: float) -> Callable[[Any], Undo]:
    """A target whose forward takes ``step`` seconds more, and ``verify`` more where it verifies drafts."""

    def tamper(runner: Any) -> Undo:
        def slow(original: Any) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                rows = kwargs.get("input_ids", args[0] if args else None)
                seconds = verify if rows is not None and len(rows) > runner.input_batch.num_reqs else step
                time.sleep(seconds)
                SLEPT[0] += seconds
                return original(*args, **kwargs)

            return forward

        return _wrapped(runner, "_model_forward", slow)

    return tamper


TAMPERS: dict[str, Callable[[Any], Undo]] = {
    "one boundary early": _shifted(-1),
    "one boundary late": _shifted(1),
    "permuted states": _changed(lambda _, aux: [aux[1], aux[0], aux[2]]),
    "post-norm states": _changed(_post_norm),
    "residual left out": _entering(0, lambda branch, residual: branch.clone()),
    "last step's states": _stale,
    "default boundaries": _set_to((2, 5, 7)),
    "first state one early": _set_to((3, 7, 9)),
    "second state one late": _set_to((4, 8, 9)),
    "last state one early": _set_to((4, 7, 8)),
    "one early, said to be right": _entering(-1, lambda branch, residual: branch + residual),
    "zeros": _changed(lambda _, aux: [torch.zeros_like(a) for a in aux]),
    "states scaled unevenly": _changed(_uneven),
    "pad embeddings": _given(_pad_embedded),
    "keys of later passes lost": _keys_lost,
    "no keys in later passes": _no_keys,
    "positions lag in later passes": _positions_lag,
    "carried state lost": _given(_carry_lost),
    "a large target": _large_target(0.04, 0.04),
    "a large target, slow to verify": _large_target(0.04, 0.25),
}


def drafting(runner: Any, k: int) -> Undo:
    """Let the drafter propose ``k`` tokens a step, at most as many as the engine was started for; 0: none."""

    def fewer(original: Any) -> Any:
        def propose(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{**kwargs, "num_speculative_tokens": k})

        return propose

    return _wrapped(runner.drafter, "propose", fewer)


def other_weights(runner: Any, folder: str) -> Undo:
    """Run the drafter with a checkpoint's matrices, norms and d2t; it has the shapes of the one that was loaded.

    The CPU engine packs matrices while loading and keeps no others, so each layer is given its product anew.
    """
    weights = load_file(Path(folder) / "model.safetensors")
    stacked = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    undo: list[Undo] = []

    def of(name: str) -> torch.Tensor | None:
        plain = name.removeprefix("model.").replace("layers.0.", "midlayer.")
        return weights.get(plain)

    for name, module in runner.drafter.model.named_modules():
        last = name.rpartition(".")[2]
        parts = [of(f"{name.removesuffix(last)}{part}.weight") for part in stacked.get(last, (last,))]
        if not name or any(part is None for part in parts):
            continue
        weight = torch.cat([part for part in parts if part is not None])
        if hasattr(module, "cpu_linear"):
            weight = weight.to(runner.dtype)
            undo.append(_wrapped(module, "cpu_linear", _product(weight)))
        else:
            undo.append(_copied(module.weight, weight))
    undo.append(_copied(runner.drafter.model.draft_id_to_target_id, weights["d2t"]))

    def mend() -> None:
        for one in undo:
            one()

    return mend


def _product(weight: torch.Tensor) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return F.linear(x, weight, bias)

        return product

    return make


def _copied(parameter: torch.Tensor, value: torch.Tensor) -> Undo:
    before = parameter.data.clone()
    parameter.data.copy_(value)

    def mend() -> None:
        parameter.data.copy_(before)

    return mend


def replace_by_proxies(target: str) -> None:
    """From now on the overlay replaces ``target`` by a wrapt proxy around the original, which calls what it would put.

    In eager mode that is as good. Dynamo, though, looks through a proxy at the function behind it.
    """
    import wrapt

    from vllm_kimi_eagle3.patching.patcher import Installer

    replace: Any = Installer.replace

    def by_proxy(self: Any, name: str, new: Any, **options: Any) -> Any:
        if name != target:
            return replace(self, name, new, **options)

        def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            return new(instance, *args, **kwargs)

        proxy = wrapt.FunctionWrapper(self.original(name), call)
        return replace(self, name, proxy, **options)

    Installer.replace = by_proxy  # type: ignore[method-assign]


def captured_subsets(llm: Any, runner: Any, layers: int, prompt: list[int]) -> dict[str, Any]:
    """For every subset of boundaries 0..layers: which boundary each captured state is, by its signature.

    The toy target writes dimension k + 1 in layer k and nowhere else, so boundary b has dimensions 1..b set and no
    other up to ``layers``. The drafter does not run: its fc takes three states only.
    """
    rows: list[torch.Tensor] = []

    def propose(*_: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(kwargs["target_hidden_states"].cpu())
        drafts = len(kwargs["next_token_ids"]), kwargs["num_speculative_tokens"]
        return torch.zeros(drafts, dtype=torch.long, device=kwargs["target_hidden_states"].device)

    def propose_v2(input_batch: Any, *args: Any, **_: Any) -> torch.Tensor:
        # attention metadata, slots, last hidden states, aux hidden states
        rows.append(torch.cat(args[3], dim=-1).cpu())
        return drafter.draft_tokens[: input_batch.num_reqs].zero_()

    configured = captured_boundaries(runner)
    assert configured is not None
    v2 = getattr(runner, "speculator", None) is not None
    drafter = runner.speculator if v2 else runner.drafter
    drafter.propose, recorder = propose_v2 if v2 else propose, drafter.propose
    driver = Driver(llm.llm_engine, record=False)
    found: list[tuple[list[int], list[int]]] = []
    try:
        for size in range(1, layers + 2):
            for subset in combinations(range(layers + 1), size):
                rows.clear()
                runner.get_model().set_aux_hidden_state_layers(subset)
                driver.run([Request(prompt, 1)])
                states = rows[0].unflatten(1, (size, -1))[..., 1 : layers + 1] != 0
                signs = [_boundary(states[:, i]) for i in range(size)]
                found.append((list(subset), signs))
    finally:
        drafter.propose = recorder
        runner.get_model().set_aux_hidden_state_layers(tuple(configured))
    return {"configured": configured, "found": found, "stock": _stock_on_embeddings(runner, driver, prompt)}


def _stock_on_embeddings(runner: Any, driver: Driver, prompt: list[int]) -> str:
    """What comes of boundary 0 when vLLM's own setter takes it; the engine is of no use afterwards."""
    from vllm_kimi_eagle3.activation import ENGINE
    from vllm_kimi_eagle3.fixes import embeddings

    model = runner.get_model()
    ENGINE.patcher.original(embeddings.TARGET)(getattr(model, "language_model", model), (0, 1))
    try:
        driver.run([Request(prompt, 1)])
    except TypeError as error:
        return f"TypeError: {error}"
    return "captured"


def _boundary(written: torch.Tensor) -> int:
    """(T, layers) of what is set: the boundary that has this in every row; -1 if none has."""
    count = int(written[0].sum())
    expected = torch.arange(written.shape[1]) < count
    return count if bool((written == expected).all()) else -1
