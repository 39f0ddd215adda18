# SPDX-License-Identifier: Apache-2.0
"""The environment's checks: on reports, on child processes without vLLM or with a broken one, and on the real vLLM."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.doctor.environment import ask, judge
from vllm_kimi_eagle3.doctor.findings import Finding
from vllm_kimi_eagle3.fixes import drafter_media

ROOT = Path(__file__).resolve().parents[2]
LINK = {"module": "vllm_kimi_eagle3.activation", "file": "/site/vllm_kimi_eagle3/activation.py"}
OWN = {"module": "vllm.config.vllm", "file": "/site/vllm/config/vllm.py"}
PLACE = "vllm.config.vllm:VllmConfig.__post_init__"
GOOD: dict[str, Any] = {
    "python": "3.11.7",
    "executable": "/bin/python",
    "seconds": 9.0,
    "distributions": [
        {"version": "1", "location": "/site/v.dist-info", "root": "/site", "editable": None, "registers": True}
    ],
    "plugins": [{"name": "kimi_eagle3", "value": "x:y", "distribution": "vllm-kimi-eagle3"}],
    "vllm_file": "/site/vllm/__init__.py",
    "overlay_file": "/site/vllm_kimi_eagle3/__init__.py",
    "overlay_version": "1",
    "active": True,
    "logged": [],
    "platform": "cuda",
    "gates": [{"place": PLACE, "error": None, "chain": [LINK, OWN]}],
    "fixes": [{"id": "D6", "name": "ids", "state": "PENDING", "reason": "r"}],
    "needed": {"DeepseekV3ForCausalLM": ["D6 ids"]},
    "targets": [{"fix": "D6 ids", "place": PLACE, "chain": [OWN]}],
    "server": {"plan": {"line": "boundaries (2, 5, 7)"}},
    "worker": {"fixes": [{"id": "D6", "name": "ids", "state": "APPLIED", "reason": "r"}]},
}
W = "VLLM_KIMI_EAGLE3_WATCH"
FOREIGN = {"module": "other_plugin", "file": "/site/other_plugin.py"}
STALE = {"version": "0", "location": "/old/v.egg-info", "root": "/old", "editable": None, "registers": False}


def change(**new: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **new}


def first(**new: Any) -> list[dict[str, Any]]:
    return [{**GOOD["distributions"][0], **new}]


# name: (check, level, word, report, environment)
BAD: dict[str, tuple[str, str, str, dict[str, Any], dict[str, str]]] = {
    "off": ("kill-switch", "warning", "does nothing", GOOD, {"VLLM_KIMI_EAGLE3": "off"}),
    "stock": ("kill-switch", "warning", "ships it", GOOD, {"VLLM_KIMI_EAGLE3": "stock"}),
    "warn": ("kill-switch", "warning", "fix is missing", GOOD, {"VLLM_KIMI_EAGLE3": "warn"}),
    "misspelt": ("kill-switch", "error", "'onn'", GOOD, {"VLLM_KIMI_EAGLE3": "onn"}),
    "watch misspelt": ("watch", "error", "'30'", GOOD, {W: "1", f"{W}_BELOW": "30"}),
    "watch set": ("watch", "info", "fewer than 30%", GOOD, {W: "1"}),
    "rule misspelt": ("layer-rule-variable", "error", "'outputs'", GOOD, {"VLLM_KIMI_EAGLE3_LAYER_RULE": "outputs"}),
    "media misspelt": ("drafter-media-variable", "error", "'pixel'", GOOD, {drafter_media.VARIABLE: "pixel"}),
    "media set": ("drafter-media-variable", "info", "own embedding", GOOD, {drafter_media.VARIABLE: "embedding"}),
    "rule set": ("layer-rule-variable", "info", "every drafter", GOOD, {"VLLM_KIMI_EAGLE3_LAYER_RULE": "output"}),
    "filtered": ("plugins-filter", "error", "leaves out", GOOD, {"VLLM_PLUGINS": "lora"}),
    "filtered out by nothing": ("plugins-filter", "error", "leaves out", GOOD, {"VLLM_PLUGINS": ""}),
    "not installed": ("metadata", "error", "no installed", change(distributions=[]), {}),
    "stale in front": ("metadata", "error", "/old/v.egg-info is taken", change(distributions=[STALE, *first()]), {}),
    "stale behind": ("metadata", "warning", "hides /old", change(distributions=[*first(), STALE]), {}),
    "no entry point": ("metadata", "error", "does not register", change(distributions=first(registers=False)), {}),
    "other version": ("metadata-version", "warning", "runs 1", change(distributions=first(version="0")), {}),
    "shadowed code": ("code-location", "error", "/elsewhere", change(overlay_file="/elsewhere/v/__init__.py"), {}),
    "editable moved": (
        "code-location",
        "error",
        "/moved",
        change(distributions=first(editable="file:///moved/src")),
        {},
    ),
    "no vLLM": (
        "vllm-import",
        "warning",
        "not installed",
        {"vllm_import": "ModuleNotFoundError: No module named 'vllm'"},
        {},
    ),
    "broken vLLM": ("vllm-import", "error", "libcuda", {"vllm_import": "ImportError: libcuda.so.1"}, {}),
    "a dead child": ("child-process", "error", "code -11", {"child_error": "ended with code -11: x"}, {}),
    "broken import": (
        "plugin-loaded",
        "error",
        "No module named 'wrapt'",
        change(active=False, gates=None, overlay_import="ModuleNotFoundError: No module named 'wrapt'"),
        {},
    ),
    "another plugin's error": ("plugin-loaded", "error", "boom", change(loader="ValueError: boom"), {}),
    "never loaded": ("plugin-loaded", "error", "did not bring", change(active=False, gates=None), {}),
    "two of a name": ("plugin-name", "error", "2 distributions", change(plugins=GOOD["plugins"] * 2), {}),
    "gate broken": (
        "gates",
        "error",
        "a gate is not in place: vllm.config.vllm:VllmConfig.__post_init__ (no such)",
        change(gates=[{"place": PLACE, "error": "no such", "chain": []}, *GOOD["gates"]]),
        {},
    ),
    "no gate at all": (
        "gates",
        "error",
        "none of the 2 methods that the overlay waits for is where it looks",
        change(gates=[{"place": PLACE, "error": "no such", "chain": []}] * 2),
        {},
    ),
    "gate replaced": ("gates", "error", PLACE, change(gates=[{"place": PLACE, "error": None, "chain": [FOREIGN]}]), {}),
    "gate wrapped over": (
        "two-plugins",
        "warning",
        "other_plugin",
        change(gates=[{"place": PLACE, "error": None, "chain": [FOREIGN, LINK, OWN]}]),
        {},
    ),
    "target patched": (
        "two-plugins",
        "warning",
        "other_plugin",
        change(targets=[{"fix": "D6 ids", "place": PLACE, "chain": [FOREIGN, OWN]}]),
        {},
    ),
    "refused": (
        "fixes",
        "error",
        "D6 ids is REFUSED",
        change(fixes=[{"id": "D6", "name": "ids", "state": "REFUSED", "reason": "shape"}]),
        {},
    ),
    "server refused": (
        "server-config",
        "error",
        "OverlayError",
        change(server=None, server_error="OverlayError: x"),
        {},
    ),
    "server without plan": ("server-config", "warning", "no capture plan", change(server={"plan": None}), {}),
    "worker failed": ("worker", "error", "code 1", change(worker_error="it ended with code 1"), {}),
    "worker without overlay": ("worker", "error", "does not get", change(worker={"error": None}), {}),
    "worker shadowed": (
        "worker",
        "error",
        "SHADOWED",
        change(worker={"fixes": [{"id": "D6", "name": "ids", "state": "SHADOWED", "reason": "x"}]}),
        {},
    ),
}


def loud(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.level in ("warning", "error")]


def test_a_good_report_is_silent() -> None:
    assert [f for f in judge(GOOD, {}) if f.level != "ok"] == []


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_report_is_named(name: str) -> None:
    check, level, word, report, environment = BAD[name]
    found = judge(report, environment)
    hits = [f for f in found if f.id == check and f.level == level and word in f.message]
    assert hits, loud(found)
    if level == "error" and check not in ("worker",):
        assert hits[0].why and hits[0].do


def test_a_refused_fix_that_nobody_needs_is_no_alarm() -> None:
    report = change(fixes=[*GOOD["fixes"], {"id": "C9", "name": "cpu", "state": "REFUSED", "reason": "shape"}])
    assert loud(judge(report, {})) == []


def test_an_editable_installation_is_said() -> None:
    report = change(distributions=first(editable="file:///site"))
    assert [f.id for f in judge(report, {}) if f.level == "info"] == ["code-location"]


# ---------------------------------------------------------------------------------------------------------------------
# Real children


def child(monkeypatch: pytest.MonkeyPatch, path: Path, **environment: str) -> list[Finding]:
    monkeypatch.setenv("PYTHONPATH", str(path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return judge(ask())


def test_a_broken_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('libtorch_cuda.so: cannot open')")
    found = child(monkeypatch, tmp_path)
    assert any(f.id == "vllm-import" and f.level == "error" and "libtorch_cuda.so" in f.message for f in found)


def test_a_vllm_that_ends_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("import os; os.abort()")
    found = child(monkeypatch, tmp_path)
    assert any(f.id == "child-process" and f.level == "error" for f in found)
    assert any(f.id == "metadata" and f.level != "error" for f in found), "what was known before is reported"


def test_without_any_vllm(tmp_path: Path) -> None:
    """A Python that has neither vLLM nor our dependencies still gets an answer, by the real command line."""
    script = "import sys; sys.path.insert(0, sys.argv.pop(1)); from vllm_kimi_eagle3.cli import main; sys.exit(main())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, str(ROOT), "doctor", "--json"],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONNOUSERSITE": "1", "VLLM_PLUGINS": "nothing"},
        timeout=600,
    )
    data = json.loads(done.stdout)
    assert data["vllm"] is None and done.returncode == 1
    assert any(c["id"] == "plugins-filter" and c["level"] == "error" for c in data["checks"])


PLUGIN = """
def register():
    from vllm.config.vllm import VllmConfig
    from vllm.config.speculative import SpeculativeConfig
    def __post_init__(self):
        pass
    VllmConfig.__post_init__ = __post_init__  # takes the place of whatever was there
    def hf_config_override(hf_config, *args, **kwargs):
        return hf_config
    SpeculativeConfig.hf_config_override = staticmethod(hf_config_override)
