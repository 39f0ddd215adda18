# SPDX-License-Identifier: Apache-2.0
"""Train the tiny pair: a byte-level DeepSeek-V3-style target, then two EAGLE-3 drafters for it.

One seeded script, one GPU, a few minutes. It needs only torch, safetensors, numpy and tqdm, and the text that
`corpus.py` writes:

    python corpus.py CORPUS_DIR
    python train.py --corpus CORPUS_DIR --out OUT_DIR

What it does, in order:

1. trains the target (MLA, shared and routed experts) on the text and rounds its weights to bfloat16;
2. lets the target write text from held-in prompts, half greedy, half sampled: what a drafter must predict is the
   target's text, not people's;
3. trains the drafters on that text, mixed with real text, by training-time test (the EAGLE-3 paper, arXiv:2503.01840):
   the drafter is unrolled for `UNROLL` steps on its own output state, as the engine runs it;
4. measures acceptance in float32 with the rounded weights on held-out text: the right boundaries, one early, one late,
   and the engine's default choice; picks the held-out prompts that demo and tests use.

The drafter modules compute what vLLM's `llama_eagle3.py` and `deepseek_eagle3.py` (0.32.0) compute. The row at position
p holds the embedding of token p+1 and `fc` of the target's states at p, and rotates by p; a drafted row holds the
drafted token's embedding and the previous row's *pre-norm* output state, skips `fc`, and rotates by its own position.
The first drafted token is thus token p+2. A chain's rows see the true rows up to p and the chain's own earlier rows.

The target's routed experts are stored as one wide gated MLP whose expert blocks are weighted per token, zero for the
experts not chosen. That is the same function as dispatching tokens to experts, and much faster at this size.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm

# ---------------------------------------------------------------- the pair's shape, as in materialize.py's configs
VOCAB = 320
HIDDEN = 256
LAYERS = 10
HEADS = 4
Q_RANK, KV_RANK = 128, 512
NOPE_DIM, ROPE_DIM, V_DIM = 32, 64, 32
DENSE_LAYERS = 1
DENSE_WIDTH = 512
EXPERTS, TOP_K, EXPERT_WIDTH, SHARED_EXPERTS = 8, 4, 32, 2
ROUTED_SCALE = 2.0
ROPE_THETA = 10000.0
EPS = 1e-6
INIT_STD = 0.02

DRAFT_VOCAB = 96
DRAFT_HEADS, DRAFT_KV_HEADS, DRAFT_HEAD_DIM = 4, 2, 64
DRAFT_WIDTH = {"gqa": 512, "mla": 384}

# Boundary k is the residual stream entering layer k. (4, 7, 9) are the outputs of layers 3, 6 and 8.
RIGHT = (4, 7, 9)
CHOICES = {"right": RIGHT, "one early": (3, 6, 8), "one late": (5, 8, 10), "vLLM default": (2, LAYERS // 2, LAYERS - 3)}

# Ids 0 to 255 are the bytes; these follow.
EOS, IM_END, IM_USER, IM_ASSISTANT, IM_MIDDLE = 257, 258, 259, 260, 262

# ---------------------------------------------------------------- the training
SEED = 20261
CONTEXT = 512
TARGET_BATCH = 128
TARGET_LR = 3e-3
BALANCE_RATE = 1e-3
UNROLL = 5
DRAFT_BATCH = 64
DRAFT_CONTEXT = 448
DRAFT_LR = 2e-3
STEP_WEIGHT = 0.9
REAL_TEXT_SHARE = 0.2
PROMPT_LENGTHS = (64, 96, 128, 192)
K = 3
EVAL_TOKENS = 192


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        return (y * self.weight.float()).to(x.dtype)


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """A bias-free linear layer with this pair's initialisation."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=INIT_STD * scale)
    return layer


