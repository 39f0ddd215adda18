# SPDX-License-Identifier: Apache-2.0
"""Engine runs, each made once, and their comparison with the reference."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors.torch import load_file, save_file

from vllm_kimi_eagle3.regression.engine import RECORDS, TARGET_PROBE, EngineRun, run_engine, run_probe, served_of
from vllm_kimi_eagle3.regression.environment import Environment
from vllm_kimi_eagle3.regression.settings import MAX_MODEL_LEN, PROMPTS, RIGHT, RULE, Setting, suite_settings
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize
from vllm_kimi_eagle3.tiny_kimi.widen import widen
from vllm_kimi_eagle3.verify.compare import Comparison, compare
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle

if TYPE_CHECKING:
    from typing_extensions import Self

CONFIG_PROBE = "vllm_kimi_eagle3.regression.config_probe"
_T = TypeVar("_T")


def make_pair(folder: Path, *, wide: bool) -> dict[str, Path]:
    """The tiny pair's folders; ``wide``: with the head sizes that CUDA's MLA kernels take."""
    pair = materialize(folder / "pair")
    return {name: widen(source, folder / "wide" / name) for name, source in pair.items()} if wide else pair


class Runs:
    """Engines by setting, each started once; what one failed with is raised each time it is asked for.

    Args:
        pair: the tiny pair's folders.
        settings: by name.
        at_once: how many engines may run at a time.
    """

    def __init__(self, pair: Mapping[str, Path], settings: Mapping[str, Setting], at_once: int = 1) -> None:
        self.pair = pair
        self.settings = settings
        self._pool = ThreadPoolExecutor(at_once)
        self._begun: dict[str, Future[Any]] = {}
        self._made: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, names: Iterable[str]) -> None:
        """Start these settings' engines, without waiting for them."""
        for name in names:
            self._begin(name, lambda name=name: self._start(name))

    def run(self, name: str) -> EngineRun:
        """The run of a setting.

        Raises:
            EngineFailed: the engine ended with an error.
        """
        self.begin([name])
        return self._begun[name].result()

    def _begin(self, key: str, make: Callable[[], Any]) -> Future[Any]:
        if key not in self._begun:
            self._begun[key] = self._pool.submit(make)
        return self._begun[key]

    def _start(self, name: str) -> EngineRun:
        s = self.settings[name]
        options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "dtype": s.dtype, **s.options}
        return run_engine(self.pair[s.target], s.rounds, drafter=self.pair[s.drafter], k=s.k, env=s.env, **options)

    def once(self, key: str, make: Callable[[], _T]) -> _T:
        """What ``make`` returned the first time."""
        if key not in self._made:
            self._made[key] = make()
        return cast("_T", self._made[key])

    def oracle(
        self, kind: str, boundaries: tuple[int, ...], dtype: str, cache_dtype: torch.dtype | None = None
    ) -> CheckpointOracle:
        """The reference for one kind of drafter."""
        folders = self.pair["deepseek_v3"], self.pair[f"eagle3_{kind}_boundary"]
        return self.once(
            f"oracle {kind} {boundaries} {dtype} {cache_dtype}",
            lambda: CheckpointOracle(*folders, boundaries, getattr(torch, dtype), cache_dtype=cache_dtype),
        )

    def compared(
        self, name: str, index: int | None = None, boundaries: tuple[int, ...] | None = None, shift: int = 0
    ) -> Comparison:
        """A round of a setting against the reference; all untampered rounds together if none is named.

        Args:
            name: the setting.
            index: the round.
            boundaries: what the reference takes; None for the setting's own.
            shift: for a negative control: each row is replaced by the one this many before it in its call.
        """
        s, result = self.settings[name], self.run(name).result
        boundaries = boundaries or s.boundaries
        rounds = [i for i, entry in enumerate(s.rounds) if not isinstance(entry, dict)] if index is None else [index]

        def make() -> Comparison:
            served = [one for i in rounds for one in served_of(result["rounds"][i], s.requests(i))]
            for call in (call for one in served for call in one.calls):
                call.rows = call.rows.roll(shift, dims=0)
            return compare(
                served,
                self.oracle(s.drafter.split("_")[1], boundaries, s.dtype),
                boundaries,
                dtype=s.dtype,
                block_size=result["block_size"],
                max_model_len=MAX_MODEL_LEN,
            )

        return self.once(f"compared {name} {index} {boundaries} {shift}", make)


