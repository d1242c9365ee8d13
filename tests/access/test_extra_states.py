"""Extra states of modules, as Transformer Engine has them: loaded, kept, or refused."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import megtool
from megtool.errors import FormatError, MappingError
from tests.support.checkpoints import te_payloads
from tests.support.errors import raises

Q = "model.layers.0.self_attn.q_proj"
STATE = f"{Q}._extra_state"


class Scaled(nn.Module):
    """A module with an extra state of bytes, which it unpickles when it gets it.

    Source: transformer_engine 2.20, `get_extra_state` and `set_extra_state` in
    `pytorch/module/base.py`; without FP8 the tensor is empty.
    """

    def __init__(self, state: bytes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.bfloat16))
        self.state = state
        self.loaded: Any = None

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.state), dtype=torch.uint8) if self.state else EMPTY

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.state = state.numpy().tobytes()
        self.loaded = pickle.loads(self.state) if self.state else None


EMPTY = torch.empty(0, dtype=torch.uint8)


def scaled_model(state: bytes) -> nn.Module:
    root = nn.Module()
    root.add_module("model", nn.ModuleDict({"layers": nn.ModuleList([nn.Module()])}))
    attention = nn.ModuleDict({"q_proj": Scaled(state)})
    root.model["layers"][0].add_module("self_attn", attention)  # type: ignore
    return root


def payload(**content: Any) -> bytes:
    return pickle.dumps({"scale_fwd": [1.0], **content})


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def save(folder: Path, tensors: dict[str, torch.Tensor], state: Any) -> Path:
    """PyTorch's own checkpoint of a model with one extra state."""
    dcp.save({**tensors, STATE: state}, checkpoint_id=folder, no_dist=True)
    return folder


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def load_both(model: nn.Module, place: Path, through_dcp: bool, **options: Any) -> None:
    if through_dcp:
        state = model.state_dict()
        megtool.dcp.load(state, place, **options)
        model.load_state_dict(state)
    else:
        megtool.load_state_dict(model, place, **options)


@pytest.mark.parametrize("through_dcp", [False, True])
def test_a_module_keeps_what_the_checkpoint_lacks(
    llama: Path,
    tensors: dict[str, torch.Tensor],
    through_dcp: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A Hugging Face folder has none: an empty one is no news, and another is named."""
    for state in (b"", payload()):
        model = scaled_model(state)
        load_both(model, llama, through_dcp)
        module: Any = model.get_submodule(Q)
        assert module.weight.equal(tensors[f"{Q}.weight"])
        assert module.state == state
        assert (STATE in caplog.text) == bool(state)


def test_torchs_own_planner_keeps_it_too(llama: Path, tensors: dict[str, torch.Tensor]) -> None:
    """As a tensor (Transformer Engine 2) and as a stream (1)."""
    for own in (as_bytes(payload()), io.BytesIO(payload())):
        state = {f"{Q}.weight": torch.zeros(32, 32), STATE: own}
        dcp.load(state, storage_reader=megtool.dcp.Reader(llama))
        assert state[STATE] is own
        assert state[f"{Q}.weight"].equal(tensors[f"{Q}.weight"].float())


@pytest.mark.parametrize("through_dcp", [False, True])
def test_a_stored_state_reaches_its_module(
    llama: Path, tensors: dict[str, torch.Tensor], through_dcp: bool, tmp_path: Path
) -> None:
    """Under the stored names; a family has no place for it, and then the module keeps its own."""
    place = save(tmp_path / "dcp", tensors, as_bytes(payload(step=7)))
    model = scaled_model(payload(step=5))
    load_both(model, place, through_dcp, like=llama)
    module: Any = model.get_submodule(Q)
    assert module.state == payload(step=5)
    load_both(model, place, through_dcp)
    assert module.loaded["step"] == 7
    assert module.weight.equal(tensors[f"{Q}.weight"])
    plain = scaled_model(b"")
    load_both(plain, place, through_dcp)
    assert plain.get_submodule(Q).state == b""
    longer = scaled_model(payload(step="more"))
    error: Any = dcp.CheckpointException if through_dcp else MappingError
    with pytest.raises(error, match="have other shapes"):
        load_both(longer, place, through_dcp)


def test_a_real_state_of_transformer_engine_is_loaded(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    real = as_bytes(te_payloads.DELAYED_2_20)
    place = save(tmp_path / "dcp", tensors, real)
    for through_dcp in (False, True):
        state = {STATE: torch.zeros_like(real)}
        load = megtool.dcp.load if through_dcp else megtool.load_state_dict
        load(state, place)
        assert state[STATE].equal(real)


def test_a_state_that_runs_code_is_refused(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    data = pickle.dumps(Hostile(f"touch {tmp_path / 'ran'}"))
    place = save(tmp_path / "tensor", tensors, as_bytes(data))
    for state in ({STATE: as_bytes(data).zero_()}, scaled_model(b"x" * len(data))):
        with raises(FormatError, "would run code", tensor=STATE, id="hostile-pickle", hint=True):
            megtool.load_state_dict(state, place)
    given = {STATE: as_bytes(data).zero_()}
    with pytest.raises(dcp.CheckpointException, match="would run code"):
        megtool.dcp.load(given, place)
    assert not given[STATE].any()
    place = save(tmp_path / "stream", tensors, io.BytesIO(data))
    own = io.BytesIO(b"own")
    streams: dict[str, Any] = {STATE: own}
    with pytest.raises(dcp.CheckpointException, match="would run code"):
        megtool.dcp.load(streams, place)
    assert streams[STATE] is own
    assert not (tmp_path / "ran").exists()


def test_a_stored_stream_is_loaded(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    place = save(tmp_path / "dcp", tensors, io.BytesIO(payload(step=7)))
    state: dict[str, Any] = {STATE: io.BytesIO(b"own")}
    megtool.dcp.load(state, place)
    assert state[STATE].getvalue() == payload(step=7)