def angles(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, shape (..., dim // 2), for integer positions of any shape."""
    frequency = ROPE_THETA ** -(torch.arange(0, dim, 2, device=positions.device).float() / dim)
    angle = positions.float()[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """DeepSeek's rotation: pairs are neighbours. The output is de-interleaved, the same for queries and keys."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Llama's rotation: pairs are half a head apart."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class MLA(nn.Module):
    """Multi-head latent attention's projections in the unabsorbed form (queries, keys and values per head)."""

    scale = (NOPE_DIM + ROPE_DIM) ** -0.5

    def __init__(self, inputs: int):
        super().__init__()
        self.q_a_proj = linear(inputs, Q_RANK)
        self.q_a_layernorm = RMSNorm(Q_RANK)
        self.q_b_proj = linear(Q_RANK, HEADS * (NOPE_DIM + ROPE_DIM))
        self.kv_a_proj_with_mqa = linear(inputs, KV_RANK + ROPE_DIM)
        self.kv_a_layernorm = RMSNorm(KV_RANK)
        self.kv_b_proj = linear(KV_RANK, HEADS * (NOPE_DIM + V_DIM))
        self.o_proj = linear(HEADS * V_DIM, HIDDEN, (2 * LAYERS) ** -0.5)

    def qkv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, inputs), positions (T,) -> q, k (B, heads, T, 96) and v (B, heads, T, 32)."""
        b, t, _ = x.shape
        cos, sin = angles(positions, ROPE_DIM)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, t, HEADS, -1).transpose(1, 2)
        q_nope, q_rope = q.split([NOPE_DIM, ROPE_DIM], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([KV_RANK, ROPE_DIM], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, HEADS, -1).transpose(1, 2)
        k_nope, v = kv.split([NOPE_DIM, V_DIM], -1)
        k_rope = rotate_interleaved(k_rope, cos, sin)[:, None].expand(-1, HEADS, -1, -1)
        q = torch.cat([q_nope, rotate_interleaved(q_rope, cos, sin)], -1)
        return q, torch.cat([k_nope, k_rope], -1), v

    def out(self, heads: torch.Tensor) -> torch.Tensor:
        """(B, heads, T, 32) -> (B, T, hidden)."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class GQA(nn.Module):
    """Grouped-query attention's projections, as in Llama."""

    scale = DRAFT_HEAD_DIM**-0.5

    def __init__(self, inputs: int):
        super().__init__()
        self.q_proj = linear(inputs, DRAFT_HEADS * DRAFT_HEAD_DIM)
        self.k_proj = linear(inputs, DRAFT_KV_HEADS * DRAFT_HEAD_DIM)
        self.v_proj = linear(inputs, DRAFT_KV_HEADS * DRAFT_HEAD_DIM)
        self.o_proj = linear(DRAFT_HEADS * DRAFT_HEAD_DIM, HIDDEN)

    def qkv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, inputs), positions (T,) -> q, k, v, each (B, query heads, T, 64)."""
        b, t, _ = x.shape
        cos, sin = angles(positions, DRAFT_HEAD_DIM)
        q = self.q_proj(x).view(b, t, DRAFT_HEADS, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, t, DRAFT_KV_HEADS, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, t, DRAFT_KV_HEADS, -1).transpose(1, 2)
        repeat = DRAFT_HEADS // DRAFT_KV_HEADS
        k = rotate_halves(k, cos, sin).repeat_interleave(repeat, 1)
        return rotate_halves(q, cos, sin), k, v.repeat_interleave(repeat, 1)

    def out(self, heads: torch.Tensor) -> torch.Tensor:
        """(B, heads, T, 64) -> (B, T, hidden)."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, width: int):
        super().__init__()
        self.gate_proj = linear(HIDDEN, width)
        self.up_proj = linear(HIDDEN, width)
        self.down_proj = linear(width, HIDDEN, (2 * LAYERS) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Sigmoid router with a selection bias that balances load without a loss term (DeepSeek-V3)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * INIT_STD)
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., hidden) -> weights (..., experts), zero where not chosen; share of tokens per expert (experts,)."""
        with torch.autocast(x.device.type, enabled=False):
            scores = (x.float() @ self.weight.float().T).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        # A rank by comparison instead of topk: eight experts fuse into one kernel. Ties go to the lower id.
        ids = torch.arange(EXPERTS, device=x.device)
        other, own = choice[..., None, :], choice[..., :, None]
        rank = ((other > own) | ((other == own) & (ids[None, :] < ids[:, None]))).sum(-1)
        chosen = (rank < TOP_K).to(scores.dtype)
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * ROUTED_SCALE
        return weights, chosen.flatten(0, -2).mean(0)


class MoE(nn.Module):
    """Shared and routed experts."""

    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.shared_experts = MLP(SHARED_EXPERTS * EXPERT_WIDTH)
        self.experts = MLP(EXPERTS * EXPERT_WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T, hidden) -> the same shape, and the load per expert."""
        weights, load = self.gate(x)
        inner = F.silu(self.experts.gate_proj(x)) * self.experts.up_proj(x)
        inner = inner.unflatten(-1, (EXPERTS, EXPERT_WIDTH)) * weights[..., None].to(inner.dtype)
        return self.experts.down_proj(inner.flatten(-2)) + self.shared_experts(x), load


