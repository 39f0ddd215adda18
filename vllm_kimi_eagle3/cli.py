# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3``: the command line.

It must run in a broken environment, so it needs the standard library only, and a command's module is imported when
that command is asked for. Exit status: 0 good, 1 a problem was found, 2 bad usage or input.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from . import __version__
from .layers.plan import PlanError

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
    parser = argparse.ArgumentParser(prog="vllm-kimi-eagle3", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"vllm-kimi-eagle3 {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
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
    except PlanError as error:
        print(f"vllm-kimi-eagle3 {asked}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more at exit without this.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
