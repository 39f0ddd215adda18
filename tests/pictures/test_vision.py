# SPDX-License-Identifier: Apache-2.0
"""The reference's vision tower is Transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_kimi_eagle3.reference import Vision, patchify
from vllm_kimi_eagle3.reference.ops import placed, shifted
from vllm_kimi_eagle3.regression import pictures
from vllm_kimi_eagle3.regression.pictures import images
from vllm_kimi_eagle3.tiny_kimi.materialize import HERE, kimi_config

MEAN = STD = [0.5, 0.5, 0.5]
SIZES = {"square": (112, 112, 1), "wide": (140, 56, 1), "tall": (28, 84, 1), "chunk": (56, 84, 3)}


def frames(width: int, height: int, count: int) -> torch.Tensor:
    made = images({"scenes": list(range(count)), "size": [width, height]})
    return torch.stack(
        [torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8).view(height, width, 3) for i in made]
    )


@pytest.fixture(scope="module")
def theirs(pictures_pair: dict[str, Path]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Transformers' tower and projector with the pair's weights."""
    pytest.importorskip("transformers.models.kimi_k25")
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25MultimodalProjection, Kimi_K25VisionModel

    config = Kimi_K25Config(**kimi_config(pictures=True))
    tower, projector = Kimi_K25VisionModel(config.vision_config), Kimi_K25MultimodalProjection(config)
    stored = load_file(pictures_pair["pictures"] / "model.safetensors")
    tower.load_state_dict(renamed(stored, "vision_tower.", config.vision_config.num_attention_heads))
    projector.load_state_dict(renamed(stored, "mm_projector.", 0))
    return tower.eval(), projector.eval()


def renamed(stored: dict[str, torch.Tensor], prefix: str, heads: int) -> dict[str, torch.Tensor]:
    """Kimi's names and layouts to those of Transformers: its heads keep pairs half a head apart."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if not name.startswith(prefix):
            continue
        name, tensor = name.removeprefix(prefix), tensor.float()
        for old, new in (
            ("patch_embed.pos_emb.weight", "patch_embed.pos_emb.position_embeddings"),
            ("encoder.final_layernorm.", "final_layernorm."),
            ("encoder.blocks.", "layers."),
            (".norm0.", ".norm1#"),
            (".norm1.", ".norm2."),
            (".norm1#", ".norm1."),
            ("mlp.fc1", "mlp.fc2"),
            ("mlp.fc0", "mlp.fc1"),
            (".wo.", ".attn.proj."),
            ("proj.0.", "in_proj."),
            ("proj.2.", "out_proj."),
        ):
            if prefix == "mm_projector." or not old.startswith("proj."):
                name = name.replace(old, new)
        if ".wqkv." not in name:
            found[name] = tensor
            continue
        for letter, part in zip("qkv", tensor.chunk(3), strict=True):
            if letter != "v":
                part = part.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            found[name.replace(".wqkv.", f".attn.{letter}_proj.")] = part
    return found


@pytest.mark.parametrize("size", SIZES)
def test_it_embeds_as_transformers_does(size: str, vision: Vision, theirs: tuple[torch.nn.Module, ...]) -> None:
    patches, grid = patchify(frames(*SIZES[size]), mean=MEAN, std=STD)
    ours = vision.forward(patches, grid)
    with torch.no_grad():
        out = theirs[0](patches, grid_thw=torch.tensor([grid]))
        merged = getattr(out, "pooler_output", out)
        want = theirs[1](merged if isinstance(merged, torch.Tensor) else torch.cat(list(merged))).flatten(0, -2)
    assert ours.shape == (grid[1] * grid[2] // 4, 128)
    assert (ours - want).norm() <= 1e-5 * want.norm()
    turned = vision.forward(patches.flip(0), grid)
    assert (turned - want).norm() > 1e-2 * want.norm()


def test_patches_are_those_of_vllm_s_processor() -> None:
    fused = pytest.importorskip("vllm.transformers_utils.processors.kimi_k25_vision_fused")
    config = json.loads((HERE / "checkpoint" / "preprocessor_config.json").read_text())["media_proc_cfg"]
    processor = fused.KimiK25FusedVisionProcessor(config)
    for width, height, count in [*SIZES.values(), (50, 90, 1)]:
        made = images({"scenes": list(range(count)), "size": [width, height]})
        media = {"type": "image", "image": made[0]} if count == 1 else {"type": "video_chunk", "video_chunk": made}
        theirs = processor.preprocess([media], return_tensors="pt")
        patches, grid = patchify(frames(width, height, count), mean=config["image_mean"], std=config["image_std"])
        assert theirs["grid_thws"].tolist() == [list(grid)]
        assert torch.allclose(theirs["pixel_values"], patches, atol=1e-6)


@pytest.mark.parametrize("size", [*SIZES.values(), (50, 90, 1)])
def test_the_checkpoint_s_own_processor_cuts_the_same(
    size: tuple[int, int, int], pictures_pair: dict[str, Path]
) -> None:
    from vllm_kimi_eagle3.tiny_kimi.tiny_vision import TinyVisionProcessor

    assert (pictures_pair["pictures_legacy"] / "tiny_vision.py").exists()
    config = json.loads((HERE / "checkpoint" / "preprocessor_config.json").read_text())["media_proc_cfg"]
    made = images({"scenes": list(range(size[2])), "size": list(size[:2])})
    media = {"type": "image", "image": made[0]} if size[2] == 1 else {"type": "video_chunk", "video_chunk": made}
    processor = TinyVisionProcessor(config)
    theirs = processor.preprocess([media])
    patches, grid = patchify(frames(*size), mean=config["image_mean"], std=config["image_std"])
    assert theirs["grid_thws"].tolist() == [list(grid)]
    assert torch.allclose(theirs["pixel_values"], patches, atol=1e-6)
    assert processor.media_tokens_calculator(media) == grid[1] * grid[2] // 4


def test_a_large_picture_is_made_smaller() -> None:
    from PIL import Image

    from vllm_kimi_eagle3.tiny_kimi.tiny_vision import TinyVisionProcessor

    processor, media = TinyVisionProcessor(), {"type": "image", "image": Image.new("RGB", (3000, 1000))}
    _, rows, columns = processor.preprocess([media])["grid_thws"].tolist()[0]
    assert rows * columns <= 300
    assert processor.media_tokens_calculator(media) == rows * columns // 4


def test_media_are_placed_and_shifted() -> None:
    media = dict(zip((1, 2, 4), torch.arange(6.0).view(3, 2), strict=True))
    assert {place: row.tolist() for place, row in shifted(media, 2).items()} == {0: [2, 3], 2: [4, 5]}
    assert placed(torch.zeros(3, 2), media).tolist() == [[0, 0], [0, 1], [2, 3]]
    assert placed(torch.zeros(3, 2), None).tolist() == [[0, 0]] * 3


def test_placeholders_are_given_to_pictures_from_the_left(vision: Vision) -> None:
    shown = [{"scenes": [1], "size": [28, 28]}, {"scenes": [2], "size": [56, 28]}]
    found = pictures.media(vision, [7, 266, 8, 266, 266], [7, 266, 8, 266, 266, 266], shown)
    assert list(found) == [1, 3, 4]
    with pytest.raises(ValueError, match="the engine's prompt is"):
        pictures.media(vision, [7, 266, 8, 266], [7, 266, 8, 266], shown)