class Layer(nn.Module):
    """One decoder layer of the target."""

    def __init__(self, index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.self_attn = MLA(HIDDEN)
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        self.mlp = MLP(DENSE_WIDTH) if index < DENSE_LAYERS else MoE()

    def forward(self, x, positions, cache=None):
        """Stream in, stream and expert load out; `cache` is (keys, values, tokens already in them)."""
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), positions)
        if cache is not None:
            keys, values, start = cache
            end = start + q.shape[2]
            keys[:, :, start:end], values[:, :, start:end] = k, v
            k, v = keys[:, :, :end], values[:, :, :end]
        # Flash attention wants one head size.
        v = F.pad(v, (0, q.shape[-1] - V_DIM))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=self.self_attn.scale)
        x = x + self.self_attn.out(heads[..., :V_DIM])
        y = self.mlp(self.post_attention_layernorm(x))
        y, load = y if isinstance(y, tuple) else (y, None)
        return x + y, load


class Body(nn.Module):
    """Embedding, layers, final norm; named as in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=INIT_STD)
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))
        self.norm = RMSNorm(HIDDEN)


class Target(nn.Module):
    """The target model."""

    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor, boundaries: tuple[int, ...] = (), caches=None, start: int = 0, embeds=None):
        """Ids (B, T) -> logits (B, T, vocab), the streams at `boundaries` in order, loads (MoE layers, experts).

        `embeds` (B, T, hidden) stand in for the ids' embeddings.
        """
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.model.embed_tokens(ids) if embeds is None else embeds
        streams, loads = [x], []
        for i, layer in enumerate(self.model.layers):
            x, load = layer(x, positions, None if caches is None else (*caches[i], start))
            streams.append(x)
            if load is not None:
                loads.append(load)
        return self.lm_head(self.model.norm(x)), [streams[b] for b in boundaries], torch.stack(loads)


class Midlayer(nn.Module):
    """The drafter's one decoder layer."""

    def __init__(self, kind: str):
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.hidden_norm = RMSNorm(HIDDEN)
        self.self_attn = {"gqa": GQA, "mla": MLA}[kind](2 * HIDDEN)
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        self.mlp = MLP(DRAFT_WIDTH[kind])


class Drafter(nn.Module):
    """An EAGLE-3 drafter, named as SpecForge writes it; it shares the target's embedding."""

    def __init__(self, kind: str):
        super().__init__()
        self.fc = linear(3 * HIDDEN, HIDDEN)
        self.midlayer = Midlayer(kind)
        self.norm = RMSNorm(HIDDEN)
        self.lm_head = linear(HIDDEN, DRAFT_VOCAB)

    def step(self, embeds: torch.Tensor, state: torch.Tensor, past: list, step: int):
        """Draft step `step` of the chains that start at every position, at once.

        Args:
            embeds: (B, T, hidden); row p is the embedding of the token at p + 1 + step of chain p.
            state: (B, T, hidden); `fc`'s output at step 0, the previous step's pre-norm output after.
            past: (keys, values) of the earlier steps; this step's are appended.
            step: 0 for the first draft.

        Returns:
            Draft logits (B, T, draft vocab) and the pre-norm state (B, T, hidden).
        """
        layer, t = self.midlayer, state.shape[1]
        joined = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(state)], -1)
        q, k, v = layer.self_attn.qkv(joined, torch.arange(step, step + t, device=state.device))
        past.append((k, v))
        scale = layer.self_attn.scale
        # True rows: causal over step 0's keys. Own rows: chain p's key of each later step, a diagonal.
        scores = [(q @ past[0][0].transpose(-1, -2)).float() * scale]
        scores[0] = scores[0].masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), -math.inf)
        scores += [(q.float() * k_i.float()).sum(-1, keepdim=True) * scale for k_i, _ in past[1:]]
        weights = torch.cat(scores, -1).softmax(-1).to(v.dtype)
        heads = weights[..., :t] @ past[0][1]
        for i, (_, v_i) in enumerate(past[1:]):
            heads = heads + weights[..., t + i, None] * v_i
        state = state + layer.self_attn.out(heads)
        state = state + layer.mlp(layer.post_attention_layernorm(state))
        return self.lm_head(self.norm(state)), state


# ---------------------------------------------------------------- data
def load_corpus(folder: Path) -> tuple[np.ndarray, list[dict[str, str]]]:
    """The training stream as int16 ids (a part of it in chat form), and the held-out documents."""
    raw = lzma.decompress((folder / "train.txt.xz").read_bytes())
    held_out = json.loads(lzma.decompress((folder / "heldout_documents.json.xz").read_bytes()))
    stream = np.frombuffer(raw, np.uint8).astype(np.int16)
    stream[stream == 0] = EOS
    # A slice of the documents again as one-turn chats, so that the chat template means something to the target.
    user, assistant = (np.frombuffer(word, np.uint8).astype(np.int16) for word in (b"user", b"assistant"))
    rng, parts = np.random.default_rng(SEED), [stream]
    for document in raw.split(b"\0"):
        if len(document) < 800 or rng.random() > 0.3:
            continue
        text = np.frombuffer(document, np.uint8).astype(np.int16)
        cut, end = int(rng.integers(40, 240)), int(rng.integers(400, 800))
        parts += [[IM_USER], user, [IM_MIDDLE], text[:cut], [IM_END]]
        parts += [[IM_ASSISTANT], assistant, [IM_MIDDLE], text[cut:end], [IM_END], [EOS]]
    return np.concatenate([np.asarray(part, np.int16) for part in parts]), held_out


