"""Learned scales in a decoder: gradients through its passes, and what does not go with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.fake_quant.learned_scales import learned_gradients
from megtool.quant.qparams import QParams
from megtool.quant.recipes.learned_scales import LearnedScales
from megtool.train.features.learned_scales import LearnedWeights
from megtool.train.model.build import load_for_training
from tests.support.models import tiny_models
from tests.support.quant.loaded import make_qparams, open_model_source, randomize

TOKENS = torch.arange(48).view(2, 24) * 37 % 128


def backward(decoder: Decoder, times: int) -> float:
    """Backward passes of as many micro batches; returns the last loss."""
    decoder.zero_grad()
    loss = torch.zeros(())
    for n in range(times):
        tokens = TOKENS.roll(n, 1)
        loss, _ = decoder.loss(Batch(tokens_BS=tokens), tokens.roll(-1, 1))
        loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("model", ["llama", "moe"])
def test_passes_see_rounded_weights_and_give_all_gradients(model: str, tmp_path: Path) -> None:
    """The gradients of weights and amaxes are those at the rounded weights, through the rounding,
    summed over micro batches; weights themselves stay."""
    torch.set_num_threads(1)
    folder = randomize(getattr(tiny_models, model)(tmp_path / model))
    source, modules, points = open_model_source(folder)
    (decoder,) = load_for_training(source, ProcessGroups.alone(), dtype="float32", threads=1)
    qparams = make_qparams(modules, points, lambda _: "W4A16_NVFP4")
    kept = {m: q for m, q in qparams.weights.items() if not m.endswith("attn.v")}
    learned = LearnedWeights([decoder], QParams(weights=kept), LearnedScales(learns_pre=True))
    for x in learned.layers:
        for side, amax in x.amaxes.items():
            assert dict(decoder.named_parameters())[x.parameter_name(side)] is amax
            with torch.no_grad():
                amax.mul_(0.9 if side == "pre" else 0.95)
    before = {n: p.detach().clone() for n, p in decoder.named_parameters()}
    with learned.rounded():
        loss = backward(decoder, 2)
    found = {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}
    assert all(torch.equal(p, before[n]) for n, p in decoder.named_parameters())
    rounded = {x.name: x.rounded() for x in learned.layers}
    with torch.no_grad():
        for x in learned.layers:
            x.weight.copy_(rounded[x.name])
    assert backward(decoder, 2) == loss
    for x in learned.layers:
        at_rounded = x.weight.grad
        assert at_rounded is not None
        with torch.no_grad():
            x.weight.copy_(before[x.name])
            of_weight, of_pre, of_post = learned_gradients(at_rounded, x.weight, *x.find_scales())
            rows = x.is_learned
            want = torch.where(rows, of_weight, at_rounded)
            torch.testing.assert_close(found[x.name], want, rtol=1e-4, atol=1e-7)
            for side, grad in (("pre", of_pre), ("post", of_post)):
                have = found[x.parameter_name(side)].view_as(grad)
                # None where the amax is above that of the weight, or the row is not rounded.
                passes = have != 0
                assert passes.float().mean() > 0.5 * rows.float().mean()
                assert not bool((passes & ~rows).any())
                torch.testing.assert_close(have[passes], grad[passes] / 6, rtol=1e-3, atol=1e-6)
    if model == "llama":
        (fused,) = (x for x in learned.layers if "layers.0.self_attention.linear_qkv" in x.name)
        assert 0 < fused.is_learned.float().mean() < 1
        tables = learned.gather([])
        top = float(np.abs(before[fused.name][fused.is_learned[:, 0]].numpy()).max())
        assert 0 < max(float(tables[f"global_amax:{m}"]) for m in fused.modules) <= top * 1.0001
