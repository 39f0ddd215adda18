# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders (config.json plus safetensors) as plain dicts and tensors.

Knows the two target layouts, DeepSeek-V3's own and Kimi-K2.5's wrapper (``text_config`` and ``language_model.``), and
drafters as SpecForge writes them. Reads safetensors only, so nothing is ever unpickled. Quantised weights are refused:
a reference that dequantised in its own way would answer a different question from the one asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_kimi_eagle3.layers.files import MAX_CONFIG, inside, ordinary, read_config, read_object
from vllm_kimi_eagle3.layers.plan import PlanError

_QUANTISED = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight", ".weight_shape")
_WRAPPER_ONLY = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True)
class Checkpoint:
    """A language model's config and weights, whatever wrapped them.

    Attributes:
        folder: where it was read from, for error messages.
        config: config.json, or its ``text_config`` for a wrapper checkpoint.
        weights: tensors by name, ``language_model.`` removed and ``midlayer.`` spelt ``layers.0.``.
    """

    folder: Path
    config: dict[str, Any]
    weights: Mapping[str, Tensor]


class LazyWeights(Mapping[str, Tensor]):
    """Tensors read from their file on each access, so that one layer at a time can pass through memory."""

    def __init__(self, files: dict[str, tuple[Path, str]], dtype: torch.dtype) -> None:
        self._files = files
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self._files[name]
        with safe_open(path, framework="pt") as f:
            tensor: Tensor = f.get_tensor(stored)
        if not tensor.is_floating_point():
            return tensor  # d2t and t2d are integers and booleans
        # The router's bias stays float32 in every engine: rounded, it would move the choice of experts.
        return tensor.to(torch.float32 if name.endswith("e_score_correction_bias") else self._dtype)

    def rows(self, name: str, indices: Sequence[int]) -> Tensor:
        """Some rows of a matrix, without reading the others: an embedding table can be larger than all else."""
        path, stored = self._files[name]
        with safe_open(path, framework="pt") as f:
            part = f.get_slice(stored)
            return torch.cat([part[i : i + 1] for i in indices]).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_checkpoint(folder: str | Path, *, dtype: torch.dtype = torch.float32, lazy: bool = False) -> Checkpoint:
    """Read a checkpoint folder.

    Args:
        folder: holds config.json and ``*.safetensors`` files, with an index or not.
        dtype: floating point tensors are converted to this.
        lazy: read each tensor on each access, for models that do not fit in memory.

    Raises:
        FileNotFoundError: no config.json, or no safetensors file.
        ValueError: two files hold the same tensor, the weights are quantised, or a file can't be trusted.
    """
    config, weights = _load(Path(folder), _plain_name, dtype)
    return Checkpoint(Path(folder), config.get("text_config", config), weights if lazy else dict(weights))


def load_vision_checkpoint(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """The part of a Kimi-K2.5 checkpoint that ``load_checkpoint`` leaves out; its config is the whole config.json.

    Raises:
        FileNotFoundError: no config.json, or no safetensors file.
        ValueError: as in ``load_checkpoint``, or there is no such part.
    """
    config, weights = _load(Path(folder), lambda stored: stored if stored.startswith(_WRAPPER_ONLY) else None, dtype)
    if not weights or "vision_config" not in config:
        raise ValueError(f"{folder}: no vision_config with the weights of a vision tower; only Kimi-K2.5's has one")
    return Checkpoint(Path(folder), config, dict(weights))


def _load(folder: Path, name_of: Callable[[str], str | None], dtype: torch.dtype) -> tuple[dict[str, Any], LazyWeights]:
    """The config, and the tensors that ``name_of`` gives a name."""
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder}: no config.json")
    config = read_config(folder)
    paths = [ordinary(inside(folder, path)) for path in _files(folder)]
    if not paths:
        raise FileNotFoundError(f"{folder}: no *.safetensors file; other formats are not read")

    files: dict[str, tuple[Path, str]] = {}
    for path in paths:
        with safe_open(path, framework="pt") as f:
            for stored in f.keys():  # noqa: SIM118 (not a dict)
                if stored.endswith(_QUANTISED):
                    raise ValueError(f"{path}: {stored} belongs to a quantised checkpoint; give an unquantised one")
                name = name_of(stored)
                if name is None:
                    continue
                if name in files:
                    raise ValueError(f"{folder}: {name} is in {files[name][0].name} and in {path.name}")
                files[name] = (path, stored)
    return config, LazyWeights(files, dtype)


def load_tensor(folder: str | Path, name: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """One tensor of a checkpoint, quantised elsewhere or not, by its name in a plain one.

    Raises:
        ValueError: no file stores it, or not as floating point numbers, or a file can't be trusted.
    """
    folder = Path(folder)
    for path in (ordinary(inside(folder, path)) for path in _files(folder)):
        with safe_open(path, framework="pt") as f:
            for stored in f.keys():  # noqa: SIM118 (not a dict)
                if stored.removeprefix("language_model.") == name:
                    tensor: Tensor = f.get_tensor(stored)
                    if not tensor.is_floating_point():
                        raise ValueError(f"{path}: {stored} is {tensor.dtype}, floating point numbers were expected")
                    return tensor.to(dtype)
    raise ValueError(f"{folder}: no file stores {name}")


def _files(folder: Path) -> list[Path]:
    """The safetensors files that the index names; all of them where there is none, or one of tens of megabytes.

    An index lists every tensor, and a 1T model has many.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists() or index.stat().st_size > MAX_CONFIG:
        return sorted(folder.glob("*.safetensors"))
    names = read_object(inside(folder, index), MAX_CONFIG).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in cast("dict[str, Any]", names).values()):
        raise PlanError(f"{index} has no weight_map of file names")
    return sorted({folder / name for name in cast("dict[str, str]", names).values()})


def _plain_name(stored: str) -> str | None:
    """The name in a plain checkpoint, or None for the wrapper's vision part."""
    if stored.startswith(_WRAPPER_ONLY):
        return None
    name = stored.removeprefix("language_model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
