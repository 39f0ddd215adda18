# SPDX-License-Identifier: Apache-2.0
"""Train the picture pair: a smaller Kimi-K2.5 that names the shapes in a picture, and EAGLE-3 drafters for it.

    python train_pictures.py --out OUT_DIR          # two CPU cores will do; needs what train.py needs, and tokenizers

The modules are train.py's at a smaller size; the vision tower is the reference's own forward pass, trained through. A
picture and the same scene told in words are asked the same question and get the same answer, half of each in a batch.
While the target learns, a throwaway head reads each picture token for what is in its corner, or the tower would learn
only through seven layers that can't read yet.

Drafters are trained as in train.py, on the answers. What stands in a drafter's rows for a picture's tokens is the
choice that the pair is for: the picture's own embeddings (`embedding`), or the placeholder's (`placeholder`).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import train as pair
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm

from vllm_kimi_eagle3.reference.vision import Vision, patchify
from vllm_kimi_eagle3.tiny_kimi import materialize, scenes

SEED = 20262
HELD_OUT = 1_000_000  # scenes from this number on are never trained on
PLACEHOLDER, PAD = 266, 268
BATCH = 16
TARGET_LR = 2e-3
DRAFT_LR = 2e-3
THINGS = 1 + len(scenes.SIZES) * len(scenes.COLOURS) * len(scenes.SHAPES)
TOKENS_A_SIDE = scenes.SIDE // 28
DRAFTERS = {"gqa": "embedding", "mla": "embedding", "gqa_placeholder": "placeholder"}

CONFIG = materialize.kimi_config(pictures=True)
PROCESSOR = json.loads((materialize.HERE / "checkpoint/preprocessor_config.json").read_text())["media_proc_cfg"]
TOKENIZER = Tokenizer.from_file(str(materialize.HERE / "checkpoint/tokenizer.json"))


def shrink() -> None:
    """Give train.py's modules the picture pair's sizes: they read them when they are made."""
    text, gqa, mla = (
        CONFIG["text_config"],
        *(materialize.drafter_config(kind, "nested", pictures=True) for kind in ("gqa", "mla")),
    )
    pair.HIDDEN, pair.LAYERS = text["hidden_size"], text["num_hidden_layers"]
    pair.DENSE_WIDTH, pair.Q_RANK = text["intermediate_size"], text["q_lora_rank"]
    pair.DRAFT_WIDTH = {"gqa": gqa["intermediate_size"], "mla": mla["intermediate_size"]}
    pair.RIGHT = tuple(materialize.PICTURE_BOUNDARY_IDS)


def prompt(scene: scenes.Scene, order: str, picture: bool) -> str:
    """What the chat template makes of a question about a scene, as text with special tokens."""
    tokens = TOKENS_A_SIDE**2
    shown = f"<|media_begin|>image<|media_content|>{'<|media_pad|>' * tokens}<|media_end|>" if picture else scene.told()
    return (
        f"<|im_user|>user<|im_middle|>{shown}{scenes.question(order)}<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )


def pixels(scene: scenes.Scene) -> torch.Tensor:
    """The scene's patches, (64, 3, 14, 14)."""
    image = scene.draw()
    frame = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, image.height, image.width, 3)
    return patchify(frame, mean=PROCESSOR["image_mean"], std=PROCESSOR["image_std"])[0]


