# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in every process it starts.

Kept trivial: vLLM logs and swallows an error while it *loads* a plugin, so whatever could fail on import is imported
inside :func:`register`, where a failure can still close the door behind it.
"""

from __future__ import annotations

import os


def register() -> None:
    """Install the gates; see :mod:`vllm_kimi_eagle3.activation`. Safe to call again, from any thread.

    ``VLLM_KIMI_EAGLE3=off`` makes it do nothing at all. It never raises: an error would end vLLM for everybody else's
    models too. Instead, when the overlay itself is broken, EAGLE-3 on our targets is refused and nothing else changes.
    """
    if (os.environ.get("VLLM_KIMI_EAGLE3") or "on").strip().lower() == "off":
        return
    try:
        from vllm_kimi_eagle3 import activation

        activation.install_gates()
    except Exception as error:
        try:
            _refuse_our_servers(error)
        except Exception as second:
            import logging

            logging.getLogger("vllm.kimi_eagle3").error(
                "vllm-kimi-eagle3 could not refuse its servers either (%s: %s): EAGLE-3 runs as stock vLLM has it",
                type(second).__name__,
                second,
            )


def _refuse_our_servers(error: Exception) -> None:
    """Without a working overlay, the servers that need it must not start as if nothing had happened."""
    import functools
    import logging
    from typing import Any

    message = (
        f"vllm-kimi-eagle3 could not install itself ({type(error).__name__}: {error}), so EAGLE-3 on this target would"
        " run without its fixes. Reinstall the package or run `vllm-kimi-eagle3 doctor`; VLLM_KIMI_EAGLE3=off starts"
        " stock vLLM on purpose."
    )
    logging.getLogger("vllm.kimi_eagle3").error(message)
    from vllm.config.speculative import SpeculativeConfig

    guarded: Any = SpeculativeConfig
    original = guarded.__post_init__
    if getattr(original, "_kimi_eagle3_refuses", False):
        return

    @functools.wraps(original)
    def refuse(self: Any) -> None:
        original(self)
        target = getattr(getattr(self, "target_model_config", None), "hf_config", None)
        architectures = getattr(target, "architectures", None) or []
        ours = {"DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"} & set(architectures)
        if self.method == "eagle3" and ours:
            raise ValueError(message)

    refuse.__dict__["_kimi_eagle3_refuses"] = True
    guarded.__post_init__ = refuse
