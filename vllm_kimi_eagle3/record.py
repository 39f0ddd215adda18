# SPDX-License-Identifier: Apache-2.0
"""What the overlay decided for a server, as it travels to the server's other processes.

It lies in ``additional_config["kimi_eagle3"]`` and reads as the dictionary that it is. Pickled, it carries a condition:
the process that unpickles it must have this package, must be able to import it, and must not have switched it off.
vLLM logs and swallows a plugin that can't be loaded, and so a worker with a broken, missing or filtered plugin would
load the model unmended; with this it ends while it receives its configuration, before it touches a weight.

What it can't guard: a server none of whose processes has the plugin. ``vllm-kimi-eagle3 doctor`` sees that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class Record(dict[str, Any]):
    """The overlay's entry in a server's configuration: the user's choice, the plan, the fixes and our version."""

    def __reduce__(self) -> tuple[Callable[..., Record], tuple[Any, ...]]:
        return arrive, (dict(self), os.getpid())


def arrive(entries: dict[str, Any], sender: int) -> Record:
    """Unpickle a record; in another process than the one that pickled it, make sure of the overlay first.

    Raises:
        OverlayError: the overlay is switched off here, or is another version.
        ImportError: the overlay is broken here.
    """
    record = Record(entries)
    if os.getpid() != sender:
        from vllm_kimi_eagle3 import activation

        activation.receive(record)
    return record