def crops(stream: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`rows` random windows of the stream, (rows, length) int64."""
    starts = torch.randint(0, len(stream) - length, (rows, 1), generator=generator, device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)].long()


# ---------------------------------------------------------------- training
def schedule(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine to a hundredth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def optimizer(module: nn.Module, decay: float, cuda: bool) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms don't."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=cuda)


def train_target(stream: torch.Tensor, steps: int, batch: int, limit_s: float) -> tuple[Target, dict[str, float]]:
    """Train the target for `steps` steps, or for as many as fit in `limit_s` seconds."""
    device = stream.device
    generator = torch.Generator(device).manual_seed(SEED)
    model = Target().to(device)
    print(f"target: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    opt = optimizer(model, 0.1, device.type == "cuda")

    def loss_of(rows: torch.Tensor):
        with torch.autocast(device.type, torch.bfloat16):
            logits, _, loads = model(rows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()), loads.detach()

    compiled = torch.compile(loss_of) if device.type == "cuda" else loss_of
    gates = [layer.mlp.gate for layer in model.model.layers if isinstance(layer.mlp, MoE)]
    loads_seen = torch.zeros(len(gates), EXPERTS, device=device)
    step, start, bar = 0, time.perf_counter(), tqdm(total=steps, mininterval=5)
    while step < steps:
        if step == 100:  # compiled and warm: what does a step cost?
            torch.cuda.synchronize() if device.type == "cuda" else None
            start = time.perf_counter()
        if step == 200:
            torch.cuda.synchronize() if device.type == "cuda" else None
            each = (time.perf_counter() - start) / 100
            steps = min(steps, 200 + int(limit_s / each))
            bar.total = steps
            rate = batch * CONTEXT / each
            print(f"target: {each * 1e3:.1f} ms a step, {rate:,.0f} tokens/s; {steps} steps", flush=True)
        for group in opt.param_groups:
            group["lr"] = schedule(step, steps, TARGET_LR, 200)
        loss, loads = compiled(crops(stream, batch, CONTEXT + 1, generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        with torch.no_grad():
            rate = BALANCE_RATE * min(1.0, 4 * (1 - step / steps))
            for gate, load in zip(gates, loads, strict=True):
                gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)
            loads_seen = 0.99 * loads_seen + 0.01 * loads
        if step % 250 == 0 or step == steps - 1:
            bar.write(f"target step {step}: loss {loss.item():.4f}")
        step += 1
        bar.update()
    bar.close()
    worst = (loads_seen.max() / loads_seen.mean()).item()
    print(f"target: busiest expert takes {worst:.2f} times the mean load", flush=True)
    facts = {"steps": steps, "tokens": steps * batch * CONTEXT, "loss": loss.item(), "busiest_expert": worst}
    return model, facts


def round_weights(module: nn.Module) -> nn.Module:
    """Round every parameter to bfloat16 in place, as the checkpoint stores it; compute stays float32."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.bfloat16().float())
    return module.eval().requires_grad_(False)


@torch.no_grad()
def generate(model: Target, prompts: torch.Tensor, length: int, sampled: torch.Tensor | None = None) -> torch.Tensor:
    """Extend prompts (B, P) to (B, length), greedily, or at temperature 0.7 in the rows that `sampled` (B, 1) names."""
    b, p = prompts.shape
    dtype = model.lm_head.weight.dtype
    caches = [
        (
            torch.empty(b, HEADS, length, NOPE_DIM + ROPE_DIM, dtype=dtype, device=prompts.device),
            torch.empty(b, HEADS, length, V_DIM, dtype=dtype, device=prompts.device),
        )
        for _ in range(LAYERS)
    ]
    rows = torch.empty(b, length, dtype=torch.long, device=prompts.device)
    rows[:, :p] = prompts
    start = 0
    for end in range(p, length):
        logits = model(rows[:, start:end], caches=caches, start=start)[0][:, -1].float()
        best = logits.argmax(-1, keepdim=True)
        if sampled is not None:
            gumbel = -torch.empty_like(logits).exponential_().log()
            best = torch.where(sampled, (logits / 0.7 + gumbel).argmax(-1, keepdim=True), best)
        rows[:, end : end + 1] = best
        start = end
    return rows


def own_text(model: Target, stream: torch.Tensor, rounds: int, batch: int) -> torch.Tensor:
    """Text the target wrote from held-in prompts, (rows, DRAFT_CONTEXT + 1) int16."""
    generator = torch.Generator(stream.device).manual_seed(SEED + 1)
    torch.manual_seed(SEED + 1)
    fast = copy.deepcopy(model).to(torch.bfloat16) if stream.device.type == "cuda" else model
    sampled = (torch.arange(batch, device=stream.device) % 2 == 0)[:, None]
    out = []
    for i in tqdm(range(rounds), desc="own text"):
        prompts = crops(stream, batch, PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)], generator)
        out.append(generate(fast, prompts, DRAFT_CONTEXT + 1, sampled).to(torch.int16))
    return torch.cat(out)


