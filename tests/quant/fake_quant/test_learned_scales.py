"""Weights with learned scales are those of ModelOpt's quantizer, and so are all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megtool.quant.fake_quant.learned_scales import (
    learned_block_scale,
    learned_gradients,
    round_with_scales,
    scale_passes_gradient,
)
from megtool.quant.modelopt.load import silence_output
from megtool.quant.recipes.learned_scales import LearnedScales
from tests.support.quant.modelopt_on_transformers import emulated_kernels

VARIANTS = [
    {"learnable_amax": ["pre", "post"], "tied_amax": True},
    {"learnable_amax": ["pre", "post"]},
    {"learnable_amax": ["pre", "post"], "quantize_pre_scale": False},
    {"learnable_amax": ["pre"]},
    {"learnable_amax": ["post"]},
    {"learnable_amax": []},
]


def amax_gradient(of_scale: Tensor, amax: Tensor, top: Tensor, *, rounds: bool) -> Tensor:
    """The gradient of an amax, from that of its scale."""
    return of_scale * scale_passes_gradient(amax, top, rounds=rounds) / 6


@pytest.mark.peers
@pytest.mark.parametrize("options", VARIANTS)
def test_values_and_gradients_are_modelopts(options: dict[str, Any]) -> None:
    """Among blocks: amaxes above that of the weight, below 1/512 of it, and of zeros."""
    pytest.importorskip("modelopt")
    with silence_output():
        from modelopt.torch.quantization.config import QuantizerAttributeConfig
        from modelopt.torch.quantization.nn import TensorQuantizer
        from modelopt.torch.quantization.nn.modules.tensor_quantizer import (
            StaticBlockScaleQuantizer,
        )
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 64, generator=made)
    weight[0, :16], weight[1, 16:32] = 0, weight[1, 16:32] * 1e-4
    amax = weight.view(24, 4, 16).abs().amax(-1)
    settings = {
        "num_bits": (2, 1),
        "block_sizes": {-1: 16, "type": "static", "scale_bits": (4, 3)},
    }
    quantizer = TensorQuantizer(QuantizerAttributeConfig(**settings))
    quantizer.amax = amax.reshape(-1, 1)
    quantizer = StaticBlockScaleQuantizer.from_tensor_quantizer(quantizer, amax.max())
    quantizer.enable_lsq(**options, dtype=torch.float32)
    for name in ("_amax_pre", "_amax_post"):
        if hasattr(quantizer, name):
            factor = torch.rand(24 * 4, 1, generator=made) * 0.8 + 0.6
            getattr(quantizer, name).data.mul_(factor)
    theirs, g = nn.Parameter(weight.clone()), torch.randn(24, 64, generator=made)
    with emulated_kernels():
        rounded = quantizer(theirs)
        rounded.backward(g)

    learned = LearnedScales.of({"method": "lsq"} | options)
    assert learned is not None
    top = quantizer.global_amax
    pre, post = (t.detach().view(24, 4) for t in (quantizer.amax_pre, quantizer.amax_post))
    scales = (
        learned_block_scale(pre, top, rounds=learned.rounds_pre),
        learned_block_scale(post, top, rounds=True),
    )
    assert not torch.equal(scales[0], scales[1]) or learned.is_tied
    torch.testing.assert_close(round_with_scales(weight, *scales), rounded, rtol=1e-6, atol=0)
    of_weight, of_pre, of_post = learned_gradients(g, weight, *scales)
    torch.testing.assert_close(of_weight, theirs.grad, rtol=1e-6, atol=0)
    by_pre = amax_gradient(of_pre, pre, top, rounds=learned.rounds_pre)
    by_post = amax_gradient(of_post, post, top, rounds=True)
    by_post = by_post + by_pre if learned.is_tied else by_post
    found = {"_amax_pre": by_pre, "_amax_post": by_post}
    for name, is_learned in (
        ("_amax_pre", learned.learns_pre),
        ("_amax_post", learned.learns_post),
    ):
        parameter = getattr(quantizer, name, None)
        if parameter is None:
            continue
        assert isinstance(parameter, nn.Parameter) == is_learned
        if is_learned:
            want = parameter.grad.view(24, 4)
            assert bool((want == 0).any())
            torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-6)
