"""Norms: the reference is torch's and transformers' own, and Triton's kernels are the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.kernels.dispatch import use
from megtool.kernels.elementwise.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

Agree = Callable[..., None]
EPS = 1e-5
SHAPES = [(0, 8), (1, 1), (2, 3, 7), (37, 33), (3, 64), (2, 5000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_is_transformers_norm(dtype: torch.dtype) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

    x, weight = numbers(5, 96).to(dtype), numbers(96, seed=1).to(dtype)
    llama, gemma, l2 = LlamaRMSNorm(96, EPS), Gemma2RMSNorm(96, EPS), Llama4TextL2Norm(EPS)
    llama.weight.data, gemma.weight.data = weight, weight
    # One rounding more in Llama's, before the weight.
    apart = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(rms_norm(x, weight, EPS), llama(x), **apart)
    exact = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(rms_norm(x, weight, EPS, zero_centered=True), gemma(x), **exact)
    torch.testing.assert_close(rms_norm(x, None, EPS), l2(x), **exact)


def test_the_reference_is_torchs_norm_where_weights_are_wider() -> None:
    x, weight, bias = numbers(5, 96).bfloat16(), numbers(96, seed=1), numbers(96, seed=2)
    exact = {"rtol": torch.finfo(x.dtype).eps, "atol": 1e-6}
    wide = F.layer_norm(x.float(), (96,), weight + 1, bias, EPS)
    out = layer_norm(x, weight, bias, EPS, zero_centered=True)
    assert out.dtype == x.dtype
    torch.testing.assert_close(out.float(), wide, **exact)
    wide = F.rms_norm(x.float(), (96,), weight, EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS).float(), wide, **exact)
    total = x + bias
    out, kept = add_rms_norm(x, bias.expand(5, 96), weight, EPS)
    assert (out.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(kept, total)
    wide = F.rms_norm(total, (96,), weight, EPS)
    torch.testing.assert_close(out.float(), wide, **exact)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_is_the_reference(
    agree: Agree, device: str, shape: tuple[int, ...], dtype: torch.dtype, zero_centered: bool
) -> None:
    x = numbers(*shape, device=device).to(dtype)
    weight, bias = (numbers(shape[-1], seed=s, device=device).to(dtype) for s in (1, 2))
    # Of a row of one element a norm keeps the sign alone, so its gradient is nothing but noise.
    noise = 0.01 if shape[-1] == 1 else 2e-5
    agree(lambda x, w: rms_norm(x, w, EPS, zero_centered=zero_centered), (x, weight), noise=noise)
    if not zero_centered:
        agree(lambda x: rms_norm(x, None, EPS), (x,), noise=noise)
        agree(lambda x, w: layer_norm(x, w, None, EPS), (x, weight), noise=noise)
    agree(
        lambda x, w, b: layer_norm(x, w, b, EPS, zero_centered=zero_centered),
        (x, weight, bias),
        noise=noise,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (2, 3, 7), (5, 300)], ids=str)
def test_triton_adds_the_residual_first(
    agree: Agree, device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    # Sums of multiples of 1/4 are exact in 16 bits, so that fp64 sees the same ones.
    x, residual = (
        (numbers(*shape, seed=s, device=device) * 4).round().to(dtype) / 4 for s in (0, 1)
    )
    weight, bias = (numbers(shape[-1], seed=s, device=device).to(dtype) for s in (2, 3))
    agree(lambda x, r, w: add_rms_norm(x, r, w, EPS), (x, residual, weight), noise=2e-5)
    agree(
        lambda x, r, w, b: add_layer_norm(x, r, w, b, EPS), (x, residual, weight, bias), noise=2e-5
    )
    agree(lambda x, r, w: add_rms_norm(x, r, w, EPS)[0], (x, residual, weight), noise=2e-5)
    agree(lambda x, r: add_rms_norm(x, r, weight, EPS)[1], (x, residual))


def test_triton_takes_mixed_dtypes_and_views(device: str) -> None:
    x = numbers(4, 6, 10, device=device).bfloat16().transpose(0, 1)[..., :8]
    residual, weight = numbers(6, 4, 8, seed=1, device=device), numbers(8, seed=2, device=device)
    with use("triton"):
        out, total = add_rms_norm(x, residual, weight, EPS)
    expected, sums = add_rms_norm(x, residual, weight, EPS)
    assert (out.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, sums)
    torch.testing.assert_close(out, expected)


@settings(max_examples=15)
@given(rows=st.integers(0, 9), size=st.integers(1, 200), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_a_row_has_mean_square_one(rows: int, size: int, scale: float) -> None:
    with use("triton" if not torch.cuda.is_available() else "torch"):
        out = rms_norm(numbers(rows, size) * scale, None, 1e-30)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(rows))


def test_a_nan_stays_in_its_row(device: str) -> None:
    x = numbers(3, 8, device=device)
    x[1, 2] = float("nan")
    for name in ("torch", "triton"):
        with use(name):
            bad = rms_norm(x, None, EPS).isnan()
        assert bad.all(-1).tolist() == [False, True, False]
        assert bad.any(-1).tolist() == [False, True, False]


def test_rows_beyond_a_tile_are_torchs(device: str, caplog: pytest.LogCaptureFixture) -> None:
    x = numbers(2, 65537, device=device)
    with use("triton"), caplog.at_level("INFO", logger="megtool"):
        out = rms_norm(x, None, EPS)
    assert torch.equal(out, F.rms_norm(x, x.shape[-1:], None, EPS))
    assert "triton has no rms_norm like this: torch runs it" in caplog.text