class Suite(Runs):
    """The runs of the installed suite, in its environment.

    Args:
        environment: what is installed.
        folder: an empty one, for models and caches.
    """

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.environment = environment
        gpu = environment.device == "gpu"
        # Not more: on a CPU they would only take the time from each other, and a GPU is shared.
        at_once = 2 if gpu else 1
        pair = make_pair(folder, wide=gpu)
        os.environ.setdefault(RECORDS, str(folder / "model-records"))
        super().__init__(
            {**pair, **more_drafters(pair["eagle3_gqa_nested"], folder)},
            suite_settings(environment),
            at_once,
        )
        self.runners: set[str] = set()

    def run(self, name: str) -> EngineRun:
        """See ``Runs``; notes which model runner it was."""
        made = super().run(name)
        self.runners.add(made.result["runner"])
        return made

    @property
    def kimi(self) -> str:
        """The Kimi-K2.5 whose configuration this vLLM was written for."""
        return "kimi_k25" if self.environment.new_schema else "kimi_k25_legacy"

    def target(self, kind: str, dtype: str = "float32") -> dict[str, Any]:
        """One of our targets alone in the CPU engine, seen as a drafter would see it: see ``target_probe``.

        Raises:
            EngineFailed: the engine ended with an error.
        """
        job: dict[str, Any] = {
            "engine": self._engine(kind, dtype),
            "drafter": str(self.pair["eagle3_headless_boundary"]),
            "mla_drafter": str(self.pair["eagle3_mla_boundary"]),
            "boundaries": list(RIGHT),
            "prompt": PROMPTS[0][-24:],
            "tokens": 16,
            "load_drafter": True,
            **({} if "kimi" in kind else {"other_boundaries": [0, 4, 9]}),
            "cuda_device_is_cpu": self.environment.cuda_by_name,
        }
        return self._probe(f"target {kind} {dtype}", TARGET_PROBE, job)

    def config(self, name: str) -> dict[str, Any]:
        """What vLLM makes of a server's configuration: see ``config_probe``.

        Raises:
            EngineFailed: not one configuration could be tried.
        """
        rule = {name: {RULE: name.split()[0]} for name in ("output rule", "boundary rule")}
        servers: dict[str, tuple[str, str, dict[str, str]]] = {
            "deepseek_v3": ("deepseek_v3", "eagle3_gqa_boundary", {}),
            "deepseek_v3 again": ("deepseek_v3", "eagle3_gqa_boundary", {}),
            "kimi_k25": (self.kimi, "eagle3_gqa_boundary", {}),
            "output rule": ("deepseek_v3", "eagle3_gqa_nested", rule["output rule"]),
            "boundary rule": ("deepseek_v3", "eagle3_gqa_nested_boundary", rule["boundary rule"]),
            "other layers": ("deepseek_v3", "eagle3_gqa_other_layers", rule["boundary rule"]),
            "mla drafter": ("deepseek_v3", "eagle3_mla_nested_v3", rule["output rule"]),
            "short drafter": ("deepseek_v3", "eagle3_gqa_short", {}),
        }
        configs = {
            key: {
                "engine": {
                    **self._engine(target, self.settings["eager"].dtype),
                    "speculative_config": {
                        "method": "eagle3",
                        "model": str(self.pair[drafter]),
                        "num_speculative_tokens": 3,
                    },
                },
                "env": env,
            }
            for key, (target, drafter, env) in servers.items()
        }
        return self._probe("configs", CONFIG_PROBE, {"configs": configs})[name]

    def _probe(self, key: str, module: str, job: dict[str, Any]) -> dict[str, Any]:
        mode, env = self.environment.mode, self.settings["eager"].env
        run = self._begin(key, lambda: run_probe(module, job, overlay=mode, env=env))
        return run.result().result

    def _engine(self, kind: str, dtype: str) -> dict[str, Any]:
        engine: dict[str, Any] = {
            "model": str(self.pair[kind]),
            "dtype": dtype,
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 2,
            # Kimi's processor wants a tokenizer, even for a server that serves text only.
            "skip_tokenizer_init": "kimi" not in kind,
        }
        if "kimi" in kind:
            engine["limit_mm_per_prompt"] = {"vision_chunk": 0}
        return engine


def more_drafters(nested: Path, folder: Path) -> dict[str, Path]:
    """The GQA drafter with nested ids that are boundaries, its own and other ones; a short one; one without lm_head."""
    key = "eagle_aux_hidden_state_layer_ids"
    changes: dict[str, dict[str, Any]] = {
        "eagle3_gqa_nested_boundary": {"eagle_config": {key: list(RIGHT)}},
        "eagle3_gqa_other_layers": {"eagle_config": {key: [3, 7, 9]}},
        "eagle3_gqa_short": {"eagle_config": None, key: list(RIGHT), "max_position_embeddings": MAX_MODEL_LEN // 2},
        "eagle3_headless_boundary": {"eagle_config": None, key: list(RIGHT), "draft_vocab_size": 320},
    }
    for name, change in changes.items():
        shutil.copytree(nested, folder / name)
        config = json.loads((nested / "config.json").read_text())
        merged = {k: v for k, v in {**config, **change}.items() if v is not None}
        (folder / name / "config.json").write_text(json.dumps(merged))
    headless = folder / "eagle3_headless_boundary" / "model.safetensors"
    weights = {n: w for n, w in load_file(headless).items() if n not in ("lm_head.weight", "d2t", "t2d")}
    headless.unlink()
    save_file(weights, headless, metadata={"format": "pt"})
    return {name: folder / name for name in changes}
