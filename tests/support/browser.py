# SPDX-License-Identifier: Apache-2.0
"""A page in a headless Chromium."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no headless browser on this machine")
SCHEMES = {"light": "--blink-settings=preferredColorScheme=1", "dark": "--blink-settings=preferredColorScheme=0"}


def browse(page: Path, *options: str) -> str:
    """Open the page, and return what the browser printed."""
    assert BROWSER is not None
    profile = page.with_suffix(".profile")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--window-size=860,2200", "--hide-scrollbars", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def picture(page: Path, scheme: str) -> Any:
    """The page as an image of Pillow's, in one of :data:`SCHEMES`."""
    from PIL import Image

    shot = page.with_suffix(f".{scheme}.png")
    browse(page, SCHEMES[scheme], f"--screenshot={shot}")
    return Image.open(shot).convert("RGB")


def colours(image: Any) -> set[Any]:
    """All colours of an image."""
    return {colour for _, colour in image.getcolors(1 << 20) or []}