def train_drafter(kind, target, own, stream, draft_ids, steps: int, batch: int, limit_s: float):
    """Train one drafter by training-time test; return it and facts."""
    device = stream.device
    torch.manual_seed(SEED + 2)
    generator = torch.Generator(device).manual_seed(SEED + 2)
    drafter = Drafter(kind).to(device)
    print(f"{kind} drafter: {sum(p.numel() for p in drafter.parameters()):,} parameters", flush=True)
    opt = optimizer(drafter, 0.05, device.type == "cuda")
    to_draft = torch.full((VOCAB,), -1, device=device)
    to_draft[draft_ids] = torch.arange(DRAFT_VOCAB, device=device)

    def loss_of(rows: torch.Tensor):
        t = rows.shape[1] - 1
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                logits, streams, _ = target(rows[:, :-1], RIGHT)
                soft = logits.float()[..., draft_ids].softmax(-1)
                hard = to_draft[logits.argmax(-1)]
            state = drafter.fc(torch.cat(streams, -1))
            past, losses, rights = [], [], []
            for step in range(UNROLL):
                n = t - 1 - step  # chains whose label exists
                # Chain p reads the token at p + 1 + step and is asked for the target's choice after it.
                ids = F.pad(rows[:, 1 + step : t + 1], (0, step))
                out, state = drafter.step(target.model.embed_tokens(ids), state, past, step)
                log_p = out[:, :n].float().log_softmax(-1)
                label = hard[:, 1 + step :]
                known = (label >= 0).float()
                loss = -(soft[:, 1 + step :] * log_p).sum(-1) - log_p.gather(-1, label.clamp_min(0)[..., None])[..., 0]
                losses.append((loss * known).sum() / known.sum())
                rights.append((out[:, :n].argmax(-1) == label).float().mean())
        weights = [STEP_WEIGHT**i for i in range(UNROLL)]
        return sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights), torch.stack(rights).detach()

    compiled = torch.compile(loss_of) if device.type == "cuda" else loss_of
    real = round(batch * REAL_TEXT_SHARE)
    step, start, bar = 0, time.perf_counter(), tqdm(total=steps, mininterval=5)
    while step < steps:
        if step in (50, 150):
            torch.cuda.synchronize() if device.type == "cuda" else None
            if step == 50:
                start = time.perf_counter()
            else:
                each = (time.perf_counter() - start) / 100
                steps = min(steps, 150 + int(limit_s / each))
                bar.total = steps
                print(f"{kind} drafter: {each * 1e3:.1f} ms a step; {steps} steps", flush=True)
        for group in opt.param_groups:
            group["lr"] = schedule(step, steps, DRAFT_LR, 100)
        picked = torch.randint(0, len(own), (batch - real,), generator=generator, device=device)
        rows = torch.cat([own[picked].long(), crops(stream, real, DRAFT_CONTEXT + 1, generator)])
        loss, rights = compiled(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 250 == 0 or step == steps - 1:
            bar.write(f"{kind} step {step}: loss {loss.item():.4f}, right {[round(x, 3) for x in rights.tolist()]}")
        step += 1
        bar.update()
    bar.close()
    return round_weights(drafter), {"steps": steps, "loss": loss.item(), "right_by_step": rights.tolist()}


# ---------------------------------------------------------------- measurement
@torch.no_grad()
def draft_everywhere(drafter: Drafter, target: Target, rows, streams, draft_ids, k: int) -> torch.Tensor:
    """Greedy drafts (B, T, k): [p] are the drafts after the tokens up to p+1, from the target's states up to p."""
    state = drafter.fc(torch.cat(streams, -1))
    ids = F.pad(rows[:, 1:], (0, 1))
    past, drafts = [], []
    for step in range(k):
        logits, state = drafter.step(target.model.embed_tokens(ids), state, past, step)
        ids = draft_ids[logits.argmax(-1)]
        drafts.append(ids)
    return torch.stack(drafts, -1)


def walk(row: list[int], drafts: list[list[int]], prompt: int, tokens: int, k: int) -> list[int]:
    """The speculative loop over one greedy text: accepted drafts of each verify step.

    `row` is the prompt and the greedy text. The prefill yields one token; a verify step that accepts a drafts yields
    a + 1; the loop ends once `tokens` are there.
    """
    p, made, accepted = prompt - 1, 1, []
    while made < tokens:
        a = 0
        while a < k and drafts[p][a] == row[p + 2 + a]:
            a += 1
        accepted.append(a)
        p, made = p + a + 1, made + a + 1
    return accepted


@torch.no_grad()
def measure(target: Target, drafters: dict[str, Drafter], prompts: torch.Tensor, draft_ids, tokens: int, k: int = K):
    """Greedy speculation on prompts (B, P) of one length: accepted counts per prompt for each drafter and choice.

    The drafts at a position depend only on the text before it, and greedy speculation writes the greedy text, so all
    drafts are computed at once and the loop only walks over them.
    """
    length = prompts.shape[1] + tokens + k + 1
    rows = generate(target, prompts, length)
    logits, streams, _ = target(rows, tuple(range(LAYERS + 1)))
    top = logits.float().topk(2, -1).values
    margins = (top[..., 0] - top[..., 1])[:, prompts.shape[1] - 1 : prompts.shape[1] - 1 + tokens].amin(-1)
    texts = rows.tolist()
    result: dict[str, dict[str, list[list[int]]]] = {}
    for kind, drafter in drafters.items():
        result[kind] = {}
        for name, boundaries in CHOICES.items():
            picked = [streams[b] for b in boundaries]
            drafts = draft_everywhere(drafter, target, rows, picked, draft_ids, k).tolist()
            result[kind][name] = [
                walk(text, draft, prompts.shape[1], tokens, k) for text, draft in zip(texts, drafts, strict=True)
            ]
    return result, rows, margins


def rates(accepted: list[list[int]], k: int = K) -> dict[str, object]:
    """Pool verify steps: share of drafts accepted, by position, and tokens per verify step."""
    steps = [a for row in accepted for a in row]
    by_position = [sum(a > i for a in steps) / len(steps) for i in range(k)]
    return {
        "accepted": round(sum(steps) / (k * len(steps)), 4),
        "by_position": [round(x, 4) for x in by_position],
        "acceptance_length": round(1 + sum(steps) / len(steps), 4),
        "verify_steps": len(steps),
    }


def held_out_prompts(held_out, lengths: tuple[int, ...], each: int) -> dict[int, list[tuple[str, str]]]:
    """Candidate prompts by length: (file, text), cut at line starts of held-out documents."""
    rng = np.random.default_rng(SEED + 3)
    found: dict[int, list[tuple[str, str]]] = {n: [] for n in lengths}
    documents = [d for d in held_out if len(d["text"]) > 600]
    for n in lengths:
        while len(found[n]) < each:
            document = documents[int(rng.integers(len(documents)))]
            text = document["text"]
            start = text.rfind("\n", 0, int(rng.integers(1, len(text) - n))) + 1
            if start + n < len(text) and text[start].isalpha():
                found[n].append((document["file"], text[start : start + n]))
    return found


def encode(texts: list[str], device) -> torch.Tensor:
    """Byte ids of equally long ASCII texts."""
    return torch.tensor([list(text.encode()) for text in texts], device=device)


@torch.no_grad()
def held_out_loss(target: Target, held_out, device) -> float:
    """Bits per byte on the held-out text."""
    raw = "\0".join(d["text"] for d in held_out).encode()[: 512 * 513 if device.type == "cuda" else 8 * 513]
    rows = torch.tensor(list(raw), device=device).view(-1, 513)
    rows[rows == 0] = EOS
    total = 0.0
    for part in rows.split(64):
        logits = target(part[:, :-1])[0]
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return total / (rows.shape[0] * 512) / math.log(2)


def repeats(text: list[int], n: int = 12) -> float:
    """Share of n-grams that occurred before: near 1 for a text that loops."""
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def evaluate(target, drafters, held_out, draft_ids, each: int, tokens: int, device):
    """Measure on many unselected held-out prompts, then pick forty that don't loop and have clear margins."""
    torch.backends.cuda.matmul.allow_tf32 = False
    lengths = (96, 128, 160, 192)
    pooled = {kind: {name: [] for name in CHOICES} for kind in drafters}
    chosen, chosen_pooled = [], {kind: {name: [] for name in CHOICES} for kind in drafters}
    wanted = 40 // len(lengths)
    for length, candidates in held_out_prompts(held_out, lengths, each).items():
        prompts = encode([text for _, text in candidates], device)
        result, rows, margins = measure(target, drafters, prompts, draft_ids, tokens)
        texts = rows[:, length : length + tokens].tolist()
        good = [
            i
            for i in range(len(texts))
            if repeats(texts[i]) < 0.25 and margins[i] > 0.01 and all(31 < t < 127 or t == 10 for t in texts[i])
        ]
        # One prompt a file first, then whatever is left.
        files, picked = set(), []
        for i in good:
            if candidates[i][0] not in files and len(picked) < wanted:
                files.add(candidates[i][0])
                picked.append(i)
        for kind in drafters:
            for name in CHOICES:
                pooled[kind][name] += result[kind][name]
                chosen_pooled[kind][name] += [result[kind][name][i] for i in picked]
        for i in picked:
            file, prompt = candidates[i]
            text = bytes(texts[i]).decode()
            chosen.append({"file": file, "prompt": prompt, "greedy": text, "min_margin": round(margins[i].item(), 4)})
        print(f"prompts of {length} bytes: {len(good)} of {len(texts)} usable, {len(picked)} taken", flush=True)
    tables = {}
    for title, accepted in (("unselected", pooled), ("chosen", chosen_pooled)):
        tables[title] = {
            kind: {name: rates(accepted[kind][name]) for name in CHOICES if accepted[kind][name]} for kind in drafters
        }
        for kind, table in tables[title].items():
            for name, row in table.items():
                print(f"{title:>10} {kind} {name:>12} {CHOICES[name]!s:>11}: {row}", flush=True)
    return tables, chosen


# ---------------------------------------------------------------- files
def export_target(target: Target) -> dict[str, torch.Tensor]:
    """The text model's tensors under DeepSeek-V3's names; bfloat16, except the router's bias (float32 as upstream)."""
    tensors = {}
    for name, value in target.state_dict().items():
        if ".mlp.experts." not in name:
            keep = name.endswith("e_score_correction_bias")
            tensors[name] = value.float() if keep else value.bfloat16()
            continue
        prefix, part = name.split(".mlp.experts.")
        blocks = value.bfloat16().split(EXPERT_WIDTH, dim=1 if part.startswith("down") else 0)
        for i, block in enumerate(blocks):
            tensors[f"{prefix}.mlp.experts.{i}.{part}"] = block
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def import_target(tensors: dict[str, torch.Tensor]) -> Target:
    """The inverse of `export_target`; a `language_model.` prefix is stripped, other tensors are ignored."""
    state = {}
    for name, value in tensors.items():
        if name.startswith(("vision_tower.", "mm_projector.")):
            continue
        state[name.removeprefix("language_model.")] = value.float()
    target = Target()
    for name in target.state_dict():
        if ".mlp.experts." in name:
            prefix, part = name.split(".mlp.experts.")
            blocks = [state.pop(f"{prefix}.mlp.experts.{i}.{part}") for i in range(EXPERTS)]
            state[name] = torch.cat(blocks, 1 if part.startswith("down") else 0)
    target.load_state_dict(state)
    return round_weights(target)


def vision_tensors(width: int = 32, mlp: int = 64) -> dict[str, torch.Tensor]:
    """A small random vision tower and projector under Kimi-K2.5's names; in this pair it is never trained."""
    generator = torch.Generator().manual_seed(SEED)
    patch, grid, blocks = 14, 8, 2

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * INIT_STD).bfloat16()

    def affine(name: str, outputs: int, *inputs: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(outputs, *inputs), f"{name}.bias": torch.zeros(outputs, dtype=torch.bfloat16)}

    def norm(name: str) -> dict[str, torch.Tensor]:
        ones = torch.ones(width, dtype=torch.bfloat16)
        return {f"{name}.weight": ones, f"{name}.bias": torch.zeros_like(ones)}

    tensors = affine("vision_tower.patch_embed.proj", width, 3, patch, patch)
    tensors["vision_tower.patch_embed.pos_emb.weight"] = normal(grid, grid, width)
    for i in range(blocks):
        prefix = f"vision_tower.encoder.blocks.{i}"
        tensors |= norm(f"{prefix}.norm0") | norm(f"{prefix}.norm1")
        tensors |= affine(f"{prefix}.wqkv", 3 * width, width) | affine(f"{prefix}.wo", width, width)
        tensors |= affine(f"{prefix}.mlp.fc0", mlp, width) | affine(f"{prefix}.mlp.fc1", width, mlp)
    tensors |= norm("vision_tower.encoder.final_layernorm") | norm("mm_projector.pre_norm")
    tensors |= affine("mm_projector.proj.0", 4 * width, 4 * width) | affine("mm_projector.proj.2", HIDDEN, 4 * width)
    return tensors


