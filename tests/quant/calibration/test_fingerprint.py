"""The fingerprint of a model: the same in every layout, another one for another forward pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import reshard
from megtool.errors import CalibrationError
from megtool.quant.calibration.fingerprint import hash_model
from megtool.source.open import open_source
from tests.support.models import tiny_models
from tests.support.quant.calibrated import case, random_moe, tokens


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have more columns than are looked at in one place."""
    sizes = {"hidden_size": 64, "intermediate_size": 4608, "num_hidden_layers": 1}
    return tiny_models.llama(tmp_path_factory.mktemp("wide") / "llama", **sizes)


def of(folder: Path) -> str:
    opened = open_source(folder, optimizer=False)
    return hash_model(opened.catalogue, opened.view)


def configured(folder: Path, out: Path, **more: Any) -> Path:
    shutil.copytree(folder, out)
    said = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(said | more))
    return out


def changed(folder: Path, out: Path, name: str, change: Callable[[torch.Tensor], Any]) -> Path:
    shutil.copytree(folder, out)
    held = load_file(out / "model.safetensors")
    change(held[name])
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_it_is_that_of_every_layout(wide: Path, tmp_path: Path, kind: str) -> None:
    source = wide if kind == "dense" else random_moe(tmp_path / "moe")
    layout = {"tp": 2} if kind == "dense" else {"tp": 2, "pp": 2, "ep": 2}
    reshard(source, tmp_path / "dist", to="torch_dist", **layout)
    reshard(tmp_path / "dist", tmp_path / "hf", to="hf", max_shard_size="300KiB")
    assert of(source) == of(tmp_path / "dist") == of(tmp_path / "hf")


@pytest.mark.parametrize(
    "more",
    [
        {"rope_theta": 500.0},
        {"rms_norm_eps": 0.1},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
def test_another_forward_pass_is_another_model(
    wide: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    assert of(configured(wide, tmp_path / "other", **more)) != of(wide)


def test_what_no_forward_pass_asks_for_does_not_count(wide: Path, tmp_path: Path) -> None:
    more = {"max_position_embeddings": 4096, "bos_token_id": 5, "use_cache": False}
    assert of(configured(wide, tmp_path / "other", **more)) == of(wide)


@pytest.mark.parametrize("quarter", range(4))
def test_a_part_of_a_weight_that_changes_shows(wide: Path, tmp_path: Path, quarter: int) -> None:
    def louder(t: torch.Tensor) -> None:
        rows, columns = (n // 2 for n in t.shape)
        down, right = divmod(quarter, 2)
        t[down * rows :, right * columns :][:rows, :columns] *= 4

    name = "model.layers.0.mlp.down_proj.weight"
    assert of(changed(wide, tmp_path / "other", name, louder)) != of(wide)
    assert of(changed(wide, tmp_path / "norm", "model.norm.weight", lambda t: t[-1:].mul_(2))) != (
        of(wide)
    )


def test_work_of_the_same_weights_computed_otherwise_is_refused(wide: Path, tmp_path: Path) -> None:
    batches = tokens(128, count=1)
    case(wide, batches=batches).run(resume_folder=tmp_path / "work")
    other = configured(wide, tmp_path / "other", rms_norm_eps=0.1)
    with pytest.raises(CalibrationError, match="different model"):
        case(other, batches=batches).run(resume_folder=tmp_path / "work")
