"""What does not fit is refused before anything is read: all of it at once, by every loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import megtool
from megtool.errors import LayoutError, MappingError, MegtoolError, StorageError, UsageError
from tests.support.errors import raises

Q, K, NORM = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.norm.weight",
)


def by_load_state_dict(state: dict[str, Any], place: Path) -> None:
    megtool.load_state_dict(state, place)


def by_own_planner(state: dict[str, Any], place: Path) -> None:
    megtool.dcp.load(state, place)


def by_torchs_planner(state: dict[str, Any], place: Path) -> None:
    dcp.load(state, storage_reader=megtool.dcp.Reader(place), no_dist=True)


LOADERS = [by_load_state_dict, by_own_planner, by_torchs_planner]


def error_of(load: Callable[[dict[str, Any], Path], None], state: Any, place: Path) -> MegtoolError:
    """megtool's error, alone or as the one of torch's DCP."""
    with pytest.raises((MegtoolError, dcp.CheckpointException)) as caught:
        load(state, place)
    error: Any = caught.value
    if isinstance(error, dcp.CheckpointException):
        (error,) = [e for e, _ in error.failures.values()]
    assert isinstance(error, MegtoolError)
    return error


@pytest.mark.parametrize("load", LOADERS)
def test_tensors_that_cannot_hold_what_is_stored(load: Any, llama: Path) -> None:
    """Three of them, of which the first error names each; what fits is left alone, too."""
    state = {
        Q: torch.zeros(32, 32, dtype=torch.int32),
        K: torch.zeros(1, 32).expand(16, 32),
        "lm_head.weight": torch.zeros(101, 32).to_sparse(),
        NORM: torch.zeros(32),
    }
    error = error_of(load, state, llama)
    assert isinstance(error, MappingError)
    assert error.tensor in state
    for text in (Q, "int32", "bfloat16", K, "expanded", "lm_head.weight", "sparse_coo", "3 cannot"):
        assert text in error.message
    assert NORM not in error.message
    assert not state[NORM].any()


@pytest.mark.parametrize("load", LOADERS[:2])
def test_all_kinds_of_faults_are_in_one_error(load: Any, llama: Path) -> None:
    """Missing, of another shape, of another type, and no tensor at all."""
    state = {
        "a.weight": torch.zeros(2),
        Q: torch.zeros(32, 31),
        K: torch.zeros(16, 32, dtype=torch.bool),
        NORM: torch.zeros(32),
    }
    if load is by_load_state_dict:
        state["lm_head.weight"] = np.zeros((101, 32))  # type: ignore[assignment]
    error = error_of(load, state, llama)
    for text in ("a.weight", Q, "[32, 31]", K, "bool"):
        assert text in error.message
    assert ("ndarray" in error.message) == ("lm_head.weight" in state)
    assert not state[NORM].any()


@pytest.mark.parametrize("load", LOADERS[:2])
def test_tensors_without_memory(load: Any, llama: Path) -> None:
    state = {Q: torch.zeros(32, 32, device="meta"), NORM: torch.zeros(32)}
    error = error_of(load, state, llama)
    assert isinstance(error, UsageError)
    assert "to_empty" in (error.hint or "")
    assert not state[NORM].any()


@pytest.mark.parametrize("load", LOADERS)
def test_a_read_that_fails_says_so(load: Any, llama: Path, monkeypatch: Any) -> None:
    from megtool.access import read_boxes

    def refuse(*_: object, **__: object) -> None:
        raise StorageError("the disk failed", file=llama)

    monkeypatch.setattr(read_boxes, "execute", refuse)
    error = error_of(load, {Q: torch.zeros(32, 32)}, llama)
    assert isinstance(error, StorageError)
    assert "in part" in (error.hint or "")


def test_views_that_can_be_filled_are(llama: Path) -> None:
    """A transposed tensor, every other column, and a parameter that is frozen."""
    want = megtool.open(llama, framework="torch").as_("hf", dtype="float32")
    frozen = nn.Parameter(torch.zeros(32), requires_grad=False)
    state = {Q: torch.zeros(32, 32).t(), K: torch.zeros(16, 64)[:, ::2], NORM: frozen}
    megtool.load_state_dict(state, llama)
    assert all(tensor.equal(want[name][...]) for name, tensor in state.items())


def test_what_is_no_model_is_refused(llama: Path) -> None:
    with raises(UsageError, "int"):
        megtool.load_state_dict(3, llama)  # type: ignore[arg-type]
    with raises(UsageError, "dict", hint="megtool.dcp.load"):
        megtool.load_state_dict({"model": {Q: torch.zeros(32, 32)}}, llama)


def test_a_layout_that_is_none(llama: Path) -> None:
    """Without a rank, with one that is none of the layout's, and one that divides nothing."""
    state = {Q: torch.zeros(32, 32)}
    with raises(LayoutError, "tp=2", hint="rank=0"):
        megtool.load_state_dict(state, llama, tp=2)
    for rank in (2, -1, "1"):
        with raises(LayoutError, rank, hint="0 to 1"):
            megtool.load_state_dict(state, llama, tp=2, rank=rank)  # type: ignore[arg-type]
    with raises(LayoutError, "tp=3", "num_heads=4", hint="1, 2, 4"):
        megtool.load_state_dict(state, llama, tp=3, rank=0)
    assert not state[Q].any()
