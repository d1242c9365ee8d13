"""Transformer Engine's extra state without it: read, taken apart, put together, written back."""

from __future__ import annotations

import io
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megtool.checkpoint.containers import pickled
from megtool.checkpoint.containers.extra_state import bytes_tensor, decode, join, split, to_tree
from megtool.errors import FormatError


class DelayedScaling:
    """Stands for the recipe's class, which is not installed."""

    def __init__(self) -> None:
        self.margin, self.amax_history_len = 0, 4


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformer_engine.common.recipe"
    module = ModuleType(name)
    module.DelayedScaling = DelayedScaling  # type: ignore[attr-defined]
    monkeypatch.setattr(DelayedScaling, "__module__", name)
    for part in ("transformer_engine", "transformer_engine.common", name):
        monkeypatch.setitem(sys.modules, part, module)


def state(gemms: int) -> dict[str, Any]:
    return {
        "recipe": DelayedScaling(),
        "scale_fwd": torch.rand(3 * gemms),
        "amax_history_fwd": torch.rand(4, 3 * gemms),
        "scale_bwd": torch.rand(2 * gemms),
        "amax_history_bwd": torch.rand(4, 2 * gemms),
        "extra_fp8_variables": {"num_gemms": gemms},
    }


@pytest.mark.parametrize("gemms", [1, 3])
def test_what_is_written_back_is_what_was_read(gemms: int) -> None:
    given = state(gemms)
    found = decode(bytes_tensor(pickle.dumps(given)))
    assert found is not None
    assert found.num_gemms == gemms
    back = pickle.loads(to_tree(found).args[0].data)
    assert back["recipe"].__dict__ == given["recipe"].__dict__
    assert back["extra_fp8_variables"] == given["extra_fp8_variables"]
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(back[name], tensor)


def test_products_are_told_apart_as_megatron_does() -> None:
    given = state(3)
    found = decode(pickle.dumps(given))
    assert found is not None
    parts = split(found, 3)
    assert parts is not None
    for k, part in enumerate(parts):
        assert torch.equal(part.tensors["scale_fwd"], given["scale_fwd"].view(3, -1)[:, k])
        history = given["amax_history_fwd"].view(4, 3, -1)[:, :, k]
        assert torch.equal(part.tensors["amax_history_fwd"], history)
    whole = join(parts)
    assert whole is not None
    assert whole.facts == found.facts
    assert all(torch.equal(whole.tensors[n], t) for n, t in found.tensors.items())
    assert split(found, 2) is None


def test_the_form_of_releases_before_2() -> None:
    given = {k: v for k, v in state(2).items() if k != "recipe"}
    given["scale_inv_fwd"] = 1 / given["scale_fwd"]
    out = io.BytesIO()
    torch.save(given, out)
    node = pickled.inert_global("_io", "BytesIO")(out.getvalue())
    found = decode(node)
    assert found is not None
    assert found.is_saved
    back = torch.load(io.BytesIO(to_tree(found).args[0]))
    assert back.keys() == given.keys()
    assert torch.equal(back["scale_inv_fwd"], given["scale_inv_fwd"])


@pytest.mark.parametrize("data", [b"", pickle.dumps(None), pickle.dumps({"scale": 1})])
def test_what_holds_no_scales_is_none(data: bytes) -> None:
    assert decode(data) is None


class Hostile:
    """A pickle that would run a command."""

    def __reduce__(self) -> Any:
        return (__import__("os").system, ("true",))


def test_hostile_states_are_refused() -> None:
    with pytest.raises(FormatError, match="hostile"):
        decode(pickle.dumps({"scale_fwd": Hostile()}))


def test_histories_of_other_lengths_do_not_fit_together() -> None:
    one, other = decode(pickle.dumps(state(1))), decode(pickle.dumps(state(1)))
    assert one is not None
    assert other is not None
    other.tensors["amax_history_fwd"] = torch.rand(8, 3)
    assert join([one, other]) is None
