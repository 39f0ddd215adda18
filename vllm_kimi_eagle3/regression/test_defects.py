# SPDX-License-Identifier: Apache-2.0
"""One test a defect, by its id: what vLLM does, whoever made it so.

``docs/COMPATIBILITY.md`` lists the defects by release. D14 and D20, checks of what a user configures, are the overlay's
alone, D9 is part of D19, and C4 and C7 are known and not mended: they have no test here, nor has what
``settings.UNTESTED`` names.

Where a vLLM's CPU engine refuses speculation, or to see either runner's own code, the parts are looked at apart
(``target_probe``, ``config_probe``); where an engine speculates, what its drafter receives is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_kimi_eagle3.reference import greedy
from vllm_kimi_eagle3.regression.observe import EXPANDED
from vllm_kimi_eagle3.regression.runs import Suite
from vllm_kimi_eagle3.regression.settings import ASIDE, EARLY, MAX_MODEL_LEN, PROMPTS, RIGHT
from vllm_kimi_eagle3.verify.compare import Comparison

Check = Callable[[Suite], None]
CHECKS: dict[str, Check] = {}
MARKS: dict[str, list[Any]] = {}


def defect(name: str, *marks: Any) -> Callable[[Check], Check]:
    """Register a check under a defect's id."""

    def register(check: Check) -> Check:
        CHECKS[name], MARKS[name] = check, list(marks)
        return check

    return register


def config(suite: Suite, name: str) -> dict[str, Any]:
    """A configuration that has to be accepted."""
    found = suite.config(name)
    assert "error" not in found, f"vLLM refuses this server: {found['error']}"
    return found


def right(comparison: Comparison) -> None:
    """Nothing differs, in any situation."""
    assert comparison.problems == []
    assert comparison.ok, [s.to_json() for s in comparison.situations.values() if not s.ok]


def needs_speculation(suite: Suite) -> None:
    """Skip where no engine speculates."""
    if not suite.environment.speculates:
        pytest.skip("this vLLM's CPU engine asserts that there is no speculation, and no part of it shows this")


def on_cpu(suite: Suite) -> bool:
    """Whether the parts are looked at; a GPU's engine speculates, and is looked at whole."""
    return suite.environment.device == "cpu"


# ---------------------------------------------------------------------------------------------------------------------
# What may speculate, and with which drafter


@defect("D1-target-whitelist-deepseek")
def deepseek_may_speculate(suite: Suite) -> None:
    """EAGLE-3 is accepted on DeepSeek-V3."""
    config(suite, "deepseek_v3")


@defect("D1-target-whitelist-kimi")
def kimi_may_speculate(suite: Suite) -> None:
    """EAGLE-3 is accepted on Kimi-K2.5."""
    config(suite, "kimi_k25")


@defect("D18-mla-drafter")
def mla_drafter_is_no_mtp_head(suite: Suite) -> None:
    """An MLA drafter whose configuration says deepseek_v3 stays what it is."""
    if not suite.environment.mla_drafters:
        pytest.skip("this vLLM has no model for drafters with latent attention (Eagle3DeepseekV2ForCausalLM)")
    (architecture,) = config(suite, "mla drafter")["architectures"]
    assert "Eagle3" in architecture and "MTP" not in architecture


# ---------------------------------------------------------------------------------------------------------------------
# Which layers


def read_by(suite: Suite, runner: str, name: str) -> None:
    """What a runner's own function takes of the drafter's configuration."""
    found = config(suite, name)["readers"][runner]
    if isinstance(found, str):
        pytest.skip(f"this vLLM's {runner} runner has no function of the known name that reads layer ids ({found})")
    assert found is not None, "it reads nothing, so the default layers are captured"
    assert sorted(found) == list(RIGHT)


@defect("D6-nested-ids-V1")
def nested_ids_v1(suite: Suite) -> None:
    """Ids under eagle_config are read."""
    read_by(suite, "V1", "boundary rule")


