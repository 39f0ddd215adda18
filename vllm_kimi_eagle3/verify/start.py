# SPDX-License-Identifier: Apache-2.0
"""An engine in this process with the arguments of ``vllm serve``, for the commands that look inside one."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.layers.files import read_config


def require_vllm(command: str) -> None:
    """Say which command needs vLLM, and keep the engine core that comes next in this process.

    Functions are sent to the workers from here, and steps are counted here.

    Raises:
        PlanError: vLLM can't be imported.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import vllm  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise PlanError(f"{command} starts an engine, and vLLM cannot be imported: {error}") from None


def parse(target: str, rest: Sequence[str], longest: int = 2048) -> Any:
    """The arguments of ``vllm serve`` as vLLM reads them.

    Args:
        target: the model.
        rest: what the user gave besides.
        longest: ``--max-model-len`` where the user gives none; the target's own where that is less. Of a checkpoint's
            262144 a command needs a few hundred.

    Raises:
        PlanError: vLLM does not know an argument.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            # vLLM's own error is preceded by its usage, several screens long.
            raise PlanError(f"vLLM's arguments: {message}")

    parsed: Any = EngineArgs.add_cli_args(Parser()).parse_args(["--model", target, *rest])
    given = {argument.split("=")[0].replace("_", "-") for argument in rest if argument.startswith("--")}
    if "--max-model-len" not in given and Path(target).is_dir():
        config = read_config(Path(target))
        inner = config.get("text_config")
        own = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
        parsed.max_model_len = min(longest, own) if isinstance(own, int) else longest
    return parsed


def start(parsed: Any, **forced: Any) -> Any:
    """An ``LLMEngine``.

    Args:
        parsed: what ``parse`` returned.
        forced: arguments that the command needs so, by their names in ``EngineArgs``.

    Raises:
        PlanError: it does not start; in one sentence.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    for name, value in forced.items():
        setattr(parsed, name, value)
    try:
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))
    except PlanError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # pydantic says in the first line only how many errors there are.
        told = [line for word in ("vllm-kimi-eagle3", "Value error, ") for line in lines if word in line]
        sentence = [*told, *lines][0].partition(" [type=")[0]  # what pydantic adds is of no use here
        raise PlanError(f"the engine did not start: {sentence[:400]}") from None


def _end_in_stderr() -> None:
    sys.stdout.flush()
    os.dup2(2, 1)


@contextmanager
def quiet_stdout() -> Generator[Callable[[str], None]]:
    """Everything that prints to stdout goes to stderr, workers and C++ included; the outcome goes to the real one.

    So does what is printed while the process ends: vLLM's executor says at exit how its workers went.
    """
    sys.stdout.flush()
    try:
        real = os.dup(1)
    except OSError:  # no such file descriptor: nothing to keep clean
        yield print
        return
    os.dup2(2, 1)

    def say(text: str) -> None:
        sys.stdout.flush()
        with os.fdopen(os.dup(real), "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text + "\n")

    try:
        yield say
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)
        # Functions are called at exit in the order last to first: by now vLLM has registered its own, which come later.
        atexit.register(_end_in_stderr)
