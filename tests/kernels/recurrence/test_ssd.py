"""The recurrence of Mamba-2: the reference is transformers' scan, and Triton's kernels are it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.kernels.dispatch import use
from megtool.kernels.recurrence import ssd_triton
from megtool.kernels.recurrence.causal_conv import runs_of
from megtool.kernels.recurrence.ssd import ScanInputs, ssd_scan, ssd_step

SIZES = {"rows": 2, "heads": 4, "size": 5, "groups": 2, "state": 6}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ScanInputs:
    rows, heads, size, groups, state = SIZES.values()
    dt = torch.nn.functional.softplus(numbers(rows, tokens, heads, seed=1) - 1)
    given = ScanInputs(
        numbers(rows, tokens, heads, size).to(dtype),
        dt,
        -torch.arange(1.0, heads + 1),
        numbers(rows, tokens, groups, state, seed=2).to(dtype),
        numbers(rows, tokens, groups, state, seed=3).to(dtype),
        numbers(heads, seed=4).to(dtype),
        numbers(rows, heads, size, state, seed=5),
    )
    return ScanInputs(*(None if t is None else t.to(device) for t in given))


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of tokens a chunk in fp32, one in bf16; several blocks of elements; few heads."""
    for name in ("rows", "groups"):
        monkeypatch.setitem(SIZES, name, 1)
    monkeypatch.setitem(SIZES, "heads", 2)
    monkeypatch.setattr(ssd_triton, "CHUNK", 64)
    monkeypatch.setattr(ssd_triton, "_ELEMENTS", 16)
    monkeypatch.setattr(ssd_triton, "_STATE", 16 * 16)


def theirs(given: ScanInputs, chunk: int = 8) -> tuple[Tensor, Tensor]:
    from transformers.models.nemotron_h import modeling_nemotron_h

    x, dt, a, b, c, d, state, _ = given
    return modeling_nemotron_h.mamba2_chunk_scan(
        x, dt, a, b, c, chunk, D=d, initial_states=state, return_final_states=True
    )


@pytest.mark.parametrize("tokens", [1, 7, 64, 70, 130])
def test_the_reference_is_transformers_scan(tokens: int) -> None:
    given = inputs(tokens)
    for state in (given.state_BNDZ, None):
        part = given._replace(state_BNDZ=state)
        for got, want in zip(ssd_scan(part), theirs(part), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_token_by_token_is_the_scan() -> None:
    given = inputs(9)
    want, last = ssd_scan(given)
    state, outs = given.state_BNDZ, []
    for t in range(9):
        token = given._replace(
            x_BSND=given.x_BSND[:, t : t + 1],
            dt_BSN=given.dt_BSN[:, t : t + 1],
            b_BSGZ=given.b_BSGZ[:, t : t + 1],
            c_BSGZ=given.c_BSGZ[:, t : t + 1],
        )
        y, state = ssd_step(token, state)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_padding_leaves_the_state_as_it_is() -> None:
    given = inputs(70)
    dt = given.dt_BSN.clone()
    dt[:, 40:] = 0
    _, last = ssd_scan(given._replace(dt_BSN=dt))
    _, want = ssd_scan(
        ScanInputs(*(t[:, :40] if i in (0, 1, 3, 4) else t for i, t in enumerate(given[:7])))
    )
    torch.testing.assert_close(last, want, rtol=1e-4, atol=1e-5)


def spans(given: ScanInputs, sizes: list[int]) -> list[ScanInputs]:
    parts = [t.split(sizes, 1) for t in (given[0], given[1], given[3], given[4])]
    return [
        ScanInputs(x, dt, given.a_N, b, c, given.d_N) for x, dt, b, c in zip(*parts, strict=True)
    ]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_runs_are_rows_of_their_own(name: str, device: str) -> None:
    sizes = [64, 5, 20, 1, 45]  # a chunk that is a run, and one of several
    given = inputs(135, device=device)._replace(state_BNDZ=None)
    documents = torch.repeat_interleave(torch.arange(5), torch.tensor(sizes)).expand(
        SIZES["rows"], -1
    )
    runs = runs_of(documents).to(device)
    leaves = [t.clone().requires_grad_() for t in given[:6]]
    with use(name):
        y, last = ssd_scan(ScanInputs(*leaves, runs_BS=runs))
        parts = [ssd_scan(part) for part in spans(ScanInputs(*leaves), sizes)]
    want = torch.cat([p[0] for p in parts], 1)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, parts[-1][1], rtol=1e-4, atol=1e-5)
    pull = numbers(*y.shape, seed=8).to(device)
    grads, wants = (torch.autograd.grad(out, leaves, pull) for out in (y, want))
    for got, expected in zip(grads, wants, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megtool.kernels.recurrence.ssd.CHUNK", 3)
    given = ScanInputs(*(t.double() for t in inputs(7)[:7]))
    runs = torch.tensor([[0, 0, 1, 1, 1, 1, 2], [0] * 7])

    def run(*tensors: Tensor, runs: Tensor | None) -> Tensor:
        state = None if runs is not None else given.state_BNDZ
        return ssd_scan(ScanInputs(*tensors, state_BNDZ=state, runs_BS=runs))[0]

    leaves = [t.requires_grad_() for t in given[:6]]
    for documents in (None, runs):
        assert torch.autograd.gradcheck(
            lambda *t, documents=documents: run(*t, runs=documents), leaves
        )


def test_gradients_are_transformers() -> None:
    given = inputs(70)._replace(state_BNDZ=None)
    leaves = [t.requires_grad_() for t in given[:6]]
    pull = numbers(*given.x_BSND.shape, seed=8)
    got = torch.autograd.grad(ssd_scan(ScanInputs(*leaves))[0], leaves, pull)
    want = torch.autograd.grad(theirs(ScanInputs(*leaves))[0], leaves, pull)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 70, 135])
def test_triton_is_the_reference(
    tokens: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tokens == 70:
        monkeypatch.setitem(SIZES, "rows", 2)
        monkeypatch.setitem(SIZES, "heads", 4)
        monkeypatch.setitem(SIZES, "groups", 2)
        monkeypatch.setitem(SIZES, "size", 24)
    given = inputs(tokens, dtype, device)
    results: list[list[Any]] = []
    for name, wide in (("triton", dtype), ("torch", torch.float64)):
        leaves = [
            t.detach().to(wide if t.dtype == dtype else torch.float32).requires_grad_()
            for t in given[:6]
        ]
        with use(name):  # type: ignore[arg-type]
            y, last = ssd_scan(ScanInputs(*leaves, state_BNDZ=given.state_BNDZ))
        pull = numbers(*y.shape, seed=8).to(dtype).to(y)
        results.append([y.detach(), last, *torch.autograd.grad(y, leaves, pull)])
    assert results[0][0].dtype == dtype
    ulp = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for got, want in zip(*results, strict=True):
        scale = float(want.abs().max())
        torch.testing.assert_close(got.double(), want.double(), rtol=ulp, atol=ulp * max(1, scale))


def test_what_triton_cannot_do_is_left_to_the_reference() -> None:
    """Tiles that no GPU has the memory for, and fp64."""
    for head, state, is_fit in ((64, 128, True), (128, 256, True), (256, 256, False)):
        x, b = torch.empty(1, 1, 1, head), torch.empty(1, 1, 1, state)
        assert ssd_triton.fits(x, b) is is_fit
        assert not ssd_triton.fits(x.double(), b.double())