def things(scene: scenes.Scene) -> list[int]:
    """For each picture token, the number of what is in its corner; 0 is nothing."""
    sizes, colours, shapes = (list(names) for names in (scenes.SIZES, scenes.COLOURS, scenes.SHAPES))
    numbers = [
        0
        if thing is None
        else 1 + (sizes.index(thing[0]) * len(colours) + colours.index(thing[1])) * len(shapes) + shapes.index(thing[2])
        for thing in scene.corners
    ]
    half = TOKENS_A_SIDE // 2
    return [numbers[row // half * 2 + column // half] for row in range(2 * half) for column in range(2 * half)]


class Batch:
    """Rows of prompt and answer; the first half of them with pictures."""

    def __init__(self, numbers: list[int], choose: random.Random) -> None:
        made = [scenes.Scene.random(number) for number in numbers]
        self.pictures = len(made) // 2
        texts, starts = [], []
        for i, scene in enumerate(made):
            order = choose.choice(list(scenes.ORDERS))
            asked = TOKENIZER.encode(prompt(scene, order, i < self.pictures)).ids
            texts.append(asked + TOKENIZER.encode(scene.answer(order) + "<|im_end|>").ids)
            starts.append(len(asked))
        longest = max(map(len, texts))
        self.ids = torch.tensor([text + [PAD] * (longest - len(text)) for text in texts])
        places = torch.arange(longest)[None]
        self.answer = (places >= torch.tensor(starts)[:, None]) & (places < torch.tensor([*map(len, texts)])[:, None])
        self.patches = torch.stack([pixels(scene) for scene in made[: self.pictures]])
        self.things = torch.tensor([things(scene) for scene in made[: self.pictures]])


def vision_weights() -> nn.ParameterDict:
    """train.py's random tower at this pair's sizes, with a first layer that can start to learn."""
    vision = CONFIG["vision_config"]
    generator = torch.Generator().manual_seed(SEED)
    found = {}
    for name, value in pair.vision_tensors(vision["hidden_size"], vision["intermediate_size"]).items():
        if value.ndim > 1:
            value = torch.randn(value.shape, generator=generator) * value[0].numel() ** -0.5
        found[name.replace(".", "/")] = nn.Parameter(value.float())
    return nn.ParameterDict(found)


class Sight(nn.Module):
    """The target with its eyes."""

    def __init__(self) -> None:
        super().__init__()
        self.target = pair.Target()
        self.eyes = vision_weights()
        self.reader = nn.Linear(pair.HIDDEN, THINGS)

    def vision(self) -> Vision:
        """The reference's tower over this module's weights."""
        return Vision(CONFIG, {name.replace("/", "."): value for name, value in self.eyes.items()})

    def embeds(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings (B, T, hidden) with the pictures in place, and the pictures' own (B / 2, 16, hidden)."""
        grid = (1, 2 * TOKENS_A_SIDE, 2 * TOKENS_A_SIDE)
        seen = self.vision().forward(batch.patches, grid)
        x = self.target.model.embed_tokens(batch.ids)
        return x.masked_scatter((batch.ids == PLACEHOLDER)[..., None], seen.to(x.dtype)), seen


def batches(seed: int):
    """Batches without end, of scenes that are not held out."""
    choose = random.Random(seed)
    while True:
        yield Batch([choose.randrange(HELD_OUT) for _ in range(BATCH)], choose)


def train_target(steps: int, seconds: float, peak: float, seed: int, out: Path, model: Sight) -> None:
    """Train for `steps` steps or as many as fit in the time."""
    print(f"target: {sum(p.numel() for p in model.target.parameters()):,} parameters", flush=True)
    opt = pair.optimizer(model, 0.05, False)
    gates = [layer.mlp.gate for layer in model.target.model.layers if isinstance(layer.mlp, pair.MoE)]
    source, start, step = batches(seed), time.perf_counter(), 0
    bar = tqdm(total=steps, mininterval=10)
    while step < steps:
        # The schedule follows the clock where the clock is what ends the training.
        done = max(step / steps, (time.perf_counter() - start) / seconds)
        if done >= 1:
            break
        for group in opt.param_groups:
            group["lr"] = pair.schedule(int(done * 10_000), 10_000, peak, 300)
        batch = next(source)
        with torch.autocast("cpu", torch.bfloat16):
            x, seen = model.embeds(batch)
            logits, _, loads = model.target(batch.ids[:, :-1], embeds=x[:, :-1])
            read = model.reader(seen)
        wanted = batch.ids[:, 1:].masked_fill(~batch.answer[:, 1:], -100)
        losses = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), ignore_index=-100)
        reading = F.cross_entropy(read.float().flatten(0, 1), batch.things.flatten())
        (losses + 0.3 * reading).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        with torch.no_grad():
            for gate, load in zip(gates, loads.detach(), strict=True):
                gate.e_score_correction_bias += (
                    pair.BALANCE_RATE * min(1.0, 4 * (1 - done)) * torch.sign(load.mean() - load)
                )
        if step % 100 == 0:
            right = (logits.argmax(-1) == batch.ids[:, 1:]) | ~batch.answer[:, 1:]
            whole = [
                right[rows].all(-1).float().mean().item() for rows in (slice(0, BATCH // 2), slice(BATCH // 2, None))
            ]
            right = f"answers right {whole[0]:.2f} shown, {whole[1]:.2f} told"
            bar.write(f"step {step}: loss {losses:.4f}, reading {reading:.4f}, {right}")
            save(model, out)
        step += 1
        bar.update()
    bar.close()
    save(model, out)


def save(model: Sight, out: Path) -> None:
    """Write the target as a Kimi-K2.5 checkpoint names it."""
    tensors = {f"language_model.{name}": value for name, value in pair.export_target(model.target).items()}
    for name, value in model.eyes.items():
        tensors[name.replace("/", ".")] = value.detach().bfloat16().contiguous()
    save_file(tensors, out / "target.new", metadata={"format": "pt"})
    (out / "target.new").rename(out / "target.safetensors")


def load(path: Path) -> Sight:
    """The inverse of `save`; the throwaway head is new."""
    tensors = load_file(path)
    model = Sight()
    model.target = pair.import_target(tensors)
    for name, value in tensors.items():
        if not name.startswith("language_model."):
            model.eyes[name.replace(".", "/")] = nn.Parameter(value.float())
    return model


def frequent() -> torch.Tensor:
    """The draft vocabulary: the tokens of answers by frequency, then printable bytes."""
    source, counts = batches(SEED + 1), torch.zeros(pair.VOCAB, dtype=torch.long)
    for _ in range(8):
        batch = next(source)
        counts += torch.bincount(batch.ids[batch.answer], minlength=pair.VOCAB)
    by_count = counts.argsort(descending=True, stable=True)
    used = by_count[: int((counts > 0).sum())].tolist()
    rest = [byte for byte in [10, *range(32, 127)] if byte not in used]
    return torch.tensor(sorted((used + rest)[: pair.DRAFT_VOCAB]))


def train_drafter(name: str, model: Sight, draft_ids: torch.Tensor, steps: int, seconds: float) -> pair.Drafter:
    """Train one drafter by training-time test on the answers."""
    torch.manual_seed(SEED + 2)
    drafter = pair.Drafter(name.split("_")[0])
    opt = pair.optimizer(drafter, 0.05, False)
    to_draft = torch.full((pair.VOCAB,), -1)
    to_draft[draft_ids] = torch.arange(pair.DRAFT_VOCAB)
    source, start, step = batches(SEED + 3), time.perf_counter(), 0
    bar = tqdm(total=steps, mininterval=10, desc=name)
    while step < steps:
        done = max(step / steps, (time.perf_counter() - start) / seconds)
        if done >= 1:
            break
        for group in opt.param_groups:
            group["lr"] = pair.schedule(int(done * 10_000), 10_000, DRAFT_LR, 300)
        batch = next(source)
        t = batch.ids.shape[1] - 1
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                x, _ = model.embeds(batch)
                logits, streams, _ = model.target(batch.ids[:, :-1], pair.RIGHT, embeds=x[:, :-1])
                soft = logits.float()[..., draft_ids].softmax(-1)
                hard = to_draft[logits.argmax(-1)]
                if DRAFTERS[name] == "placeholder":
                    x = model.target.model.embed_tokens(batch.ids)
            state = drafter.fc(torch.cat(streams, -1))
            past, losses, rights = [], [], []
            for i in range(pair.UNROLL):
                n = t - 1 - i
                out, state = drafter.step(F.pad(x[:, 1 + i : t + 1], (0, 0, 0, i)), state, past, i)
                log_p, label = out[:, :n].float().log_softmax(-1), hard[:, 1 + i :]
                # What chain p predicts is the token at p + 2 + i; only answers are drafted.
                known = ((label >= 0) & batch.answer[:, 2 + i : t + 1]).float()
                loss = -(soft[:, 1 + i :] * log_p).sum(-1) - log_p.gather(-1, label.clamp_min(0)[..., None])[..., 0]
                losses.append((loss * known).sum() / known.sum())
                rights.append((((out[:, :n].argmax(-1) == label) * known).sum() / known.sum()).item())
        weights = [pair.STEP_WEIGHT**i for i in range(pair.UNROLL)]
        loss = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 100 == 0:
            bar.write(f"{name} step {step}: loss {loss.item():.4f}, right {[round(x, 3) for x in rights]}")
        step += 1
        bar.update()
    bar.close()
    return drafter


def main() -> None:
    """Target, then drafters; `--target` takes a finished target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="take the target from this file, and train it no further")
    parser.add_argument("--resume", type=Path, help="train the target of this file further")
    parser.add_argument("--seed", type=int, default=SEED, help="of the scenes; another one to train further")
    parser.add_argument("--target-lr", type=float, default=TARGET_LR, help="the peak of the schedule")
    parser.add_argument("--only", nargs="*", choices=DRAFTERS, default=list(DRAFTERS), help="which drafters")
    parser.add_argument("--target-steps", type=int, default=4000)
    parser.add_argument("--target-seconds", type=float, default=2400)
    parser.add_argument("--drafter-steps", type=int, default=1500)
    parser.add_argument("--drafter-seconds", type=float, default=400)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shrink()
    if args.target is None:
        torch.manual_seed(SEED)
        model = load(args.resume) if args.resume else Sight()
        model.requires_grad_(True)
        train_target(args.target_steps, args.target_seconds, args.target_lr, args.seed, args.out, model)
    model = load(args.target or args.out / "target.safetensors").eval().requires_grad_(False)
    draft_ids = frequent()
    for name in args.only:
        drafter = pair.round_weights(train_drafter(name, model, draft_ids, args.drafter_steps, args.drafter_seconds))
        save_file(pair.export_drafter(drafter, draft_ids), args.out / f"{name}.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
