"""Names that wrappers and other generations of Megatron's models give the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.formats import open_checkpoint
from megtool.options.layout import ParallelConfig
from megtool.source.open import open_source
from tests.support.checkpoints.old_formats import Materialize, rename_tensors
from tests.support.checkpoints.trained import config, write

EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "stacked": {},
    "experts": EXPERTS,
    "per layer": EXPERTS | {"moe_layer_freq": (0, 1, 0, 1)},
}


def below(prefix: str) -> Callable[[str], str]:
    """A renaming that puts a wrapper around the model."""

    def rename(name: str) -> str:
        head, dot, rest = name.rpartition("optimizer.state.")
        if not dot:
            return prefix + name
        state, _, key = rest.partition(".")
        return f"{head}{dot}{state}.{prefix}{key}"

    return rename


def hybrid(name: str) -> str:
    return name.replace("decoder.final_layernorm", "decoder.final_norm")


RENAMES: dict[str, Callable[[str], str]] = {
    "NeMo": below("module."),
    "wrapped twice": below("module.module."),
    "Hybrid": hybrid,
    "both": lambda name: below("module.")(hybrid(name)),
    "without Transformer Engine": lambda name: name.replace(
        "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rename", RENAMES)
def test_other_names_are_the_same_tensors(
    rename: str, model: str, tmp_path: Path, materialize: Materialize
) -> None:
    write(tmp_path / "ours", config(**MODELS[model]), ParallelConfig(tp=2), materialize)
    rename_tensors(tmp_path / "ours", tmp_path / "theirs", materialize, RENAMES[rename])
    opened = open_source(tmp_path / "theirs")
    assert opened.view.dialect == "megatron"
    assert opened.reason is None
    report = verify(tmp_path / "ours", tmp_path / "theirs")
    assert report.exit_status == 0, list(report.lines())
    reshard(tmp_path / "theirs", tmp_path / "out", optimizer_format="fully_reshardable", tp=1, pp=2)
    names = {t.name for t in open_checkpoint(tmp_path / "out").tensors}
    assert names == {t.name for t in open_checkpoint(tmp_path / "ours").tensors}
