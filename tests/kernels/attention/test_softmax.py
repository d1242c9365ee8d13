"""The masked softmax: the reference is torch's attention and gpt-oss, Triton's the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.kernels.attention.softmax import masked_softmax
from megtool.kernels.dispatch import use

Agree = Callable[..., None]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_mask(*shape: int) -> Tensor:
    """A mask with one row that may look nowhere."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(4)) > 0.4
    mask[..., :1, :] = False
    return mask


def test_the_reference_is_torchs_attention() -> None:
    query, key, value = (numbers(2, 3, 7, 16, seed=s) for s in range(3))
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(query, key, value, mask, scale=0.3)
    out = masked_softmax(query @ key.mT, mask, scale=0.3) @ value
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_the_reference_is_gemmas_cap_and_gpt_oss_sinks() -> None:
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss

    class Facts(torch.nn.Module):
        num_key_value_groups = 1
        sinks = numbers(3, seed=5)

    query, key, value = (numbers(2, 3, 7, 16, seed=s) for s in range(3))
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    added = torch.zeros(1, 1, 7, 7).masked_fill(~mask, torch.finfo(torch.float32).min)
    module = Facts().eval()
    _, theirs = modeling_gemma2.eager_attention_forward(
        module, query, key, value, added, scaling=0.25, softcap=5.0
    )
    ours = masked_softmax(query @ key.mT, mask, scale=0.25, softcap=5.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    out, _ = modeling_gpt_oss.eager_attention_forward(
        module, query, key, value, added, scaling=0.25
    )
    ours = masked_softmax(query @ key.mT, mask, scale=0.25, sinks_N=module.sinks) @ value
    torch.testing.assert_close(ours.transpose(1, 2), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 4), (1, 1, 1, 1), (2, 2, 3, 7), (1, 1, 2, 1500)], ids=str
)
def test_triton_is_the_reference(
    agree: Agree, device: str, shape: tuple[int, ...], dtype: torch.dtype, softcap: float
) -> None:
    batch, heads, queries, keys = shape
    scores = numbers(*shape).to(device, dtype)
    sinks = numbers(heads, seed=1).to(device, dtype)
    # Backward starts from the rounded output, so shares of a sum of 1 are apart by an ulp of 1.
    noise = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps * (2 + batch * queries / 4)
    masks = (some_mask(queries, keys), some_mask(batch, 1, queries, keys))
    agree(lambda x: masked_softmax(x, None, scale=0.5, softcap=softcap), (scores,), noise=noise)
    for mask in masks:
        seen = mask.to(device)
        agree(
            lambda x, s: masked_softmax(x, seen, scale=0.5, softcap=softcap, sinks_N=s),  # noqa: B023
            (scores, sinks),
            noise=noise,
        )


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_row_that_may_look_nowhere_is_zero_and_passes_nothing_on(name: str, device: str) -> None:
    scores = numbers(2, 3, 4, 5).to(device).requires_grad_()
    sinks = numbers(3, seed=1).to(device)
    mask = some_mask(4, 5).to(device)
    for given in (None, sinks):
        with use(name):
            out = masked_softmax(scores, mask, scale=1.0, sinks_N=given)
            (grad,) = torch.autograd.grad(out.square().sum(), scores)
        assert not out[:, :, 0].any()
        assert not grad[:, :, 0].any()
        assert out.isfinite().all()
        assert grad.isfinite().all()
        sums = out.sum(-1)[:, :, 1:]
        assert (sums < 1).all() if given is not None else (sums - 1).abs().max() < 1e-6
