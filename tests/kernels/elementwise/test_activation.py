"""Activations: the reference is transformers' own, and Triton's kernels are the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megtool.errors import MappingError
from megtool.kernels.dispatch import use
from megtool.kernels.elementwise.activation import KINDS, SAME, activate, gated

Agree = Callable[..., None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [*KINDS, *SAME])
def test_the_reference_is_transformers_activation(kind: str) -> None:
    from transformers.activations import ACT2FN

    x, bias = numbers(5, 24), numbers(24, seed=1)
    act = ACT2FN[kind]
    torch.testing.assert_close(activate(x, kind), act(x))
    torch.testing.assert_close(activate(x, kind, bias=bias), act(x + bias))
    gate, up = (x + bias).chunk(2, -1)
    for trained in (False, True):
        out = gated(x.requires_grad_(trained), kind, bias=bias)
        torch.testing.assert_close(out, act(gate) * up)


def test_the_reference_is_gpt_oss_and_megatrons_limited_gate() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    config = GptOssConfig(hidden_size=8, intermediate_size=6, num_local_experts=1)
    x = numbers(5, 12) * 5
    pairs = torch.stack(x.chunk(2, -1), -1).flatten(-2)  # gpt-oss lays gate and up in turn
    theirs = GptOssExperts(config)._apply_gate(pairs)
    out = gated(x, "quick_gelu", limit=7.0, offset=1.0)
    torch.testing.assert_close(out, theirs)
    assert (x > 7).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_is_the_reference(agree: Agree, device: str, kind: str, dtype: torch.dtype) -> None:
    for shape in ((0, 6), (1, 2), (2, 3, 70), (1, 4202)):
        x, bias = numbers(*shape).to(device, dtype), numbers(shape[-1], seed=1).to(device, dtype)
        noise = 0.02 if dtype != torch.float32 else 5e-6  # the slope crosses 0
        # The bias's gradient is a sum of rounded terms: two units.
        agree(lambda x, b: activate(x, kind, bias=b), (x, bias), noise=noise, ulps=2)
        agree(lambda x: gated(x, kind), (x,), noise=noise)
        agree(
            lambda x, b: gated(x, kind, bias=b, limit=1.5, offset=1.0),
            (x, bias),
            noise=noise,
            ulps=2,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_triton_keeps_nan_and_bends_to_zero_far_out(kind: str, device: str) -> None:
    x = torch.tensor([float("nan"), -100.0, 0.0, 100.0], device=device)
    with use("triton"):
        out = activate(x, kind)
    torch.testing.assert_close(out, activate(x, kind), equal_nan=True)
    assert out.isnan().tolist() == [True, False, False, False]


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(MappingError, match="'mish'") as caught:
        gated(numbers(2, 4), "mish")
    assert "gelu_pytorch_tanh" in str(caught.value)