@defect("D6-nested-ids-V2")
def nested_ids_v2(suite: Suite) -> None:
    """Ids under eagle_config are read."""
    read_by(suite, "V2", "boundary rule")


@defect("D7-output-rule-V1")
def output_rule_v1(suite: Suite) -> None:
    """Ids that mean outputs of layers are read so where that is said."""
    read_by(suite, "V1", "output rule")


@defect("D7-output-rule-V2")
def output_rule_v2(suite: Suite) -> None:
    """Ids that mean outputs of layers are read so where that is said."""
    read_by(suite, "V2", "output rule")


@defect("D7-output-rule-engine")
def output_rule_engine(suite: Suite) -> None:
    """From the file to the rows: a drafter as SpecForge writes it, in a running engine."""
    needs_speculation(suite)
    assert suite.run("output rule").result["captured"] in (list(RIGHT), None)
    right(suite.compared("output rule"))
    early = suite.compared("output rule", None, EARLY)
    assert not any(s.ok for s in early.situations.values()), "the control: one layer early has to be seen"


@defect("D8-cache-key")
def cache_key(suite: Suite) -> None:
    """Other layers are another compiled graph; the same are the same."""
    base, again = config(suite, "deepseek_v3")["hash"], config(suite, "deepseek_v3 again")["hash"]
    assert base == again
    assert config(suite, "boundary rule")["hash"] != config(suite, "other layers")["hash"]


# ---------------------------------------------------------------------------------------------------------------------
# What the target shows


def relative_errors(
    suite: Suite, result: dict[str, Any], boundaries: tuple[int, ...], seen: str = "seen"
) -> torch.Tensor:
    """(rows, n): how far each captured row is from these boundaries of the reference, over the same tokens."""
    assert result["supports_eagle3"], "the model says that it shows no hidden states"
    steps = result[seen]
    assert steps, "the model showed no hidden states"
    positions = [p for step in steps for p in step["positions"].tolist()]
    assert positions == list(range(len(positions)))
    ids = [*PROMPTS[0][-24:], *result["output_ids"]][: len(positions)]
    want = suite.oracle("gqa", RIGHT, "float32").target.features(ids, boundaries).unflatten(1, (len(boundaries), -1))
    got = torch.cat([torch.stack(step["states"], dim=1).float() for step in steps])
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def shows_states(suite: Suite, kind: str, engine: str) -> None:
    """A target told three boundaries returns those streams, and no others."""
    if not on_cpu(suite):
        right(suite.compared(engine))
        return
    result = suite.target(kind)
    assert relative_errors(suite, result, RIGHT).max() < 1e-4
    for wrong in (EARLY, (5, 8, 10)):
        assert relative_errors(suite, result, wrong).min() > 1e-3, "the control: one layer off has to be seen"


@defect("D2-eagle3-interface")
def says_that_it_shows_states(suite: Suite) -> None:
    """Both targets declare the interface; without it no drafter of ours may be attached."""
    if not on_cpu(suite):
        for engine in ("eager", "kimi"):
            assert suite.run(engine).result["captured"] is not None
        return
    for kind in ("deepseek_v3", suite.kimi):
        assert suite.target(kind)["supports_eagle3"], kind


@defect("D3-aux-capture-deepseek")
def deepseek_shows_states(suite: Suite) -> None:
    """DeepSeek-V3's decoder returns the streams that it was asked for."""
    shows_states(suite, "deepseek_v3", "eager")


@defect("D3-aux-capture-kimi")
def kimi_shows_states(suite: Suite) -> None:
    """Kimi-K2.5's decoder returns the streams that it was asked for."""
    shows_states(suite, suite.kimi, "kimi")


@defect("D23-embeddings", pytest.mark.cpu)
def embeddings_are_a_boundary(suite: Suite) -> None:
    """Boundary 0, the embeddings, can be captured beside others."""
    result = suite.target("deepseek_v3")
    assert "other boundaries error" not in result, result["other boundaries error"]
    assert relative_errors(suite, result, (0, 4, 9), "seen at other boundaries").max() < 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# The drafter's loading


