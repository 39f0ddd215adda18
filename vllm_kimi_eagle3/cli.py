# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3``: the command line.

It must run in a broken environment, so it needs the standard library only, and a command's module is imported when
that command is asked for. Exit status: 0 good, 1 a problem was found, 2 bad usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from . import __version__
from .layers.plan import PlanError

INTERRUPTED = 130
"""What a shell says of a command that Ctrl-C has ended: 128 and the signal's number."""
DESCRIPTION = "EAGLE-3 speculative decoding that is right for Kimi-K2.x and DeepSeek-V3 on vLLM."
COMMANDS = {
    "bench": "speed, acceptance by position and the verdict",
    "calibrate": "measure which layers the drafter was trained on, and remember it",
    "doctor": "is the overlay in place, and do drafter and target fit each other",
    "layers": "which layers the drafter reads, who says so, and what stock vLLM would take",
    "patches": "the fixes as patches to vLLM's source, for those who build it themselves",
    "verify": "whether the drafter is given the right states, in every situation, on your own model",
}
"""One line a command: its module is ``commands/<name>.py``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments without the program's name; ``sys.argv[1:]`` if None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # A path may hold bytes that the terminal's encoding has not; show them escaped instead of failing.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    where = "vllm-kimi-eagle3" if asked is None else f"vllm-kimi-eagle3 {asked}"
    status = 0
    try:
        status = _run(arguments, asked)
        # Into a pipe or a file nothing is written before this; at exit it would be too late to say what failed.
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stdout.flush()
    except PlanError as error:
        print(f"{where}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # Behind a progress bar's line, or the terminal's ^C.
        print(f"\n{where}: interrupted" if sys.stderr.isatty() else f"{where}: interrupted", file=sys.stderr)
        _forget_stdout()
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()  # the reader has seen enough
    except OSError as error:
        # The commands word what they can foresee; a full disk behind stdout, or a path of 5000 letters, ends here.
        named = "" if error.filename is None else f": {str(error.filename)[:200]!a}"
        print(f"{where}: {error.strerror or error}{named}", file=sys.stderr)
        _forget_stdout()
        return 2
    return status


def _run(arguments: list[str], asked: str | None) -> int:
    """The exit status of one command; argparse's own endings included."""
    parser = argparse.ArgumentParser(prog="vllm-kimi-eagle3", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"vllm-kimi-eagle3 {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name == asked:
            importlib.import_module(f".commands.{name}", __package__).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    try:
        options, options.rest = parser.parse_known_args(arguments)
        if options.rest and not getattr(options, "takes_rest", False):
            parser.error(f"unrecognized arguments: {' '.join(options.rest)}")
        return options.run(options)
    except SystemExit as stop:  # argparse: --help and --version leave with 0, bad usage with 2
        return stop.code if isinstance(stop.code, int) else 2


def _forget_stdout() -> None:
    """Let what is still buffered go nowhere: Python would try to write it once more at exit, and complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
