# SPDX-License-Identifier: Apache-2.0
"""The text the tiny pair is trained on: docstrings of permissively licensed Python packages, pinned.

`pip download` fetches the wheels named in `WHEELS`, every module's docstrings are taken out with `ast`, and the result
is cut into a training and a held-out part *by file* (a file's hash decides), so that no held-out docstring has a
neighbour of the same module in training. Repeated docstrings are dropped. The text is a pure function of the wheels;
its sha256 is pinned below and checked.

    python corpus.py OUT_DIR        # writes OUT_DIR/train.txt.xz and OUT_DIR/heldout_documents.json.xz
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import lzma
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# name==version, licence of the docstrings. All allow reuse with notice; see README.md.
WHEELS: dict[str, str] = {
    "astropy==8.0.2": "BSD-3-Clause",
    "dask==2026.8.0": "BSD-3-Clause",
    "django==5.2.19": "BSD-3-Clause",
    "matplotlib==3.11.2": "PSF-2.0 style (matplotlib licence)",
    "networkx==3.6.1": "BSD-3-Clause",
    "nltk==3.10.4": "Apache-2.0",
    "numpy==2.4.6": "BSD-3-Clause",
    "pandas==3.1.1": "BSD-3-Clause",
    "scikit-learn==1.9.1": "BSD-3-Clause",
    "scipy==1.17.1": "BSD-3-Clause",
    "sqlalchemy==2.1.9": "MIT",
    "statsmodels==0.15.0": "BSD-3-Clause",
    "sympy==1.14.0": "BSD-3-Clause",
    "xarray==2026.9.0": "Apache-2.0",
}

# One file in this many is held out.
HELD_OUT_ONE_IN = 25
# A docstring shorter than this says too little to be worth a row.
MIN_DOCSTRING_BYTES = 80
# Documents are joined by this byte; the trainer turns it into the end-of-text token.
SEPARATOR = b"\x00"

# sha256 of the uncompressed outputs.
TRAIN_SHA256 = "180d4ff85c7647786ffad9345bbf661be143717e5b6cf62106a5d5b1c9bae64a"
HELD_OUT_SHA256 = "0fc70d714cf7f57e6ac8d63f387413b4d04d3bf6aeb26c1f178a1a9c6ab76bd5"

_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64")


def download(into: Path) -> list[Path]:
    """Fetch every pinned wheel with pip (about 130 MB) and return their paths, sorted by name."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(into)]
    # The pure-Python files are the same in every platform's wheel; one platform is named so that any machine gets it.
    command += ["--python-version", "3.11", "--implementation", "cp"]
    for platform in (*_PLATFORMS, "manylinux2014_x86_64"):
        command += ["--platform", platform]
    subprocess.run([*command, *WHEELS], check=True)
    return sorted(into.glob("*.whl"))


def docstrings(source: str) -> list[str]:
    """Every docstring of a module in source order, dedented; empty when the source does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                found.append((getattr(node, "lineno", 0), inspect.cleandoc(text)))
    return [text for _, text in sorted(found, key=lambda item: item[0])]


def extract(wheels: list[Path]) -> tuple[bytes, list[dict[str, str]]]:
    """Return the training stream and the held-out documents (`file`, `text`), both in a fixed order."""
    seen: set[bytes] = set()
    train: list[bytes] = []
    held_out: list[dict[str, str]] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if not name.endswith(".py"):
                    continue
                documents: list[str] = []
                for text in docstrings(archive.read(name).decode("utf-8", "replace")):
                    raw = text.encode()
                    digest = hashlib.sha256(raw).digest()
                    # Plain ASCII only: a byte-level model of this size should not spend itself on UTF-8 sequences.
                    if len(raw) < MIN_DOCSTRING_BYTES or digest in seen or not raw.isascii() or b"\x00" in raw:
                        continue
                    seen.add(digest)
                    documents.append(text)
                if not documents:
                    continue
                body = "\n\n\n".join(documents)
                if int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0:
                    held_out.append({"file": name, "text": body})
                else:
                    train.append(body.encode())
    return SEPARATOR.join(train) + SEPARATOR, held_out


def build(out_dir: Path) -> None:
    """Download, extract, check the pinned hashes, and write the two compressed files."""
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        train, held_out = extract(download(Path(scratch)))
    held_out_raw = json.dumps(held_out, indent=0).encode()
    for name, data, pinned in (
        ("train.txt", train, TRAIN_SHA256),
        ("heldout_documents.json", held_out_raw, HELD_OUT_SHA256),
    ):
        digest = hashlib.sha256(data).hexdigest()
        print(f"{name}: {len(data):,} bytes, sha256 {digest}")
        if pinned and digest != pinned:
            raise SystemExit(f"{name}: expected sha256 {pinned}; the wheels or the extraction changed")
        (out_dir / f"{name}.xz").write_bytes(lzma.compress(data, preset=6))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    build(parser.parse_args().out_dir)
