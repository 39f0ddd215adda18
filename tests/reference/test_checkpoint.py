# SPDX-License-Identifier: Apache-2.0
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import relative_error
from transformers import DeepseekV3ForCausalLM

from vllm_kimi_eagle3.reference import Target, checkpoint, load_checkpoint

PROMPT = [5, 17, 80, 3]
Folders = dict[str, tuple[DeepseekV3ForCausalLM, Path]]


@pytest.fixture
def plain(target_folders: Folders) -> Path:
    return target_folders["plain"][1]


def test_a_kimi_k25_wrapper_reads_like_the_model_inside(plain: Path, tmp_path: Path) -> None:
    inner = json.loads((plain / "config.json").read_text())
    config = {"model_type": "kimi_k25", "hidden_size": 1, "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {f"language_model.{n}": t for n, t in load_file(plain / "model.safetensors").items()}
    save_file({**weights, "vision_tower.x.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    wrapped = Target.load(tmp_path)
    assert wrapped.config["hidden_size"] == 48
    assert not [n for n in wrapped.weights if "vision" in n]
    assert relative_error(wrapped.forward(PROMPT).boundaries, Target.load(plain).forward(PROMPT).boundaries) < 1e-5


@pytest.mark.parametrize("lazy", [False, True])
def test_shards_and_lazy_reading_change_nothing(target_folders: Folders, tmp_path: Path, lazy: bool) -> None:
    model, plain = target_folders["plain"]
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    save_file({"model.norm.weight": torch.zeros(48)}, tmp_path / "leftover.safetensors")  # not in the index
    sharded = Target.load(tmp_path, lazy=lazy)
    assert isinstance(sharded.weights, dict) is not lazy
    whole = Target.load(plain)
    assert sharded.weights.keys() == whole.weights.keys()
    assert all(torch.equal(sharded.weights[n], t) for n, t in whole.weights.items())
    # Where a tensor lies in memory decides its alignment, and with it the last bit of a product.
    assert relative_error(sharded.forward(PROMPT).logits, whole.forward(PROMPT).logits) < 1e-5


def test_dtype_applies_to_weights_but_not_to_ids_or_the_router_bias(plain: Path) -> None:
    weights = load_checkpoint(plain, dtype=torch.bfloat16).weights
    kinds = {n.rsplit(".", 1)[-1]: t.dtype for n, t in weights.items()}
    assert kinds == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}
    out = Target.load(plain, dtype=torch.bfloat16).forward(PROMPT)
    assert out.boundaries.dtype == out.logits.dtype == torch.bfloat16


def test_an_index_chooses_the_files_and_one_too_large_is_passed_over(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    (tmp_path / "another.safetensors").write_bytes(b"not one")
    stored = [path.name for path in plain.glob("*.safetensors")]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(stored)}}))
    assert load_checkpoint(tmp_path, lazy=True).weights.keys() == load_checkpoint(plain, lazy=True).weights.keys()
    monkeypatch.setattr(checkpoint, "MAX_CONFIG", index.stat().st_size - 1)
    with pytest.raises(Exception, match="header"):
        load_checkpoint(tmp_path, lazy=True)
    monkeypatch.undo()
    index.write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(ValueError, match="out of its folder"):
        load_checkpoint(tmp_path, lazy=True)


def test_two_files_with_the_same_tensor_are_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    for name in ("a", "b"):
        save_file({"model.norm.weight": torch.ones(4)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is in a\.safetensors and in b\.safetensors"):
        load_checkpoint(tmp_path)


def test_quantised_checkpoints_are_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    save_file({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="weight_scale_inv belongs to a quantised checkpoint"):
        load_checkpoint(tmp_path)


def test_pickles_are_never_opened(plain: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'sprung')!r}, 'w')",)

    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(("module", "expected"), [("vllm_kimi_eagle3", False), ("vllm_kimi_eagle3.reference", True)])
def test_only_the_reference_imports_torch(module: str, expected: bool) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules, 'vllm' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(expected), "False", "False"]
