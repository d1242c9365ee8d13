"""ModelOpt's own adapters for Megatron: what it saves adds to a model what it computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megtool
from megtool.adapters.read import read_adapter
from megtool.errors import FormatError
from tests.support.models import tiny_text
from tests.support.models.adapted_models import decoder_logits, read_updates
from tests.support.paths import PEERS

pytest.importorskip("megatron.core")
pytest.importorskip("modelopt.torch.peft")
pytestmark = pytest.mark.peers

TOKENS = torch.arange(16).view(2, 8) * 7 % 256
CONFIG = {
    "adapter_cfg": {
        "*": {"rank": 4, "scale": 1.5, "enable": True},
        "*linear_fc2": {"rank": 8, "scale": 0.5},
        "*output_layer*": {"enable": False},
    }
}


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A base model, and what ModelOpt saves with an adapter; what both compute where tp is 1."""
    folder = tmp_path_factory.mktemp("saved")
    base = tiny_text.save(
        folder / "hf",
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    megtool.reshard(base, folder / "megatron", to="torch_dist", fsync=False)
    options = {
        "load": str(folder / "megatron/release"),
        "save": str(folder / "adapter"),
        "dump": str(folder / "dump.pt"),
        "dtype": "float32",
        "world": request.param,
        "layout": {"tp": request.param},
        "lora": CONFIG,
    }
    run_modelopt(options)
    logits = torch.load(folder / "dump.pt").get("logits")
    return {"base": base, "adapter": folder / "adapter", "logits": logits}


def run_modelopt(options: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, str(PEERS / "modelopt_world.py"), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_updates_are_those_that_modelopt_computes(saved: dict[str, Any]) -> None:
    adapter = read_adapter(saved["adapter"])
    assert adapter.form == "modelopt"
    assert {(w.rank, w.scale) for w in adapter.weights} == {(4, 1.5), (8, 0.5)}
    updates = read_updates(saved["base"], saved["adapter"])
    assert len(updates) == 2 * 7
    if saved["logits"] is not None:
        wanted = saved["logits"]
        ours = decoder_logits(saved["base"], updates, TOKENS)
        plain = decoder_logits(saved["base"], {}, TOKENS)
        size = plain.shape[-1]
        assert (plain - wanted[..., :size]).abs().max() > 1e-2
        torch.testing.assert_close(ours, wanted[..., :size], atol=1e-3, rtol=1e-3)


def test_a_model_that_it_is_merged_into_computes_the_same(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    megtool.reshard(saved["base"], tmp_path / "merged", adapter=saved["adapter"], dtype="float32")
    if saved["logits"] is not None:
        wanted = saved["logits"]
        ours = decoder_logits(tmp_path / "merged", {}, TOKENS)
        torch.testing.assert_close(ours, wanted[..., : ours.shape[-1]], atol=1e-3, rtol=1e-3)


def test_it_becomes_an_adapter_of_peft(saved: dict[str, Any], tmp_path: Path) -> None:
    base = saved["base"]
    report = megtool.convert_adapter(saved["adapter"], tmp_path / "out", to="peft", base=base)
    assert list(report.ranks["destination"]) == [4, 8]
    wanted = read_updates(base, saved["adapter"])
    ours = read_updates(base, tmp_path / "out")
    assert ours.keys() == wanted.keys()
    for name, update in ours.items():
        assert update.scale == wanted[name].scale
        for factor in ("up", "down"):
            assert torch.equal(getattr(update, factor)[:], getattr(wanted[name], factor)[:])


def test_modelopt_loads_what_became_of_an_adapter_of_peft(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    """By way of PEFT: ranks and scales that differ between modules become one."""
    base = saved["base"]
    megtool.convert_adapter(saved["adapter"], tmp_path / "peft", to="peft", base=base)
    megtool.convert_adapter(tmp_path / "peft", tmp_path / "out", to="modelopt", base=base)
    adapter = read_adapter(tmp_path / "out")
    assert {(w.rank, w.scale) for w in adapter.weights} == {(8, 1.5)}
    if saved["logits"] is not None:
        options = {
            "load": str(saved["adapter"].parent / "megatron/release"),
            "adapter": str(tmp_path / "out/iter_0000000"),
            "dump": str(tmp_path / "dump.pt"),
            "dtype": "float32",
        }
        run_modelopt(options)
        ours = torch.load(tmp_path / "dump.pt")["logits"]
        torch.testing.assert_close(ours, saved["logits"], atol=1e-4, rtol=1e-4)


def test_a_missing_state_is_refused(saved: dict[str, Any]) -> None:
    state = saved["adapter"] / "modelopt_state/common.pt"
    data = state.read_bytes()
    state.unlink()
    with pytest.raises(FormatError) as e:
        read_adapter(saved["adapter"])
    assert e.value.id == "missing-shard"
    state.write_bytes(data)
