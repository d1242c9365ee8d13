"""Loss scales against megatron-core's rules, run by its own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.optim.scaler import ConstantGradScaler, DynamicGradScaler


def megatron(initial: float, minimum: float, window: int, hysteresis: int) -> Any:
    """The real class with its tensors on the CPU: its own `__init__` puts them on CUDA."""
    real = pytest.importorskip("megatron.core.optimizer.grad_scaler").DynamicGradScaler
    scaler = real.__new__(real)
    scaler._scale = torch.tensor([initial])
    scaler.min_scale = torch.tensor([minimum])
    scaler.growth_factor = torch.tensor([2.0])
    scaler.backoff_factor = torch.tensor([0.5])
    scaler.growth_interval = window
    scaler.hysteresis = scaler._hysteresis_tracker = hysteresis
    scaler._growth_tracker = 0
    return scaler


@pytest.mark.peers
@settings(max_examples=200, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=80),
    initial=st.sampled_from([2.0**32, 65536.0, 3.0, 1.0]),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
)
def test_scale_and_state_are_those_of_megatron_core(
    overflows: list[bool], initial: float, window: int, hysteresis: int
) -> None:
    ours = DynamicGradScaler(initial=initial, minimum=1.0, window=window, hysteresis=hysteresis)
    theirs = megatron(initial, 1.0, window, hysteresis)
    for found in overflows:
        ours.update(found)
        theirs.update(found)
        mine, real = ours.state_dict(), theirs.state_dict()
        assert list(mine) == list(real)
        assert torch.equal(mine.pop("scale"), real.pop("scale"))
        assert mine == real


def test_overflows_need_not_be_in_a_row_and_count_until_the_scale_grows() -> None:
    scaler = DynamicGradScaler(initial=16.0, window=3, hysteresis=2)
    seen = []
    for found in (True, False, True, False, True, False, False, False, True, True):
        scaler.update(found)
        seen.append(scaler.scale)
    #        let pass   halved     halved at once      grown, let pass, halved
    assert seen == [16, 16, 8, 8, 4, 4, 4, 8, 8, 4]


def test_a_state_is_taken_over() -> None:
    scaler = DynamicGradScaler(initial=16.0, window=3)
    for found in (True, True, False, False):
        scaler.update(found)
    again = DynamicGradScaler(window=3)
    again.load_state_dict(scaler.state_dict())
    again.update(False)
    assert again.scale == 16.0


@pytest.mark.peers
def test_a_scale_is_saved_and_taken_over_in_megatrons_unit() -> None:
    """Of a mean over 8 tokens Megatron's, of their sum ours: the same scale of each token."""
    ours = DynamicGradScaler(initial=2.0**10 / 8, window=3, unit=8.0)
    theirs = megatron(2.0**10, 1.0, 3, 2)
    for found in (False, True, True, False):
        ours.update(found)
        theirs.update(found)
    assert torch.equal(ours.state_dict()["scale"], theirs.state_dict()["scale"])
    again = DynamicGradScaler(window=3, unit=8.0)
    again.load_state_dict(theirs.state_dict())
    assert (again.scale, again.state_dict()) == (ours.scale, theirs.state_dict())


def test_a_scale_does_not_grow_to_what_cannot_be_saved() -> None:
    scaler = DynamicGradScaler(initial=2.0**120, window=1, unit=2.0**7)
    scaler.update(False)
    assert scaler.scale == 2.0**120


def test_a_constant_stays() -> None:
    scaler = ConstantGradScaler(8.0)
    scaler.update(True)
    scaler.load_state_dict(scaler.state_dict())
    assert (scaler.scale, scaler.state_dict()) == (8.0, {})
