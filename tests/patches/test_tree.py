# SPDX-License-Identifier: Apache-2.0
"""All or nothing, never outside the folder, and never twice: the command on trees that are made to be difficult."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patches.trees import small, texts, touched
from vllm_kimi_eagle3.cli import main
from vllm_kimi_eagle3.source_patches import series, tree
from vllm_kimi_eagle3.source_patches.tree import Tree, TreeError

RELEASE = "0.33.0"
PATCHES = series.for_release(RELEASE)
FILES = touched(PATCHES)
RUNNER = "vllm/v1/worker/gpu_model_runner.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small(RELEASE, tmp_path / "tree", FILES)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["patches", *arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--vllm", RELEASE, "--json")
    data = json.loads(out)
    assert status == 0
    assert [entry["id"] for entry in data["series"]] == [patch.defect for patch in PATCHES.patches]
    status, out, _ = run(capsys, "--vllm", "0.17.1")
    assert status == 0 and "target-whitelist" in out


def test_check_apply_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = texts(folder, FILES)
    status, out, _ = run(capsys, "--check", str(folder), "--json")
    assert (status, json.loads(out)["state"]) == (1, "needed")
    assert texts(folder, FILES) == before
    status, out, _ = run(capsys, "--apply", str(folder), "--json")
    assert (status, json.loads(out)["state"]) == (0, "has")
    after = texts(folder, FILES)
    for option in ("--apply", "--check"):
        status, out, _ = run(capsys, option, str(folder), "--json")
        assert (status, json.loads(out)["state"]) == (0, "has")
        assert {entry["state"] for entry in json.loads(out)["series"]} == {"has"}
    assert texts(folder, FILES) == after
    assert not list(folder.rglob("*-new"))


@pytest.mark.parametrize("said", [None, "0.1.dev1", "0.33.1.dev7+gabc", "99.0", "nonsense"])
def test_a_tree_that_does_not_say_its_release(
    folder: Path, capsys: pytest.CaptureFixture[str], said: str | None
) -> None:
    version = folder / "vllm/_version.py"
    version.unlink()
    if said is not None:
        version.write_text(f"__version__ = version = '{said}'\n")
    status, out, _ = run(capsys, "--check", str(folder), "--json")
    assert (status, json.loads(out)["range"]) == (1, RELEASE)
    (folder / RUNNER).write_text("")
    status, out, err = run(capsys, "--check", str(folder))
    assert status == 2 and not out and "--vllm" in err


@pytest.mark.parametrize("index", range(len(FILES)))
def test_a_conflict_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str], index: int) -> None:
    changed = folder / FILES[index]
    change = next(c for p in PATCHES.patches for c in p.changes if c.path == FILES[index])
    text = changed.read_text("utf-8")
    line = change.hunks[0].old[0]
    changed.write_text(text.replace(line, f"{line.rstrip()}  # ours\n"), "utf-8")
    before = texts(folder, FILES)
    status, out, err = run(capsys, "--apply", str(folder))
    assert status == 1 and "conflicts" in out and "nothing was changed" in err
    assert texts(folder, FILES) == before


@pytest.mark.parametrize("failing", range(1, len(FILES) + 1))
def test_a_write_that_fails_is_rolled_back(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    before = texts(folder, FILES)
    calls = 0
    rename = os.rename

    def full_disk(*arguments: object, **options: object) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(28, "No space left on device")
        rename(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tree.os, "rename", full_disk)
    status, _, err = run(capsys, "--apply", str(folder))
    assert status == 1 and "nothing was changed" in err
    assert calls >= failing
    assert texts(folder, FILES) == before
    assert not list(folder.rglob("*-new"))


def test_two_at_once(folder: Path) -> None:
    with Tree(folder) as one, Tree(folder) as other:
        tree.fcntl.flock(one._fd, tree.fcntl.LOCK_EX)
        with pytest.raises(TreeError, match="another process"):
            other.replace({RUNNER: ""})


@pytest.mark.parametrize("part", ["vllm", "vllm/v1", "vllm/v1/worker", RUNNER])
def test_symbolic_links_inside_are_not_followed(folder: Path, capsys: pytest.CaptureFixture[str], part: str) -> None:
    outside = folder.parent / "outside"
    (folder / part).rename(outside)
    (folder / part).symlink_to(outside)
    before = {p: p.read_bytes() for p in sorted(folder.parent.rglob("*.py")) if p.is_file()}
    status, _, _ = run(capsys, "--apply", str(folder), "--vllm", RELEASE)
    assert status in (1, 2)
    assert {p: p.read_bytes() for p in before} == before


def test_a_link_to_the_folder_is_the_callers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert run(capsys, "--apply", str(link))[0] == 0


def test_hard_links_are_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached = folder.parent / "cached.py"
    os.link(folder / RUNNER, cached)
    before = cached.read_bytes()
    assert run(capsys, "--apply", str(folder))[0] == 0
    assert cached.read_bytes() == before != (folder / RUNNER).read_bytes()


def test_permissions_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / RUNNER).chmod(0o640)
    assert run(capsys, "--apply", str(folder))[0] == 0
    assert (folder / RUNNER).stat().st_mode & 0o7777 == 0o640


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        _pipe,
        _folder,
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe\x00" * 1000),
        lambda path: path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n")),
        lambda path: os.truncate(path, tree.LARGEST + 1),
    ],
    ids=["pipe", "folder", "missing", "empty", "binary", "crlf", "huge"],
)
def test_files_that_are_none(folder: Path, capsys: pytest.CaptureFixture[str], spoil) -> None:
    spoil(folder / RUNNER)
    rest = [file for file in FILES if file != RUNNER]
    before = texts(folder, rest)
    status, out, _ = run(capsys, "--apply", str(folder))
    assert status == 1 and "conflicts" in out
    assert texts(folder, rest) == before


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "vllm/../../x", "vllm//x", "./x", ""])
def test_paths_that_climb(folder: Path, path: str) -> None:
    with Tree(folder) as opened:
        with pytest.raises(TreeError):
            opened.read(path)
        with pytest.raises(TreeError):
            opened.replace({path: ""})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--check", "/nonexistent"],
        ["--check", "{file}"],
        ["--apply", "{empty}"],
        ["--vllm", "nonsense"],
        ["--vllm", "0.14.0"],
        ["--vllm", "99.0.0"],
        ["--vllm", "0" * 5000],
        ["--dirty"],
        ["--check", "{tree}", "--apply", "{tree}"],
        ["--check", "a\0b"],
        ["--check", ""],
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    names = {"file": str(folder / RUNNER), "empty": str(folder.parent), "tree": str(folder)}
    status, out, err = run(capsys, *(argument.format(**names) for argument in arguments))
    assert status == 2 and not out
    assert len(err.strip().splitlines()[-1]) < 500


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_dirty_checkout_is_refused_unless_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "pristine")
    (folder / "new.txt").write_text("new files do not count")
    with (folder / "vllm/__init__.py").open("a") as file:
        file.write("# ours\n")
    before = texts(folder, FILES)
    status, _, err = run(capsys, "--apply", str(folder))
    assert status == 1 and "uncommitted" in err and "--dirty" in err
    assert texts(folder, FILES) == before
    assert run(capsys, "--apply", str(folder), "--dirty")[0] == 0
    assert run(capsys, "--apply", str(folder))[0] == 0, "patched already: nothing to refuse"


def test_a_clean_checkout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "pristine")
    assert run(capsys, "--apply", str(folder))[0] == 0


def test_a_monitor_of_the_checkouts_own_is_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "pristine")
    mark = folder.parent / "ran"
    git(folder, "config", "core.fsmonitor", f"touch {mark};")
    assert run(capsys, "--apply", str(folder))[0] == 0
    assert not mark.exists()


def test_without_git(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    git(folder, "init", "-q")
    monkeypatch.setenv("PATH", "/nonexistent")
    status, _, err = run(capsys, "--apply", str(folder))
    assert status == 1 and "git cannot be asked" in err


def test_the_wheel_brings_them(tmp_path: Path) -> None:
    """Where the finder looks first; that the build puts them there is in pyproject.toml."""
    import tomllib

    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    forced = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert forced == {"patches": "vllm_kimi_eagle3/patches"}
    package = tmp_path / "vllm_kimi_eagle3"
    shutil.copytree(root / "vllm_kimi_eagle3", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "patches", package / "patches")
    code = "from vllm_kimi_eagle3.cli import main; raise SystemExit(main(['patches', '--vllm', '0.33.0']))"
    done = subprocess.run(["python3", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and str(package / "patches") in done.stdout, done.stderr
