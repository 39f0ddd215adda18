# SPDX-License-Identifier: Apache-2.0
"""D13: V2 captures states for a drafter that wants none.

A drafter may say ``eagle_config.use_aux_hidden_state: false``: it reads the target's last hidden state and has no
``fc``. Up to 0.32 the V2 runner sets its flag for every EAGLE-3 drafter, then feeds the concatenated states into a
layer that is not there. The flag is passed on while the runner is being built, so it is mended where it is stored.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_INIT = f"{_RUNNER}.__init__"
FLAG = "use_aux_hidden_state_outputs"
TARGET = f"{_RUNNER}.{FLAG}"
_ASKED = "'use_aux_hidden_state'"
_SPECULATORS = (
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
    "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator",
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator",
)


def probe(tree: SourceTree) -> Verdict:
    """The fault is the flag's assignment; the remedy stands on a speculator that can do without the states."""
    if not tree.has(_INIT) or FLAG not in tree.text(_INIT):
        return Verdict(Need.NOT_APPLICABLE, "this release's V2 runner captures no auxiliary states")
    text = tree.text(_INIT)
    if f"self.{FLAG} = True" not in text:
        if "requires_aux_hidden_states(" in text or f"self.{FLAG} = eagle_config.get({_ASKED}, True)" in text:
            return Verdict(Need.RETIRED, "V2 asks the drafter whether it wants auxiliary states")
        return Verdict(Need.REFUSED, f"{_INIT} sets {FLAG} in a way that is not known")
    set_first = text.find("self.speculative_config = ")
    if not 0 <= set_first < text.find(f"self.{FLAG} = True"):
        return Verdict(Need.REFUSED, f"{_INIT} sets {FLAG} before it knows the speculative configuration")
    if not any(_can_do_without(tree, module) for module in _SPECULATORS):
        return Verdict(Need.REFUSED, "no speculator of this release can do without auxiliary states")
    return Verdict(Need.APPLY, "V2 wants auxiliary states for every EAGLE-3 drafter")


def _can_do_without(tree: SourceTree, module: str) -> bool:
    return tree.has_module(module) and "if aux_hidden_states:" in tree.path(module).read_text(encoding="utf-8")


def wants_states(speculative_config: Any) -> bool:
    """What the drafter says, as 0.33.0 reads it."""
    draft = getattr(speculative_config, "draft_model_config", None)
    eagle_config = getattr(getattr(draft, "hf_config", None), "eagle_config", None) or {}
    return bool(eagle_config.get("use_aux_hidden_state", True))


def _get(self: Any) -> bool:
    return vars(self).get(FLAG, False)


def _set(self: Any, value: bool) -> None:
    vars(self)[FLAG] = value and wants_states(self.speculative_config)


def install(installer: Installer) -> None:
    """Make the flag a property that the drafter's wish limits."""
    installer.replace(TARGET, property(_get, _set), create=True)


FIX = Fix(
    id="D13",
    name="use-aux-flag",
    targets=(_INIT,),
    phase=Phase.WORKER,
    why="drafters with use_aux_hidden_state false are fed states for an fc that they do not have",
    upstream="0.33.0 asks the drafter (requires_aux_hidden_states)",
    retire="releases below 0.33.0 are no longer supported",
    probe=probe,
    install=install,
)
