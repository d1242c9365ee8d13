"""The loop: five steps of every decoder family are those of transformers and torch's AdamW."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool.convert.families.detection import families, family_names
from megtool.errors import UsageError
from megtool.inference.collate import collate_rows
from tests.support.errors import raises
from tests.support.models import dense_decoders as dense
from tests.support.models.dense_cases import (
    ALPHA,
    CONV,
    GEMMA4_SMALL,
    LATENT,
    LOCAL,
    NEO,
    NEW_FALCON,
    PADDED,
    SWASH,
)
from tests.support.models.dense_decoders import MIXED, MUP, fill_spread
from tests.support.models.moe_cases import (
    AFMOE,
    EXAONE,
    FLEX,
    GEMMA4_EXPERTS,
    GLM,
    HUNYUAN,
    HY3,
    MISTRAL4,
    PHIMOE,
    SOLAR,
)
from tests.support.models.moe_models import CASES, SIZES
from tests.support.models.openelm_model import LAYERS
from tests.support.models.tiny_model import TIED, UNTIED, Case
from tests.support.models.unequal_layers import BLOCKS
from tests.support.runs.loop_runs import job, losses
from tests.support.runs.numbered_data import LENGTH, MaskedNumbers, Numbers

CONSTANT: dict[str, Any] = {
    "train_iters": 5,
    "clip_grad": 0.0,
    "weight_decay": 0.1,
    "lr_decay_style": "constant",
}
PARALLEL = {"use_parallel_residual": True}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_SEED_DROPOUT = {"residual_dropout": 0.0, "attention_dropout": 0.0}
NO_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FOUR = {"num_hidden_layers": 4}
HEAD, WINDOW = {"head_dim": 8}, {"sliding_window": 6}
DENSE_GRANITE = {
    "num_local_experts": 0,
    "shared_intermediate_size": 40,
    "layer_types": ["linear_attention", "full_attention"],
}
NOT_TRAINED = {
    "bert": "Megatron's names of an encoder, which have no forward pass",
    **dict.fromkeys(
        ("t5", "mt5", "umt5"), "two stacks: tests/commands/test_finetune_encoder_decoder.py"
    ),
    **dict.fromkeys(("bailing_moe_v2", "mimo"), "transformers has no class"),
    "phimoe": "its experts are drawn by chance",
}


def experts(name: str, **more: Any) -> Case:
    """A case of the mixtures of experts."""
    family, _, keys = CASES[name]
    return Case(family, UNTIED | SIZES | keys | more, name)


OF_TRANSFORMERS = [
    Case("llama", UNTIED, "llama"),
    Case("nemotron_nas", UNTIED | {"num_hidden_layers": 4, "block_configs": BLOCKS}, "blocks"),
    next(c for c in dense.CASES if c.family == "gemma4"),
    Case("mistral4", MISTRAL4 | {"intermediate_size": 40}, "mistral4"),
    Case("bamba", TIED | MIXED | {"attn_layer_indices": [1]}, "bamba"),
    Case("granitemoehybrid", UNTIED | MIXED | DENSE_GRANITE, "granite 4"),
    Case("falcon_h1", UNTIED | MUP, "falcon_h1"),
    Case("roberta", TIED | PADDED | NO_DROPOUT | {"max_position_embeddings": 18}, "roberta"),
    # The indexer has no gradient, and stays as it is.
    experts("deepseek_v32"),
    experts("deepseek_v4"),
    Case("modernbert", TIED | LOCAL | FOUR, "modernbert"),
]
SLOW = [
    Case("gemma4", UNTIED | GEMMA4_SMALL | {"rms_norm_eps": 1e-3}, "gemma4-small"),
    Case("gemma4", UNTIED | FOUR | GEMMA4_EXPERTS, "gemma4-experts"),
    Case("arcee", UNTIED, "arcee"),
    Case("helium", UNTIED | HEAD, "helium"),
    Case("dots1", GLM | {"norm_topk_prob": True, "num_experts_per_tok": 2}, "dots1"),
    Case("hunyuan_v1_dense", UNTIED | ALPHA | HEAD, "hunyuan_v1_dense"),
    Case("hunyuan_v1_moe", HUNYUAN | {"num_experts_per_tok": 2}, "hunyuan_v1_moe"),
    Case("solar_open", SOLAR | {"num_experts_per_tok": 2}, "solar_open"),
    Case("exaone_moe", EXAONE | {"num_experts_per_tok": 2}, "exaone_moe"),
    Case("openelm", TIED | LAYERS, "openelm"),
    Case("apertus", UNTIED, "apertus"),
    Case("glm", UNTIED | HEAD, "glm"),
    Case("phi", UNTIED, "phi"),
    Case("hyperclovax", UNTIED, "hyperclovax"),
    Case("youtu", TIED | LATENT, "youtu"),
    Case("olmo", UNTIED, "olmo"),
    Case("nanochat", UNTIED, "nanochat"),
    Case("falcon", TIED, "falcon-7b"),
    Case("falcon", UNTIED | NEW_FALCON, "falcon-40b"),
    Case("persimmon", UNTIED, "persimmon"),
    Case("gptj", UNTIED | {"rotary_dim": 4}, "gptj"),
    Case("hy_v3", HY3, "hy_v3"),
    *dense.ALIBI,
    Case("opt", TIED | {"dropout": 0.0}, "opt"),
    Case("codegen", UNTIED | {"rotary_dim": 4}, "codegen"),
    Case("gpt_bigcode", TIED | NO_GPT2_DROPOUT, "gpt_bigcode"),
    Case("gpt_neo", TIED | NEO, "gpt_neo"),
    Case("jais2", UNTIED, "jais2"),
    Case("granite_swa", TIED | SWASH, "granite_swa"),
    Case("lfm2", TIED | CONV, "lfm2"),
    experts("lfm2_moe", num_hidden_layers=3),
    experts("kimi_linear"),
    experts("mimo_v2_flash"),
    Case("afmoe", AFMOE, "afmoe"),
    Case("flex_olmo", FLEX, "flex_olmo"),
    Case("vaultgemma", TIED | HEAD | WINDOW, "vaultgemma"),
    Case("cwm", UNTIED | HEAD | WINDOW, "cwm"),
    Case("ministral", UNTIED | HEAD | WINDOW, "ministral"),
    Case("stablelm", UNTIED, "stablelm"),
    Case("stablelm", UNTIED | {"qk_layernorm": True}, "stablelm-qk-norms"),
    Case("phi", UNTIED | {"qk_layernorm": True}, "phi-qk-norms"),
    Case("stablelm", TIED | PARALLEL, "stablelm-parallel"),
    Case("qwen2", UNTIED | dense.WINDOWED | {"max_window_layers": 1}, "qwen2"),
    Case("qwen3", TIED | {"head_dim": 16}, "qwen3"),
    Case("qwen3_5_text", TIED | FOUR | dense.DELTA, "qwen3_5_text"),
    Case("gemma", TIED | {"head_dim": 16, "num_key_value_heads": 1}, "gemma"),
    Case("gemma2", TIED | FOUR | HEAD | WINDOW, "gemma2"),
    Case("gemma3", TIED | HEAD | WINDOW | {"num_hidden_layers": 6}, "gemma3"),
    Case("phi3", UNTIED | WINDOW, "phi3"),
    Case("gpt2", TIED | NO_GPT2_DROPOUT, "gpt2"),
    Case("gpt_neox", UNTIED, "gpt_neox"),
    Case("granite", TIED | dense.BIASED | dense.MULTIPLIED | {"mlp_bias": True}, "granite"),
    Case("smollm3", TIED | FOUR, "smollm3"),
    Case("starcoder2", TIED | WINDOW, "starcoder2"),
    Case("nemotron", UNTIED | HEAD, "nemotron"),
    Case("seed_oss", UNTIED | HEAD | NO_SEED_DROPOUT, "seed_oss"),
    next(c for c in dense.CASES if c.family == "ministral3"),
    Case("ernie4_5", TIED | HEAD | {"use_bias": True}, "ernie4_5"),
    Case("glm4", UNTIED | HEAD, "glm4"),
    Case("olmo2", UNTIED, "olmo2"),
    Case("olmo3", UNTIED | FOUR | WINDOW, "olmo3"),
    Case("exaone4", UNTIED | FOUR | WINDOW, "exaone4"),
    Case("cohere", TIED | {"use_qk_norm": True, "logit_scale": 0.5}, "cohere"),
    Case("cohere2", TIED | FOUR | WINDOW | {"logit_scale": 0.5}, "cohere2"),
    Case("bert_post_norm", UNTIED | NO_DROPOUT, "bert_post_norm"),
    experts("granitemoe", logits_scaling=1.0),
    *(
        experts(name)
        for name in (
            *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v2-groups"),
            *("deepseek_v3", "gpt_oss", "llama4", "olmoe", "glm4_moe", "ernie4_5_moe"),
            *("qwen3_next", "qwen3_5_moe_text", "nemotron_h", "nemotron_h-latent", "minimax_m2"),
            *(
                "granitemoeshared",
                "granitemoe_swa",
                "granitemoehybrid",
                "glm_moe_dsa",
                "glm4_moe_lite",
            ),
        )
    ),
]

# With the seed 0 rounding chooses another token for an indexer.
SEEDS = {"glm_moe_dsa": 1}


def test_every_decoder_family_is_here() -> None:
    covered = {case.family for case in (*OF_TRANSFORMERS, *SLOW)}
    covered |= {f.name for f in families() if f.nested}  # whose text models are of other families
    assert covered | set(NOT_TRAINED) == set(family_names())


@pytest.mark.parametrize(
    "case",
    [*OF_TRANSFORMERS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_a_run_of_a_family_is_that_of_transformers_and_adamw(case: Case, tmp_path: Path) -> None:
    theirs = case.build(
        tmp_path / "model",
        attn_implementation="eager",
        fill=fill_spread,
        seed=SEEDS.get(case.name, 0),
    ).train()
    for module in theirs.modules():  # Nemotron-H's is of another key in transformers
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(theirs.config.time_step_limit)
    mine, data = job(tmp_path / "model", folder=tmp_path / "logs", **CONSTANT), Numbers()
    positions = torch.arange(LENGTH)[None]
    if mine.stages[0].config.bidirectional:
        data = MaskedNumbers()
        positions = positions + mine.stages[0].config.positions.position_offset
    found = losses(replace(mine, dataset=data))
    # Norms of heads, each for itself, are the rows of one matrix, as in Command R+.
    split = {n: p.dim() > 1 or ".norms." in n for n, p in theirs.named_parameters()}
    plain = [p for n, p in theirs.named_parameters() if not split[n]]
    decay = [p for n, p in theirs.named_parameters() if split[n]]
    adam = torch.optim.AdamW(
        [{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1
    )
    expected = []
    for step in range(5):
        batch, labels = collate_rows(data.rows(4 * step, 4), torch.device("cpu"))
        logits = theirs(batch.tokens_BS, position_ids=positions).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        adam.zero_grad()
        loss.backward()
        expected.append(loss.item())
        adam.step()
    assert expected[-1] != pytest.approx(expected[0], rel=1e-2)
    assert found == pytest.approx(expected, rel=1e-5)


def test_experts_that_are_drawn_by_chance_in_training_are_not_trained(tmp_path: Path) -> None:
    """Phi-MoE's: transformers samples them."""
    case = Case("phimoe", UNTIED | PHIMOE | {"num_experts_per_tok": 2})
    case.build(tmp_path / "model")
    with raises(UsageError, "sampled", "SparseMixer", hint="evaluate"):
        losses(job(tmp_path / "model", folder=tmp_path / "logs"))
