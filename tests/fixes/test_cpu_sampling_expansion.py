# SPDX-License-Identifier: Apache-2.0
"""C5, red and green on the installed CPU engine's own kernel and its callers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, torch
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm_kimi_eagle3.fixes.cpu_sampling_expansion import FIX
from vllm_kimi_eagle3.patching.patcher import Patcher

captured = cpu_triton_utils._expand_kernel_impl  # as the table of kernels does, before any fix
ends = torch.tensor([3, 4, 6], dtype=torch.int32)

def spread(values, old, new):
    out = torch.full((6,), -7, dtype=values.dtype)
    captured(out, values, ends, old, new)
    return out.tolist()

def all():
    return [
        spread(torch.tensor([0.5, 0.0, 0.25]), 0, 1),
        spread(torch.tensor([5, 0, 9], dtype=torch.int32), 0, 0),
        spread(torch.tensor([5, 0, 9], dtype=torch.int64), 0, 7),
    ]

patcher = Patcher()
answers = [all()]
FIX.install(patcher.for_fix("C5"))
answers.append(all())
assert patcher.shadowed("C5") == []
patcher.revert("C5")
answers.append(all())
print("ANSWER" + json.dumps(answers))
"""


@pytest.mark.engine
def test_the_expansion_reaches_the_caller() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    stock, mended, reverted = json.loads(done.stdout.split("ANSWER")[1])
    right = [[0.5, 0.5, 0.5, 1.0, 0.25, 0.25], [5, 5, 5, 0, 9, 9], [5, 5, 5, 7, 9, 9]]
    assert mended == right
    assert stock == reverted and stock[:2] == [[-7.0] * 6, [-7] * 6], "stock writes into a copy"
