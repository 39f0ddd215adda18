# SPDX-License-Identifier: Apache-2.0
"""Ways to capture the wrong thing, on a running engine in eager mode: what every assertion has to notice.

Each takes the model runner, spoils what it hands the drafter, and returns a function that mends it. Used by
engine_probe.py, in the engine's process.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch

from vllm_kimi_eagle3.verify.capture import captured_boundaries, inner_model
from vllm_kimi_eagle3.verify.drive import Driver, Request

Undo = Callable[[], None]


def _shifted(by: int) -> Callable[[Any], Undo]:
    def tamper(runner: Any) -> Undo:
        model = runner.get_model()
        right = tuple(inner_model(runner).aux_hidden_state_layers)
        model.set_aux_hidden_state_layers(tuple(b + by for b in right))
        return lambda: model.set_aux_hidden_state_layers(right)

    return tamper


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


def _without_residual(runner: Any) -> Undo:
    model, seen = inner_model(runner), dict[int, torch.Tensor]()
    boundaries = sorted(model.aux_hidden_state_layers)

    def keeping(boundary: int) -> Callable[[Any, Any], None]:
        return lambda module, args: seen.__setitem__(boundary, args[1].clone())

    hooks = [model.layers[b].register_forward_pre_hook(keeping(b)) for b in boundaries]
    undo = _changed(lambda _, aux: [seen[b] for b in boundaries])(runner)

    def mend() -> None:
        undo()
        for hook in hooks:
            hook.remove()

    return mend


def _stale(runner: Any) -> Undo:
    before: list[torch.Tensor] = []

    def last_step(_: Any, aux: list[torch.Tensor]) -> list[torch.Tensor]:
        old = before[:] or aux
        before[:] = [a.clone() for a in aux]
        # As when a buffer is written too late: what the last step left there, as far as it goes.
        return [torch.cat([o[: len(a)], a[len(o) :]]) for o, a in zip(old, aux, strict=True)]

    return _changed(last_step)(runner)


TAMPERS: dict[str, Callable[[Any], Undo]] = {
    "one boundary early": _shifted(-1),
    "one boundary late": _shifted(1),
    "permuted states": _changed(lambda _, aux: [aux[1], aux[0], aux[2]]),
    "post-norm states": _changed(_post_norm),
    "residual left out": _without_residual,
    "last step's states": _stale,
}


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