"""


def install(folder: Path, name: str, plugin: str, body: str) -> None:
    """A distribution with a plugin, as an installer leaves it."""
    (folder / f"{name}.py").write_text(body)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin} = {name}:register\n")


@pytest.mark.engine
def test_another_plugin_that_replaces_what_we_patch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Loaded after ours: a gate that it removes is lost. Entry points come in the order of sys.path, so append it.
    install(tmp_path, "zz_other", "zz_other", PLUGIN)
    hook = tmp_path / "usercustomize_path"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(tmp_path)!r})")
    found = child(monkeypatch, hook, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    assert any(f.id == "gates" and f.level == "error" and "VllmConfig" in f.message for f in found), loud(found)
    foreign = [f for f in found if f.id == "two-plugins" and f.level == "warning"]
    assert any("zz_other" in f.message and "hf_config_override" in f.message for f in foreign), loud(found)


MOVED = """
import importlib.abc, sys
GONE = ("vllm.config.speculative", "vllm.config.vllm", "vllm.v1.worker.worker_base")
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.engine
def test_a_vllm_that_moved_all_that_the_gates_wait_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hook fires and nothing fails: a server of ours would run as stock without a word."""
    (tmp_path / "sitecustomize.py").write_text(MOVED)
    found = child(monkeypatch, tmp_path, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    gates = [f for f in found if f.id == "gates"]
    assert [f.level for f in gates] == ["error"] and "none of the 4 methods" in gates[0].message, loud(found)
    assert "never asked" in gates[0].why


@pytest.mark.engine
def test_a_broken_dependency_that_vllm_would_swallow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wrapt").mkdir()
    (tmp_path / "wrapt/__init__.py").write_text("raise ImportError('wrapt is broken')")
    found = child(monkeypatch, tmp_path, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    assert any(f.id == "plugin-loaded" and f.level == "error" and "wrapt is broken" in f.message for f in found), loud(
        found
    )


@pytest.mark.engine
def test_stale_metadata_and_another_copy_of_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm_kimi_eagle3").mkdir()
    (tmp_path / "vllm_kimi_eagle3/__init__.py").write_text("__version__ = '0.0.1'")
    info = tmp_path / "vllm_kimi_eagle3.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm-kimi-eagle3\nVersion: 0.0.1\n")
    found = child(monkeypatch, tmp_path, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    assert any(f.id == "metadata" and f.level == "error" and str(info) in f.message for f in found), loud(found)
    assert any(f.id == "plugin-loaded" and f.level == "error" for f in found), loud(found)


@pytest.mark.engine
def test_the_real_thing(tmp_path: Path) -> None:
    """The trained pair on the installed vLLM: every fix applied where a server applies it, spawned worker included."""
    from vllm_kimi_eagle3.tiny_kimi.materialize import materialize

    pair = materialize(tmp_path / "pair")
    command = [sys.executable, "-m", "vllm_kimi_eagle3.cli", "doctor", "--json"]
    command += ["--target", str(pair["kimi_k25"]), "--drafter", str(pair["eagle3_mla_boundary"])]
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "cache"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    data = json.loads(done.stdout)
    assert done.returncode == 0, data["checks"]
    assert [c for c in data["checks"] if c["level"] in ("warning", "error")] == []
    assert data["server"]["plan"]["boundaries"] == [4, 7, 9]
    states = {fix["id"]: fix["state"] for fix in [*data["fixes"], *data["worker"]] if fix["state"] == "APPLIED"}
    wanted = {label.split()[0] for label in data["needed"]["KimiK25ForConditionalGeneration"]}
    assert set(states) == wanted
