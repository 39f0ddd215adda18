# SPDX-License-Identifier: Apache-2.0
"""Which layers does a drafter read? Drafter and target config in, one ``CapturePlan`` out.

Pure functions of plain data, standard library only. ``plan`` holds the result, ``parse`` reads configs, ``resolve``
decides, ``stock`` knows what vLLM itself would take, ``explain`` words both for people; ``files``, ``headers`` and
``alignment`` read what lies on disk.
"""

from .alignment import AlignmentRecord
from .headers import CheckpointHeaders, read_headers
from .plan import CapturePlan, PlanError
from .resolve import config_updates, default_boundaries, resolve
from .stock import StockReading, facts_of, stock_boundaries

__all__ = [
    "AlignmentRecord",
    "CapturePlan",
    "CheckpointHeaders",
    "PlanError",
    "StockReading",
    "config_updates",
    "default_boundaries",
    "facts_of",
    "read_headers",
    "resolve",
    "stock_boundaries",
]
