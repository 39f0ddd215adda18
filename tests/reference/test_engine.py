# SPDX-License-Identifier: Apache-2.0
"""The whole loop against stock vLLM on the CPU, draft for draft and count for count.

A vocabulary of six tokens makes random models agree often enough that steps accept none, some and all of their drafts.
"""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_models import YARN, drafter_files, make_hf, relative_error

from vllm_kimi_eagle3.reference import Drafter, SpeculationTrace, Target, fc_rows, speculate
from vllm_kimi_eagle3.regression.engine import counters, run_engine

pytestmark = pytest.mark.engine
VOCAB, IDS, MAX_LEN, DRAFTER_MAX_LEN = 6, (1, 3, 5), 96, 72
# kv_lora_rank 512 and qk_rope_head_dim 64 are compiled into the CPU engine.
MLA_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
GEN = torch.Generator().manual_seed(21)
PROMPTS = [torch.randint(0, VOCAB, (n,), generator=GEN).tolist() for n in (1, 5, 16, 17, 33, 40)]
ALONE = [(p, 24 + i, []) for i, p in enumerate(PROMPTS)]
LIMITS = [(PROMPTS[4], 500, []), (PROMPTS[5], 500, []), (PROMPTS[1], 40, [4]), (PROMPTS[2], 1, []), (PROMPTS[3], 2, [])]


@dataclass
class Run:
    target: Target
    drafter: Drafter
    k: int
    result: dict[str, Any]

    def predict(self, request: Any, **changes: Any) -> SpeculationTrace:
        prompt, n, stop = request
        limits = {"max_model_len": MAX_LEN, "drafter_max_model_len": DRAFTER_MAX_LEN}
        options = {"boundaries": IDS, "k": self.k, "max_new_tokens": n, "stop_token_ids": stop, **limits, **changes}
        return speculate(self.target, self.drafter, prompt, **options)


# The GQA drafter runs with MLA_DISABLE: the CPU's MLA and ordinary attention have no block size in common.
@pytest.fixture(scope="module", params=[("mla", 3), ("gqa", 5), ("gqa", 1)], ids=lambda p: f"{p[0]}-k{p[1]}")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    (kind, k), d = request.param, tmp_path_factory.mktemp("engine")
    model = make_hf(
        3,
        **MLA_SIZES,
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_group=2,
        rope_parameters=YARN,
        rms_norm_eps=1e-5,
    )
    model.save_pretrained(d / "target")
    config = json.loads((d / "target/config.json").read_text())
    # Transformers does not write these two, and vLLM takes their absence for DeepSeek-V2's routing.
    config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (d / "target/config.json").write_text(json.dumps(config))
    # With model_type deepseek_v3 vLLM would make an MTP drafter of it (D18).
    own: dict[str, Any] = {"model_type": "llama", "head_dim": 128, "norm_before_residual": k == 1}
    if kind == "mla":
        own = {**MLA_SIZES, "model_type": "kimi_k2", "num_attention_heads": 2, "num_key_value_heads": 2}
    eagle = {"eagle_aux_hidden_state_layer_ids": list(IDS)}
    sizes = {"width": 64, "target_width": 64, "vocab_size": VOCAB, "draft_vocab_size": VOCAB - 1}
    drafter_files(d / "drafter", kind=kind, eagle_config=eagle, **sizes, **own)
    done = run_engine(
        d / "target",
        [*([r] for r in ALONE + LIMITS), ALONE[:4]],
        drafter=d / "drafter",
        k=k,
        speculative={"max_model_len": DRAFTER_MAX_LEN},
        # Stock vLLM: the oracle is tested on it, not on what it is later used to test.
        overlay="off",
        env={"VLLM_MLA_DISABLE": "0" if kind == "mla" else "1"},
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        enable_prefix_caching=False,
        compilation_config={"custom_ops": ["none"]},
        limit_mm_per_prompt=None,
    )
    target = Target.load(d / "target")
    return Run(target, Drafter.load(d / "drafter", target), k, done.result)


def test_text_counters_inputs_and_drafts_of_single_requests(run: Run) -> None:
    accepted, worst, proposals = Counter[int](), 0.0, 0
    for request, got in zip(ALONE + LIMITS, run.result["rounds"], strict=False):
        trace = run.predict(request)
        assert got["output_ids"] == [trace.output_ids]
        assert got["counters"] == counters(trace)
        steps = [s for s in trace.steps if s.proposal is not None]
        assert len(got["calls"]) == len(steps)
        for call, step in zip(got["calls"], steps, strict=True):
            assert step.proposal is not None
            assert call["ids"] == step.drafter_ids
            assert call["positions"] == step.drafter_positions
            assert call["drafts"] == step.proposal.token_ids
            worst = max(worst, relative_error(call["rows"], step.drafter_rows))
        accepted.update(s.accepted for s in trace.steps if s.drafts)
        proposals += len(steps)
    print(f"{run.result['drafter']} k={run.k}: {proposals} proposals, accepted {accepted}, rows {worst:.1e}")
    assert worst < 1e-4
    assert set(accepted) >= {0, 1}
    assert run.k == 1 or any(accepted[n] for n in range(2, run.k + 1))


def test_counters_of_a_batch(run: Run) -> None:
    traces = [run.predict(r) for r in ALONE[:4]]
    got = run.result["rounds"][-1]
    assert got["output_ids"] == [t.output_ids for t in traces]
    assert got["counters"] == counters(*traces)


def test_the_limits_were_reached(run: Run) -> None:
    traces = [run.predict(r) for r in LIMITS]
    assert any(s.proposal is None and s.accepted for s in traces[0].steps + traces[1].steps)
    assert len(traces[0].prompt_ids + traces[0].output_ids) == MAX_LEN
    assert traces[2].output_ids[-1] == 4 and len(traces[2].output_ids) < 40
    assert run.result["drafter_max_model_len"] == DRAFTER_MAX_LEN


@pytest.mark.parametrize(
    "changes",
    [{"boundaries": (0, 2, 4)}, {"boundaries": (2, 4, 6)}, {"drafter_max_model_len": 99}, {"max_model_len": 97}],
    ids=str,
)
def test_a_wrong_prediction_is_seen(run: Run, changes: dict[str, Any]) -> None:
    differ = 0
    for request, got in zip(ALONE + LIMITS, run.result["rounds"], strict=False):
        trace = run.predict(request, **changes)
        calls = [s.proposal.token_ids for s in trace.steps if s.proposal is not None]
        differ += calls != [c["drafts"] for c in got["calls"]] or got["counters"] != counters(trace)
    assert differ >= 1


def test_rows_of_neighbouring_boundaries_are_seen(run: Run) -> None:
    prompt = ALONE[4][0]
    rows = run.result["rounds"][4]["calls"][0]["rows"]
    out = run.target.forward(prompt)
    assert relative_error(rows, fc_rows(out, IDS)) < 1e-4
    for wrong in ((0, 3, 5), (1, 2, 5), (1, 3, 4), (1, 3, 6)):
        assert relative_error(rows, fc_rows(out, wrong)) > 1e-2
