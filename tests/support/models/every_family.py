"""A tiny model of every family, as its Hugging Face folder in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.models import dense_cases, moe_cases, mtp_models, nested_cases, tiny_t5
from tests.support.models.tiny_model import tiny_model


def _encoder_decoder(family: str, folder: Path) -> Any:
    fill = dense_cases.fill_uniform if family == "t5" else tiny_t5.fill_untied
    return tiny_model(family, folder, sizes=tiny_t5.SIZES, dtype="bfloat16", fill=fill)


# The first case of each family.
_DENSE = [*dense_cases.CASES, *dense_cases.MORE][::-1]
MODELS: dict[str, Callable[[Path], Any]] = {
    **{case.family: partial(dense_cases.save, case) for case in _DENSE},
    **{name: partial(moe_cases.save, case) for name, case in moe_cases.FIRST.items()},
    **{case.family: case.build for case in nested_cases.CASES},
    **{name: partial(_encoder_decoder, name) for name in ("t5", "mt5", "umt5")},
    "bailing_moe_v2": mtp_models.bailing_moe_v2,
    "mimo": mtp_models.mimo,
}
"""What saves one, by the family's name."""

WITH_EXPERTS = {*moe_cases.FIRST, "bailing_moe_v2", "llama4_multimodal", "kimi_k25"}
WITH_EXPERTS |= {"qwen3_vl_moe", "qwen3_5_moe"}
"""Families whose first case has experts."""