def export_drafter(drafter: Drafter, draft_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The drafter's tensors as SpecForge names them; `d2t` holds target id minus draft id, `t2d` marks drafted ids."""
    tensors = {name: value.bfloat16().cpu().contiguous() for name, value in drafter.state_dict().items()}
    ids = draft_ids.cpu()
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def import_drafter(kind: str, tensors: dict[str, torch.Tensor]) -> tuple[Drafter, torch.Tensor]:
    """The inverse of `export_drafter`."""
    drafter = Drafter(kind)
    drafter.load_state_dict({n: v.float() for n, v in tensors.items() if n not in ("d2t", "t2d")})
    return round_weights(drafter), tensors["d2t"] + torch.arange(DRAFT_VOCAB)


def main() -> None:
    """Run the stages; `--target` and `--drafters` take finished weights instead of training them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", type=Path, help="take the target from this checkpoint")
    parser.add_argument("--drafters", type=Path, help="take the drafters from this folder (drafter_gqa.safetensors, …)")
    parser.add_argument("--target-steps", type=int, default=3900)
    parser.add_argument("--target-seconds", type=float, default=300)
    parser.add_argument("--drafter-steps", type=int, default=2000)
    parser.add_argument("--drafter-seconds", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of the target's own text")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="below 1 to try the script on a small machine")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("highest")
    device = torch.device(args.device)
    began = time.perf_counter()
    ids, held_out = load_corpus(args.corpus)
    stream = torch.from_numpy(ids).to(device)
    print(f"corpus: {len(ids):,} tokens, {len(held_out)} held-out files", flush=True)
    report: dict[str, object] = {"torch": torch.__version__, "device": str(device), "seed": SEED}
    if device.type == "cuda":
        report["device"] = torch.cuda.get_device_name()

    def scaled(n: int) -> int:
        return max(4, int(n * args.batch_scale))

    if args.target:
        target = import_target(load_file(args.target)).to(device)
    else:
        target, report["target"] = train_target(stream, args.target_steps, scaled(TARGET_BATCH), args.target_seconds)
        round_weights(target)
        tensors = {f"language_model.{n}": v for n, v in export_target(target).items()} | vision_tensors()
        save_file(tensors, args.out / "target.safetensors", metadata={"format": "pt"})
        again = import_target(load_file(args.out / "target.safetensors")).to(device)
        probe = stream[None, :64].long()
        assert torch.equal(again(probe)[0], target(probe)[0]), "the exported target is not the trained one"
    report["held_out_bits_per_byte"] = round(held_out_loss(target, held_out, device), 4)
    print(f"target: {report['held_out_bits_per_byte']} bits per byte held out ({time.perf_counter() - began:.0f} s)")

    drafters: dict[str, Drafter] = {}
    if args.drafters:
        for kind in ("gqa", "mla"):
            drafter, draft_ids = import_drafter(kind, load_file(args.drafters / f"drafter_{kind}.safetensors"))
            drafters[kind], draft_ids = drafter.to(device), draft_ids.to(device)
    else:
        own = own_text(target, stream, args.rounds, scaled(4096))
        print(f"own text: {own.numel():,} tokens ({time.perf_counter() - began:.0f} s)", flush=True)
        for row in own[:4].tolist():
            print("    ", repr("".join(chr(t) if t < 256 else f"<{t}>" for t in row[:200])))
        counts = torch.bincount(own.flatten().long(), minlength=VOCAB) + 1e-6 * torch.bincount(
            stream[: 10**7].long(), minlength=VOCAB
        )
        draft_ids = counts.topk(DRAFT_VOCAB).indices.sort().values
        for kind in ("gqa", "mla"):
            drafters[kind], report[f"{kind}_drafter"] = train_drafter(
                kind, target, own, stream, draft_ids, args.drafter_steps, scaled(DRAFT_BATCH), args.drafter_seconds
            )
            path = args.out / f"drafter_{kind}.safetensors"
            save_file(export_drafter(drafters[kind], draft_ids), path, metadata={"format": "pt"})
            again, again_ids = import_drafter(kind, load_file(path))
            assert torch.equal(again_ids, draft_ids.cpu())
            assert torch.equal(again.fc.weight, drafters[kind].fc.weight.cpu())
            print(f"{kind} drafter done ({time.perf_counter() - began:.0f} s)", flush=True)

    tokens = EVAL_TOKENS if args.batch_scale >= 1 else 24
    report["acceptance"], chosen = evaluate(target, drafters, held_out, draft_ids, scaled(256), tokens, device)
    report["seconds"] = round(time.perf_counter() - began)
    (args.out / "heldout.json").write_text(json.dumps(chosen, indent=1) + "\n")
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"done ({report['seconds']} s)")


if __name__ == "__main__":
    main()
