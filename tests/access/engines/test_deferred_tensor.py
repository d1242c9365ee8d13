"""Tensors that engines cut before they copy them: only what is copied is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

import megtool
from megtool.access.engines.deferred_tensor import DeferredTensor
from tests.support.counted_reads import CountedReads

SHAPE = (16, 12, 64)

CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "narrow": lambda t: t.narrow(1, 3, 4),
    "an expert": lambda t: t[5],
    "rows of an expert": lambda t: t[-1][2:7],
    "columns, turned": lambda t: t[2].narrow(1, 16, 16).t(),
    "transposed": lambda t: t[1:3].transpose(-1, -2),
    "permuted": lambda t: t.permute(2, 0, 1)[8:, 3],
    "chunk": lambda t: t.chunk(5)[2],
    "split": lambda t: t.split([4, 8], dim=1)[1],
    "unbind": lambda t: t.unbind(1)[7],
    "data": lambda t: t.detach().data[..., 4:6],
    "contiguous": lambda t: t[3:5].contiguous(),
}
"""What weight loaders do to a tensor before they copy it."""

USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda t: t[:2].to(torch.float64),
    "view": lambda t: t[4].view(-1),
    "reshape": lambda t: t[4].reshape(6, -1),
    "every other row": lambda t: t[2][::2],
    "rows by number": lambda t: t[2][torch.tensor([1, 3])],
    "arithmetic": lambda t: t[0] * 2 + t[1],
    "cat": lambda t: torch.cat([t[0], t[3]], dim=1),
    "like": lambda t: torch.zeros_like(t[0]),
    "unsqueeze": lambda t: t[0].unsqueeze(0),
    "clone": lambda t: t[1].clone(),
}
"""What reads it."""


@pytest.fixture(scope="module")
def stored() -> torch.Tensor:
    return torch.randn(SHAPE).to(torch.bfloat16)


@pytest.fixture(scope="module")
def deferred(stored: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> DeferredTensor:
    path = tmp_path_factory.mktemp("deferred") / "a.safetensors"
    save_file({"w": stored}, path)
    return DeferredTensor(megtool.open(path, framework="torch").tensors["w"])


@pytest.mark.parametrize("name", CUTS)
def test_a_part_is_read_when_it_is_copied(
    name: str, stored: torch.Tensor, deferred: DeferredTensor
) -> None:
    expected = CUTS[name](stored)
    with CountedReads() as files:
        part = CUTS[name](deferred)
        assert isinstance(part, DeferredTensor)
        assert (part.shape, part.dtype) == (expected.shape, expected.dtype)
        assert not files.num_bytes
        parameter = torch.nn.Parameter(torch.zeros(expected.shape, dtype=expected.dtype))
        parameter.data.copy_(part)
    assert parameter.data.equal(expected)
    assert files.num_bytes < stored.nbytes


@pytest.mark.parametrize("name", USES)
def test_every_other_use_gives_a_plain_tensor(
    name: str, stored: torch.Tensor, deferred: DeferredTensor
) -> None:
    result = USES[name](deferred)
    assert type(result) is torch.Tensor
    assert result.equal(USES[name](stored))


def test_only_the_elements_of_a_part_are_read(deferred: DeferredTensor) -> None:
    with CountedReads() as files:
        torch.zeros(12, 64, dtype=torch.bfloat16).copy_(deferred[3])
    assert files.num_bytes == 12 * 64 * 2


def test_an_index_outside_of_it_is_refused(deferred: DeferredTensor) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        deferred.narrow(0, 10, 7)
    for index in (16, -17):
        with pytest.raises(IndexError):
            torch.select(deferred, 0, index)
    assert "not read" in repr(deferred)


def test_a_number_is_no_part_of_it(stored: torch.Tensor, deferred: DeferredTensor) -> None:
    assert deferred.float().abs().max().item() == stored.float().abs().max().item()
    with pytest.raises(RuntimeError):
        deferred.numpy()


def test_it_is_cut_in_inference_mode(stored: torch.Tensor, deferred: DeferredTensor) -> None:
    """Engines may load in that mode; what reads the checkpoint runs in it, then, too."""
    with torch.inference_mode():
        out = torch.zeros(4, 64, dtype=torch.bfloat16)
        out.copy_(DeferredTensor(deferred.source)[1].narrow(0, 2, 4))
    assert out.equal(stored[1, 2:6])
