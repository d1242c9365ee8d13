"""Rotation: the reference is transformers' own, and Triton's kernel is the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megtool.kernels.dispatch import use
from megtool.kernels.elementwise.rotary import rotate

Agree = Callable[..., None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def angles(batch: int, length: int, size: int, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """cos and sin in Hugging Face's form."""
    generator = torch.Generator().manual_seed(3)
    angle = torch.rand(batch, length, size // 2, generator=generator) * 6
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_is_transformers_rotation(dtype: torch.dtype) -> None:
    from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

    x = numbers(2, 5, 3, 16).to(dtype)
    exact = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    for theirs, size, interleaved in ((llama, 16, False), (neox, 8, False), (glm, 16, True)):
        halves = angles(2, 5, size, interleaved=False)
        # GLM repeats the first half of what it is given.
        expected, _ = theirs(x, x, *(t.to(dtype) for t in halves), unsqueeze_dim=2)
        cos, sin = (t.to(dtype) for t in angles(2, 5, size, interleaved=interleaved))
        out = rotate(x, cos, sin, interleaved=interleaved)
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected, **exact)


def test_interleaved_pairs_are_complex_numbers() -> None:
    x = numbers(2, 5, 3, 16)
    cos, sin = angles(1, 5, 16, interleaved=True)
    turn = torch.complex(cos[..., ::2], sin[..., ::2]).unsqueeze(2)
    expected = torch.view_as_real(torch.view_as_complex(x.view(2, 5, 3, 8, 2)) * turn).flatten(-2)
    torch.testing.assert_close(rotate(x, cos, sin, interleaved=True), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "size"),
    [((0, 3, 2, 8), 8), ((1, 1, 1, 2), 2), ((2, 3, 5, 24), 10), ((1, 4, 40, 128), 128)],
    ids=str,
)
def test_triton_is_the_reference(
    agree: Agree,
    device: str,
    shape: tuple[int, ...],
    size: int,
    dtype: torch.dtype,
    interleaved: bool,
) -> None:
    x = numbers(*shape).to(device, dtype)
    for batch in (1, shape[0]):
        cos, sin = (t.to(device) for t in angles(batch, shape[1], size, interleaved=interleaved))
        agree(lambda x: rotate(x, cos, sin, interleaved=interleaved), (x,))  # noqa: B023


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_queries_and_keys_turn_in_one_call_out_of_their_product(name: str, device: str) -> None:
    qkv = numbers(2, 3, 2, 5, 8).to(device).requires_grad_()  # two groups of 3 queries, k and v
    cos, sin = (t.to(device) for t in angles(1, 3, 8, interleaved=False))
    with use(name):
        both = rotate(qkv[:, :, :, :4], cos, sin)
        (grad,) = torch.autograd.grad(both.square().sum(), qkv)
    assert both.is_contiguous()
    for head in range(4):
        torch.testing.assert_close(both[:, :, :, head], rotate(qkv[:, :, :, head], cos, sin))
    # A rotation keeps lengths, so the gradient of the square is that of the square before it.
    torch.testing.assert_close(grad[:, :, :, :4], 2 * qkv[:, :, :, :4])
    assert not grad[:, :, :, 4].any()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_heads_before_tokens_are_fine(name: str, device: str) -> None:
    x = numbers(2, 4, 3, 8).to(device).transpose(1, 2)
    cos, sin = (t.to(device) for t in angles(2, 3, 8, interleaved=False))
    with use(name):
        out = rotate(x, cos, sin)
    torch.testing.assert_close(out, rotate(x.contiguous(), cos, sin))
    assert out.is_contiguous()
