# SPDX-License-Identifier: Apache-2.0
"""A copy of the installed vLLM with the source patches, to stand before it on the module path."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from vllm_kimi_eagle3.cli import main
from vllm_kimi_eagle3.patching.release import installed_release


def patched_copy(folder: Path) -> dict[str, str]:
    """Make the copy below ``folder``; returns the environment that uses it, without any plugin.

    Libraries become links, Python files copies.
    """
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None

    def copy(source: str, target: str) -> None:
        if source.endswith(".py"):
            shutil.copyfile(source, target)
        else:
            Path(target).symlink_to(source)

    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(found.origin).parent, folder / "vllm", copy_function=copy, ignore=ignore)
    release = installed_release()
    assert release is not None
    assert main(["patches", "--vllm", release, "--apply", str(folder)]) == 0
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "VLLM_PLUGINS": ""}