def loaded(suite: Suite, kind: str) -> dict[str, Any]:
    """What came of loading a drafter onto a target, by either runner's code."""
    result = suite.target(kind)
    assert "config error" not in result, f"vLLM refuses this server: {result['config error']}"
    return result["drafter"]


@defect("D4-image-attribute")
def kimi_takes_a_drafter(suite: Suite) -> None:
    """V1's proposer knows Kimi-K2.5."""
    if not on_cpu(suite):
        right(suite.compared("kimi"))
        return
    assert "image_token_index" not in loaded(suite, suite.kimi).get("V1 error", "")


@defect("D5-k25-language-model")
def drafter_finds_the_lm_head_on_v1(suite: Suite) -> None:
    """V1 shares Kimi-K2.5's lm_head with a drafter that has none."""
    if not on_cpu(suite):
        right(suite.compared("no lm_head"))
        return
    found = loaded(suite, suite.kimi)
    assert "V1 error" not in found, found["V1 error"]
    assert found["V1 shares lm_head"]


@defect("D12-shared-lm-head")
def drafter_finds_the_lm_head_on_v2(suite: Suite) -> None:
    """V2 shares Kimi-K2.5's lm_head with a drafter that has none."""
    if not on_cpu(suite):
        right(suite.compared("no lm_head"))
        return
    found = loaded(suite, suite.kimi)
    if "V2 error" in found:
        pytest.skip(f"this vLLM's V2 loader does not run on its CPU engine: {found['V2 error']}")
    assert found["V2 shares lm_head"]


@defect("D10-draft-block-size", pytest.mark.gpu)
def slots_are_counted_in_the_kernels_blocks(suite: Suite) -> None:
    """Drafts behind the first are right where the cache manager's blocks are larger than some kernel's."""
    right(suite.compared("large blocks"))


@defect("D11-image-placeholder")
def new_schema_takes_a_drafter(suite: Suite) -> None:
    """V1's proposer reads Kimi-K2.5's new configuration, with image_token_id."""
    if not suite.environment.new_schema:
        pytest.skip("this vLLM reads no configuration of Kimi-K2.5 with image_token_id")
    if not on_cpu(suite):
        right(suite.compared("new schema"))
        return
    assert "V1 error" not in loaded(suite, "kimi_k25"), loaded(suite, "kimi_k25")["V1 error"]


@defect("D15-draft-backend")
def forced_backend_is_the_targets_alone(suite: Suite) -> None:
    """An MLA backend that a user forces is not forced on a drafter without MLA."""
    if not on_cpu(suite):
        pytest.skip("looked at in an engine: D15-draft-backend-engine")
    if not suite.environment.mla:
        pytest.skip("latent attention is off on this vLLM's CPU engine, so there is no MLA backend to force")
    result = suite.target(suite.kimi)
    assert "config error" not in result, f"vLLM refuses this server: {result['config error']}"
    assert "backends error" not in result, result["backends error"]
    assert result["backends"], "the control: the drafter's attention has to ask for a backend"
    assert set(result["backends"]) == {"None"}


@defect("D15-draft-backend-engine", pytest.mark.gpu)
def engine_starts_with_a_forced_backend(suite: Suite) -> None:
    """The same in a running engine, on the one MLA backend that every GPU has."""
    right(suite.compared("forced backend"))


# ---------------------------------------------------------------------------------------------------------------------
# What reaches the drafter


@defect("D16-float16-scale")
def float16_states_have_their_true_size(suite: Suite) -> None:
    """Captured states keep no scale of the float16 overflow guard."""
    if suite.environment.speculates:
        right(suite.compared("float16"))
        return
    errors = relative_errors(suite, suite.target(suite.kimi, "float16"), RIGHT)
    # A random near-tie of the router may move one row; the guard divides all of them by two.
    assert errors.median() < 0.01


