# SPDX-License-Identifier: Apache-2.0
"""What the campaigns share: arguments that are refused before anything is measured, and a result that is whole."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any


def result_file(text: str) -> Path:
    """An argument: a file that can be written, asked before minutes of measuring."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: no file can be written there; name one in a folder that exists")
    return path


def count(text: str) -> int:
    """An argument: a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} was given, but a whole number from 1 on was expected")
    return int(text)


def counts(text: str) -> list[int]:
    """An argument: "1,4,16" as a list."""
    return [count(part) for part in text.split(",")]


def duration(text: str) -> float:
    """An argument: a positive time, of 1e9 at most."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} was given, but a positive number of seconds was expected")
    return value


def pattern(text: str) -> str:
    """An argument: a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text} is no regular expression: {error}") from None
    return text


def need_gpus(parser: argparse.ArgumentParser, wanted: int) -> None:
    """End with status 2 where fewer GPUs are visible."""
    import torch

    seen = torch.cuda.device_count()
    if seen < wanted:
        parser.error(f"this needs {wanted} GPU{'s' * (wanted > 1)}, and {seen} can be seen")


def command(script: str) -> str:
    """How a result can be had again; where its file went is nobody's business."""
    said = list(sys.argv[1:])
    if "--out" in said:
        said[said.index("--out") + 1] = "RESULT.json"
    return shlex.join(["python", f"bench/gpu/{script}", *said])


def header(script: str) -> dict[str, Any]:
    """What a result was measured on, with which command."""
    import torch

    count = torch.cuda.device_count()
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": f"{count} x " * (count > 1) + torch.cuda.get_device_name(),
        "vllm": importlib.metadata.version("vllm"),
        "torch": torch.__version__,
        "command": command(script),
    }


def write(path: Path, data: dict[str, Any]) -> None:
    """By a temporary file in the same folder."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)
