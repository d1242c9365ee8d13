"""Families: what they know of a model that Megatron's args cannot say."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.families.detection import family
from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.spec.model_config import CONFIG_FIELDS

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("gemma2", "Gemma2Config", {"query_pre_attn_scalar", "final_logit_softcapping"}),
        ("granite", "GraniteConfig", {"embedding_multiplier", "logits_scaling"}),
        ("deepseek_v3", "DeepseekV3Config", set()),
    ],
)
def test_a_model_of_megatrons_args_gets_its_familys_facts(
    name: str, kind: str, said: set[str]
) -> None:
    stored: dict[str, Any] = getattr(transformers, kind)().to_dict()
    whole = family(name).read_config(stored)
    by_args = config_from_args(args_from_config(whole))
    completed, assumed = family(name).completed(by_args)
    assert set(assumed) >= said
    for field in CONFIG_FIELDS:
        if field not in ("extra", "latent_norm_eps"):  # Megatron's norms have one epsilon
            assert completed.get(field) == whole.get(field), field
