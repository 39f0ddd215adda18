# SPDX-License-Identifier: Apache-2.0
"""Whether a folder has changes that git has not recorded.

git is asked, for tracked files below the folder alone; files that are new or ignored do not count, since patches touch
neither. Nothing that the repository's configuration names as a monitor or hook is run.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class CheckoutError(Exception):
    """git could not be asked. One sentence."""


def uncommitted(folder: Path) -> list[str]:
    """Tracked files below the folder with changes; none where it is in no repository.

    Raises:
        CheckoutError: it is in a repository, and git is missing or fails.
    """
    folder = folder.resolve()
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return []
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(folder)]
    command += ["status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all", "-z", "--", "."]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, env={**environment, "GIT_OPTIONAL_LOCKS": "0"})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckoutError(f"git cannot be asked for uncommitted changes: {error}") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CheckoutError(f"git cannot tell of uncommitted changes: {said[0][:200] if said else done.returncode}")
    return [entry[3:].decode("utf-8", "replace") for entry in done.stdout.split(b"\0") if len(entry) > 3]
