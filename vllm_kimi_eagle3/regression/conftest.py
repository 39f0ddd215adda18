# SPDX-License-Identifier: Apache-2.0
"""The suite's fixtures, its report at the top, and its refusal to pass when nothing was checked."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from vllm_kimi_eagle3.patching.source import SourceMissing
from vllm_kimi_eagle3.regression.engine import EngineFailed
from vllm_kimi_eagle3.regression.environment import Environment
from vllm_kimi_eagle3.regression.runs import Suite

HERE = Path(__file__).parent
ENVIRONMENT = pytest.StashKey[Environment]()
CHECKED = pytest.StashKey[set[str]]()
NOTHING = pytest.StashKey[bool]()
MARKERS = {
    "cpu": "about vLLM's CPU engine only; skipped on a GPU",
    "gpu": "needs a GPU; skipped without one",
    "slow": "compiles a model: half a minute and more",
}


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers."""
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.stash[CHECKED] = set()


def _environment(config: pytest.Config) -> Environment:
    if ENVIRONMENT not in config.stash:
        try:
            config.stash[ENVIRONMENT] = Environment.installed()
        except SourceMissing as error:
            raise pytest.UsageError(f"vllm-kimi-eagle3 regression suite: {error}") from None
    return config.stash[ENVIRONMENT]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """The environment. Here and not in the header, since with ``--pyargs`` this file is read after that is printed."""
    return _environment(config).report()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say of each test that is about the other device why it is not run."""
    device = _environment(config).device
    reasons = {
        "cpu": f"about vLLM's CPU engine, and this vLLM runs on {_environment(config).device_name}",
        "gpu": "needs a GPU that this vLLM and torch can use, and there is none",
    }
    for item in items:
        if item.path.parent != HERE:
            continue
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker) and marker != device:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def environment(request: pytest.FixtureRequest) -> Environment:
    """What is installed."""
    return _environment(request.config)


@pytest.fixture(scope="session")
def suite(
    environment: Environment,
    tmp_path_factory: pytest.TempPathFactory,
    record_testsuite_property: Callable[[str, object], None],
) -> Generator[Suite]:
    """The engines; JUnit's properties say at the end what they were."""
    with Suite(environment, tmp_path_factory.mktemp("regression")) as made:
        yield made
    for name, value in environment.properties().items():
        record_testsuite_property(name, value)
    record_testsuite_property("runner", " and ".join(sorted(made.runners)) or "none ran")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """An engine that did not run is told in one line; its log is a section of the report."""
    report = yield
    if item.path.parent == HERE:
        if call.excinfo is not None and isinstance(call.excinfo.value, EngineFailed):
            report.longrepr = f"the engine ended with an error: {call.excinfo.value.reason}"
            report.sections.append(("the end of the engine's log", str(call.excinfo.value)[-4000:]))
        if report.when == "call" and not report.skipped:
            item.config.stash[CHECKED].add(item.nodeid)
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Skips alone are no success."""
    config = session.config
    ours = [item for item in getattr(session, "items", []) if item.path.parent == HERE]
    if ours and not config.stash[CHECKED] and not config.option.collectonly:
        config.stash[NOTHING] = True
        if exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say so, where nothing was checked."""
    if NOTHING in config.stash:
        terminalreporter.write_line("vllm-kimi-eagle3 regression suite: nothing was checked", red=True)
