# SPDX-License-Identifier: Apache-2.0
"""What can be told without serving: is the overlay in place, and do drafter and target fit each other?

``findings`` is the shape of every answer; ``checkpoint`` looks at a pair's files, ``environment`` judges what
``probe``, a script that runs in a clean child process, reports about it. Standard library only, so that a broken
environment can still be examined. What none of it can know is whether a drafter was *trained* as its files say;
``calibrate`` and ``bench`` measure that.
"""

from .findings import Finding, Level, block, exit_status

__all__ = ["Finding", "Level", "block", "exit_status"]