@defect("D17-float16-clone")
def float16_embeddings_stay(suite: Suite) -> None:
    """Embeddings that a caller passes in are not changed under it."""
    speculates = suite.environment.speculates
    result = suite.run("float16").result if speculates else suite.target(suite.kimi, "float16")
    change = result["embeddings change"]
    if isinstance(change, str):
        pytest.skip(f"this vLLM's Kimi-K2.5 can't be called with embeddings outside of a batch: {change}")
    assert not change


@defect("D25-drafter-rope")
def mla_drafter_keeps_its_rotary_embedding(suite: Suite) -> None:
    """An MLA drafter proposes what the reference proposes."""
    needs_speculation(suite)
    if not suite.environment.mla_drafters:
        pytest.skip("this vLLM has no model for drafters with latent attention (Eagle3DeepseekV2ForCausalLM)")
    right(suite.compared("kimi"))


@defect("D22-chunk-end-token")
def token_behind_a_chunk(suite: Suite) -> None:
    """The last row of a chunk comes with the token behind the chunk, not the prompt's last."""
    needs_speculation(suite)
    comparison = suite.compared("chunked")
    assert "chunked prefill" in comparison.situations
    assert not any(s.wrong_ids for s in comparison.situations.values()), comparison.problems


@defect("D24-draft-limit")
def long_request_leaves_the_drafter_to_the_others(suite: Suite) -> None:
    """Beside a request that reaches the longest length, another one's rows all reach the drafter."""
    needs_speculation(suite)
    rounds = suite.settings["eager"].rounds
    right(suite.compared("eager", rounds.index(ASIDE)))


@defect("D27-drafter-positions")
def short_drafter_reaches_the_longest_request(suite: Suite) -> None:
    """A drafter's rotary embedding is built for the server's longest request, whatever its own configuration says."""
    assert config(suite, "short drafter")["positions"] >= MAX_MODEL_LEN


# ---------------------------------------------------------------------------------------------------------------------
# The CPU engine


@defect("C1-kernel-rebinding", pytest.mark.cpu)
def kimi_starts_on_cpu(suite: Suite) -> None:
    """Kimi-K2.5 starts."""
    assert suite.target(suite.kimi)["output_ids"]


@defect("C2-rotary-embedding", pytest.mark.cpu)
def text_is_right_on_cpu(suite: Suite) -> None:
    """A target alone writes the reference's text."""
    output = suite.target("deepseek_v3")["output_ids"]
    reference = suite.oracle("gqa", RIGHT, "float32").target
    assert output == greedy(reference, PROMPTS[0][-24:], len(output))


@defect("C3-block-size", pytest.mark.cpu)
def mla_target_and_gqa_drafter_share_a_group(suite: Suite) -> None:
    """An MLA target and a drafter without MLA find a common block size."""
    if not suite.environment.mla:
        pytest.skip("latent attention is off on this vLLM's CPU engine, so both have one backend")
    assert suite.run("eager").result["block_size"] > 0


@defect("C5-sampling-expansion", pytest.mark.cpu)
def sampling_parameters_arrive(suite: Suite) -> None:
    """Temperatures of sampled requests reach the rejection sampler."""
    needs_speculation(suite)
    expanded = suite.run("eager").result["expanded"]
    if expanded is None:
        pytest.skip("this vLLM has no kernel of its own that expands sampling parameters on CPU")
    assert expanded == EXPANDED


@defect("C6-draft-step-kernel", pytest.mark.cpu)
def speculation_runs_on_cpu(suite: Suite) -> None:
    """A drafter takes more than one step, and what it drafts is verified."""
    needs_speculation(suite)
    counted = [found["counters"] for found in suite.run("eager").result["rounds"]]
    assert sum(sum(c["num_draft_tokens"]) for c in counted) > sum(sum(c["num_drafts"]) for c in counted) > 0


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name], id=name) for name in CHECKS])
def test_defect(suite: Suite, name: str) -> None:
    """Run a defect's check."""
    CHECKS[name](suite)
