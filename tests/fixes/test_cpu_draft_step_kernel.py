# SPDX-License-Identifier: Apache-2.0
"""C6 on 0.30.0's own dispatchers, compiled from its source; and, where that is installed, on its C++ kernels."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests import releases
from tests.engines.conftest import RELEASE, applies
from tests.fixes.dispatchers import arrived, dispatcher, launch, wrapper
from vllm_kimi_eagle3.fixes import cpu_draft_step_kernel
from vllm_kimi_eagle3.fixes.cpu_draft_step_kernel import FIX, KERNELS, TARGET
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Need

FAULTY = "0.30.0"


def get(path: str, name: str, owner: str | None = None, **names: Any) -> Any:
    path = path.removeprefix("vllm/")
    return releases.build(FAULTY, path, releases.definition(FAULTY, path, name, owner), names)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules that the fix looks into, with the dispatchers as stock vLLM leaves them."""
    seen: list[dict[str, Any]] = []
    wrappers: Any = ModuleType("vllm.utils.cpu_triton_utils")
    triton: Any = ModuleType("vllm.triton_utils")
    triton.HAS_TRITON = False
    modules: dict[str, Any] = {m.__name__: m for m in (wrappers, triton)}
    made = {}
    for target, kernel in KERNELS.items():
        module, _, name = target.partition(":")
        made[target] = dispatcher(get, target, kernel)
        setattr(modules.setdefault(module, ModuleType(module)), name, made[target])
        setattr(wrappers, kernel, wrapper(get, kernel, seen))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    original = MagicMock()
    installer = MagicMock(spec=Installer)
    installer.original.return_value = original
    cpu_draft_step_kernel.install(installer)
    (target, mended), _ = installer.replace.call_args
    assert target == TARGET
    return SimpleNamespace(
        dispatchers=made, seen=seen, wrappers=wrappers, triton=triton, mended=mended, original=original
    )


@pytest.mark.parametrize("target", KERNELS)
def test_every_argument_arrives(engine: SimpleNamespace, target: str) -> None:
    runner = object()
    engine.mended(runner)
    engine.original.assert_called_once_with(runner)
    first = engine.dispatchers[target].kernel
    given = launch(engine.dispatchers[target])
    (arguments,) = engine.seen
    arrived(arguments, given)
    engine.mended(runner)
    assert engine.dispatchers[target].kernel is first, "a second engine in the process"


@pytest.mark.parametrize("target", KERNELS)
def test_stock_keeps_a_plain_function(engine: SimpleNamespace, target: str) -> None:
    with pytest.raises(TypeError, match="Cannot inspect kernel parameters for function"):
        launch(engine.dispatchers[target])
    assert not engine.seen


def test_two_wrappers_do_not_take_the_dispatchers_names(engine: SimpleNamespace) -> None:
    """Why the wrappers themselves would not do."""
    refused = []
    for target, kernel in KERNELS.items():
        engine.dispatchers[target].kernel = getattr(engine.wrappers, kernel)
        try:
            launch(engine.dispatchers[target])
        except TypeError as error:
            assert "missing" in str(error)
            refused.append(kernel)
    assert refused == ["eagle_step_slot_mapping_metadata_kernel", "expand_kernel"]


def test_with_triton_nothing_is_set(engine: SimpleNamespace) -> None:
    engine.triton.HAS_TRITON = True
    engine.mended(None)
    assert all(inspect.isfunction(found.kernel) for found in engine.dispatchers.values())


@pytest.mark.parametrize(
    ("path", "old", "new", "need"),
    [
        ("vllm/v1/worker/cpu_model_runner.py", "_postprocess_triton", "_other", Need.RETIRED),
        ("vllm/v1/sample/rejection_sampler.py", "def _expand(", "def _other(", Need.NOT_APPLICABLE),
        ("vllm/utils/cpu_triton_utils.py", "def _expand_kernel_impl(", "def _other(", Need.REFUSED),
        ("vllm/utils/cpu_triton_utils.py", "_expand_kernel_impl(\n    output,", "_expand_kernel_impl(", Need.REFUSED),
        ("vllm/utils/cpu_triton_utils.py", "int64", "int32", Need.APPLY),
    ],
)
def test_the_probe_goes_by_the_source(tmp_path: Path, path: str, old: str, new: str, need: Need) -> None:
    stock = SourceTree(releases.tree(FAULTY))
    for module in {target.partition(":")[0] for target in (TARGET, *KERNELS)} | {"vllm.utils.cpu_triton_utils"}:
        file = stock.path(module)
        copy = tmp_path / file.relative_to(stock.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text("utf-8"), encoding="utf-8")
    changed = tmp_path / path
    assert old in changed.read_text("utf-8")
    changed.write_text(changed.read_text("utf-8").replace(old, new), encoding="utf-8")
    assert FIX.probe(SourceTree(tmp_path)).need is need


SCRIPT = """
import json, torch
from types import SimpleNamespace
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode import utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_kimi_eagle3.fixes.cpu_draft_step_kernel import FIX
from vllm_kimi_eagle3.fixes.cpu_sampling_expansion import FIX as EXPANSION
from vllm_kimi_eagle3.patching.patcher import Patcher

def step():
    '''Three requests, the last of which is at max_model_len; one padding slot.'''
    lengths = torch.tensor([4, 16, 31], dtype=torch.int32)
    positions, slots = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    blocks = torch.tensor([[5, 6], [7, 8], [9, 10]], dtype=torch.int32)
    utils.eagle_step_update_slot_mapping_and_metadata(
        torch.tensor([3, 15, 30]), blocks, lengths, 16, 31, positions, slots)
    return [positions.tolist(), slots.tolist(), lengths.tolist()]

def expand():
    ends = torch.tensor([2, 3], dtype=torch.int32)
    return rejection_sampler.expand_batch_to_tokens(torch.tensor([0.5, 0.0]), ends, 3, 0, 1).tolist()

def verify():
    '''Two drafts each for a greedy and a sampled request; the first of each is the target's own token.'''
    logits = torch.full((4, 8), -1e9)
    logits[[0, 1, 2, 3], [2, 1, 4, 5]] = 0.0
    metadata = SimpleNamespace(all_greedy=False, all_random=False, generators={}, temperature=torch.tensor([0.0, 1.0]))
    return rejection_sampler.rejection_sample(
        torch.tensor([2, 3, 4, 0], dtype=torch.int32), [2, 2], 2, torch.tensor([2, 4], dtype=torch.int32), None,
        logits, torch.tensor([[6], [7]], dtype=torch.int32), metadata).tolist()

def all():
    found = []
    for check in (step, expand, verify):
        try:
            found.append(check())
        except TypeError as error:
            found.append(str(error))
    return found

patcher = Patcher()
CPUModelRunner._postprocess_triton(None)
answers = [all()]
EXPANSION.install(patcher.for_fix("C5"))
FIX.install(patcher.for_fix("C6"))
CPUModelRunner._postprocess_triton(None)
answers.append(all())
print("ANSWER" + json.dumps(answers))
"""


@pytest.mark.engine
@pytest.mark.skipif(not applies("C6"), reason=f"the CPU engine of {RELEASE} has not this fault")
def test_the_kernels_compute() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    stock, mended = json.loads(done.stdout.split("ANSWER")[1])
    assert stock == ["Cannot inspect kernel parameters for function"] * 3
    assert mended == [
        [[4, 16, 0], [5 * 16 + 4, 8 * 16, -1], [5, 17, 1]],
        [0.5, 0.5, 1.0],
        [[2, 1, -1], [4, 5, -1]],
    ]
