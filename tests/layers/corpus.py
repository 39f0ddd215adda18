# SPDX-License-Identifier: Apache-2.0
"""The drafter and target configs under ``tests/data``.

They have the shape of real checkpoints, made from public facts (keys, ids, architectures, sizes); none is a copy.
``expected.json`` beside each drafter holds the plan that we expect and why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data"
DRAFTERS = sorted(path.name for path in (DATA / "drafters").iterdir())
TARGETS = sorted(path.name for path in (DATA / "targets").iterdir())


def drafter(name: str) -> dict[str, Any]:
    return json.loads((DATA / "drafters" / name / "config.json").read_text())


def expected(name: str) -> dict[str, Any]:
    return json.loads((DATA / "drafters" / name / "expected.json").read_text())


def target(name: str) -> dict[str, Any]:
    return json.loads((DATA / "targets" / name / "config.json").read_text())
