"""torchtitan's own models, and its adapters, against our names of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import megtool
from megtool import reshard
from tests.support.folders import stored_tensors
from tests.support.models.tiny_model import tiny_model
from tests.support.peers.torchtitan_models import CASES, SIZES, TOKENS, noisy

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.peers


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, Any]:
    """A Hugging Face folder, torchtitan's empty model of it and its adapter."""
    family, keys, build = CASES[request.param]
    tiny_model(family, tmp_path / "hf", sizes=SIZES, fill=noisy, **keys)
    config, adapter = build()
    return tmp_path / "hf", config.build(), adapter


def read_by_adapter(folder: Path, adapter: Any) -> dict[str, torch.Tensor]:
    """torchtitan's own conversion."""
    state: dict[str, torch.Tensor] = adapter.from_hf(load_file(folder / "model.safetensors"))
    return state


def loss_of(model: Any) -> float:
    """The loss of next tokens."""
    with torch.no_grad():
        logits = model(TOKENS)
        return float(
            torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten()
            )
        )


def assert_state(model: Any, expected: dict[str, torch.Tensor]) -> None:
    """Every tensor of the model is as torchtitan's adapter has it."""
    state = model.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    assert {n for n in state if n not in expected} <= {n for n in state if "expert_bias_E" in n}


@pytest.mark.parametrize("how", ["load_state_dict", "dcp"])
def test_a_model_is_filled_as_by_its_adapter(case: tuple[Path, Any, Any], how: str) -> None:
    folder, model, adapter = case
    expected = read_by_adapter(folder, adapter)
    other = {n: t for n, t in model.state_dict().items() if n not in expected}
    out = folder.parent / "out"
    reshard(folder, out, to="torch_dist", tp=2, fsync=False)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(-1)
    if how == "dcp":
        state = {n: t for n, t in model.state_dict().items() if n not in other}
        dcp.load(state, storage_reader=megtool.dcp.Reader(out), planner=megtool.dcp.Planner())
        model.load_state_dict(state, strict=False)
    else:
        report = megtool.load_state_dict(model, out, strict=not other)
        assert report.naming == "torchtitan"
        assert report.missing == tuple(other)
    assert_state(model, expected)
    if type(model).__name__ == "GptOssModel":  # its experts compute in bfloat16 alone
        model.to(torch.bfloat16)
    ours = loss_of(model)
    model.load_state_dict(expected, strict=False)
    assert ours == loss_of(model)


def test_a_saved_model_becomes_a_hugging_face_folder(case: tuple[Path, Any, Any]) -> None:
    folder, model, adapter = case
    model.load_state_dict(read_by_adapter(folder, adapter), strict=False)
    saved = folder.parent / "saved"
    state = model.state_dict()
    dcp.save(state, checkpoint_id=saved)
    reshard(saved, folder.parent / "out", to="hf", like=folder, fsync=False)
    back = adapter.to_hf(state)
    written = load_file(folder.parent / "out" / "model.safetensors")
    assert set(written) == set(back)
    for name, tensor in written.items():
        assert torch.equal(tensor, back[name]), name
    assert stored_tensors(folder.parent / "out") == stored_tensors(folder)
