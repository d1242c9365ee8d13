"""Quantization-aware training: gradients at rounded weights, applied to the weights' own."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.lora import LoraSettings, adapters_of, add_adapters, merged_weight
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.quant.qparams import QParams
from megtool.train.features.qat import QatFeature
from megtool.train.model.build import load_for_training
from tests.support.models import tiny_models
from tests.support.quant.loaded import make_qparams, open_model_source, randomize

TOKENS = torch.arange(48).view(2, 24) * 37 % 128


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return randomize(tiny_models.llama(tmp_path_factory.mktemp("qat") / "llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return randomize(tiny_models.moe(tmp_path_factory.mktemp("qat") / "moe"))


def made(folder: Path, algo: str, **how: Any) -> tuple[Decoder, Any, QParams]:
    torch.set_num_threads(1)
    source, modules, points = open_model_source(folder)
    (decoder,) = load_for_training(source, ProcessGroups.alone(), dtype="float32", threads=1)
    return decoder, points, make_qparams(modules, points, lambda _: algo, **how)


def gradients(decoder: Decoder) -> tuple[float, dict[str, Tensor]]:
    decoder.zero_grad()
    loss, _ = decoder.loss(Batch(tokens_BS=TOKENS), TOKENS.roll(-1, 1))
    loss.backward()
    found = {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}
    return float(loss.detach()), found


@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W4A16_NVFP4"])
def test_gradients_are_those_at_the_rounded_weights(llama, algo) -> None:
    decoder, points, settlement = made(llama, algo)
    before = {n: t.clone() for n, t in decoder.state_dict().items()}
    quantization = QatFeature([decoder], points, settlement)
    with quantization.around_passes(0, None):
        loss, found = gradients(decoder)
    assert all(torch.equal(t, before[n]) for n, t in decoder.state_dict().items())
    assert decoder.get_submodule("decoder.layers.0.mlp.linear_fc1").tap is None
    views = WeightViews(decoder, settlement.weights)
    with torch.no_grad():
        tops = {m: float(views.read(m).abs().max()) for m in views.parts}
        for point in points:
            for module in point.modules:
                if module in settlement.weights:
                    treatment = settlement.weights[module]
                    if treatment.global_amax:
                        second = max(tops[m] for m in point.modules)
                        treatment = replace(treatment, global_amax=second)
                    treatment = replace(treatment, amax=None, codes=None)
                    views.write(module, fake_weight(views.read(module), treatment))
    expected, theirs = gradients(decoder)
    assert loss == expected
    assert all(torch.equal(found[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("algo", ["FP8", "MXFP4", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN"])
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_passes_compute_what_the_simulation_does(model, algo, request) -> None:
    smooth = algo == "NVFP4" and model == "llama"
    decoder, points, settlement = made(
        request.getfixturevalue(model), algo, smooth=smooth, cache="FP8"
    )
    plain, _ = gradients(decoder)
    quantization = QatFeature([decoder], points, settlement)
    with quantization.around_passes(0, None):
        loss, found = gradients(decoder)
    with torch.no_grad(), FakeQuantModel(decoder, points, quantization._qparams):
        expected, _ = decoder.loss(Batch(tokens_BS=TOKENS), TOKENS.roll(-1, 1))
    assert loss == float(expected)
    assert loss != plain
    assert all(bool(torch.isfinite(g).all()) for g in found.values())
    # The first norm stands before rounded inputs: what passes them straight through reaches it.
    assert found["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"].abs().max() > 0


@pytest.mark.parametrize("algo", ["MXFP4", pytest.param("FP8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_adapters_are_trained_in_rounded_merged_weights(model, algo, request) -> None:
    """As ModelOpt's `_QuantLoraLinear`: the loss is that of the merged model, rounded, and the
    gradient of the merged weights goes on to the matrices."""
    folder = request.getfixturevalue(model)
    decoder, points, settlement = made(folder, algo)
    add_adapters([decoder], LoraSettings(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(0)
    for *_, adapter in adapters_of(decoder):
        adapter.lora_B.detach().normal_(generator=generator).mul_(0.05)
    before = {n: t.clone() for n, t in decoder.state_dict().items()}
    with QatFeature([decoder], points, settlement).around_passes(0, None):
        loss, found = gradients(decoder)
    assert all(torch.equal(t, before[n]) for n, t in decoder.state_dict().items())
    merged, points, settlement = made(folder, algo)
    with torch.no_grad():
        for name, linear, adapter in adapters_of(decoder):
            merged.get_parameter(f"{name}.weight").copy_(merged_weight(linear, adapter))
    with QatFeature([merged], points, settlement).around_passes(0, None):
        expected, theirs = gradients(merged)
    assert loss == expected
    for name, _, adapter in adapters_of(decoder):
        g, scale = theirs[f"{name}.weight"], adapter.scale
        want_A = scale * adapter.lora_B.detach().mT @ g
        want_B = scale * g @ adapter.lora_A.detach().mT
        for kind, want in (("A", want_A), ("B", want_B)):
            have = found[f"{name}.adapter.lora_{kind}"]
            assert (have - want).norm() <= 1e-4 * want.norm(), name


@pytest.mark.parametrize("model", ["llama", "moe"])
def test_adapters_of_smoothed_weights_are_those_of_the_plain_ones(model, request) -> None:
    """The same adapters give the same loss and get the same gradients, whether the weights are
    smoothed as they are rounded, or were before (ModelOpt's checkpoints). Scales are powers of two,
    so that both round the same numbers."""
    folder = request.getfixturevalue(model)
    runs = []
    for is_smoothed in (False, True):
        decoder, points, settlement = made(folder, "W8A8_SQ_PER_CHANNEL", smooth=True)
        add_adapters([decoder], LoraSettings(rank=4, alpha=8.0))
        generator = torch.Generator().manual_seed(0)
        for *_, adapter in adapters_of(decoder):
            adapter.lora_B.detach().normal_(generator=generator).mul_(0.05)
        views = WeightViews(decoder, settlement.weights)
        for module, q in settlement.weights.items():
            scale = np.exp2(np.round(np.log2(q.smoothing_scale) * 4))
            q = replace(q, smoothing_scale=scale, is_smoothed=is_smoothed)
            settlement.weights[module] = q
            if is_smoothed:
                views.write(module, views.read(module) * torch.from_numpy(scale))
        qat = QatFeature([decoder], points, settlement, [] if is_smoothed else None)
        with qat.around_passes(0, None):
            runs.append(gradients(decoder))
    (loss, found), (smoothed_loss, smoothed_found) = runs
    assert smoothed_loss == loss
    of_adapters = [n for n in found if ".adapter." in n]
    assert of_adapters
    for name in of_adapters:
        have, want = smoothed_found[name], found[name]
        assert (have - want).norm() <= 1e-5 * want.norm(), name


def noisy_text(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens of which four of five follow from the one before, and labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 128, (8, 1), generator=generator)]
    for _ in range(32):
        follows = torch.rand((8, 1), generator=generator) < 0.8
        other = torch.randint(0, 128, (8, 1), generator=generator)
        rows.append(torch.where(follows, (rows[-1] * 3 + 1) % 128, other))
    text = torch.cat(rows, 1)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@pytest.mark.slow
def test_training_takes_back_what_rounding_costs(llama) -> None:
    decoder, points, settlement = made(llama, "MXFP4")
    quantization = QatFeature([decoder], points, settlement)

    def mean_loss(*, rounded: bool = True) -> float:
        simulation = FakeQuantModel(decoder, points, settlement)
        with torch.no_grad(), simulation if rounded else nullcontext():
            pairs = [noisy_text(seed) for seed in range(10_000, 10_004)]
            losses = [float(decoder.loss(Batch(tokens_BS=t), w)[0]) / w.numel() for t, w in pairs]
        return sum(losses) / len(losses)

    def learn(first: int, steps: int, lr: float, *, aware: bool) -> None:
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=lr)
        for seed in range(first, first + steps):
            tokens, labels = noisy_text(seed)
            with quantization.around_passes(0, None) if aware else nullcontext():
                decoder.zero_grad()
                loss, count = decoder.loss(Batch(tokens_BS=tokens), labels)
                (loss / count).backward()
            optimizer.step()

    learn(0, 40, 3e-3, aware=False)
    with torch.no_grad():  # a few columns are larger than the rest, as in trained models
        for name, module in decoder.named_modules():
            if name.endswith(("linear_qkv", "linear_fc1")):
                module.layer_norm_weight[::32] /= 8
                module.weight[:, ::32] *= 8
    untouched, weights = mean_loss(), {n: t.clone() for n, t in decoder.state_dict().items()}
    losses, costs = {}, {}
    for aware in (False, True):
        decoder.load_state_dict(weights)
        learn(5000, 12, 3e-4, aware=aware)
        losses[aware] = mean_loss()
        costs[aware] = losses[aware] - mean_loss(rounded=False)
    assert losses[True] < losses[False] - 0.01 < untouched
    assert costs[True] < 0.7 * costs[False]
