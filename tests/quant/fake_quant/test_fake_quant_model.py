"""A decoder that computes as an engine does, beside other ways to the same numbers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.inference.evaluation.compare import compare
from megtool.inference.forward import Forward
from megtool.inference.layer_streaming import find_streamer
from megtool.inference.load import load
from megtool.inference.windows import TokenDocument
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel, StoredQuantization
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.qparams import QParams
from tests.support.errors import raises
from tests.support.models import tiny_models
from tests.support.quant.fake_inputs import fake_input
from tests.support.quant.loaded import make_qparams, open_model_source, randomize
from tests.support.worlds.gloo_world import run_world

TOKENS = torch.arange(48).view(2, 24) * 37 % 128
ALGOS = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "MXFP8", "NVFP4"]
SVD = "NVFP4_SVD"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return randomize(tiny_models.llama(tmp_path_factory.mktemp("simulation") / "llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return randomize(tiny_models.moe(tmp_path_factory.mktemp("simulation") / "moe"))


def logits(decoder: Decoder) -> Tensor:
    with torch.inference_mode():
        return decoder(Batch(tokens_BS=TOKENS))


HF = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"} | {
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def in_transformers(folder: Path, settlement: QParams) -> Tensor:
    """The same model in transformers, each Linear with a weight and inputs of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def linear_of(name: str) -> nn.Linear:
        if name == "head":
            return model.lm_head
        _, layer, _, last = name.split(".")
        return model.model.layers[int(layer)].get_submodule(HF[last])

    amaxes = {
        n: float(linear_of(n).weight.detach().abs().max() if t.amax is None else t.amax.max())
        for n, t in settlement.weights.items()
    }
    for name, t in settlement.weights.items():
        linear = linear_of(name)
        parent, _, last = name.rpartition(".")
        siblings = next((f for f in ("qkv", ("gate", "up")) if last in f), (last,))
        if t.format.algo == "FP8":  # engines give all of them one scale
            largest = max(amaxes.get(f"{parent}.{s}", amaxes[name]) for s in siblings)
            codes = (linear.weight.data / (largest / 448)).clamp(-448, 448).to(torch.float8_e4m3fn)
            weight = codes.float() * (largest / 448)
        else:
            weight = fake_weight(linear.weight.data, t, as_run=True)
        if t.branch is not None:
            branch = torch.from_numpy(t.branch.up @ t.branch.down / t.smoothing_scale)
            weight = weight - branch
            linear.register_forward_pre_hook(lambda module, args: setattr(module, "rows", args[0]))
            linear.register_forward_hook(
                lambda module, _, y, branch=branch: y + module.rows @ branch.T
            )
        linear.weight.data = weight
        linear.register_forward_pre_hook(lambda _, args, t=t: (fake_input(args[0], t),))
    with torch.no_grad():
        out: Tensor = model(TOKENS).logits
    return out


@pytest.mark.parametrize("algo", [*ALGOS, SVD])
def test_as_transformers_with_each_linear_on_its_own(llama: Path, algo: str) -> None:
    source, modules, points = open_model_source(llama)
    kept = "head" if algo == SVD else ""  # whose branch would multiply rounded inputs
    settlement = make_qparams(
        modules,
        points,
        lambda name: "" if name == kept else algo,
        smooth=algo in (*ALGOS[2:4], SVD),
    )
    decoder = load(source, dtype="float32")
    before = logits(decoder)
    with FakeQuantModel(decoder, points, settlement):
        during = logits(decoder)
    want = in_transformers(llama, settlement)
    # A number next to a tie may round to the other side.
    assert (during - want).norm() / want.norm() < 0.02
    assert (during - before).norm() / before.norm() > 0.03 * ("4" in algo) + 0.005
    assert torch.equal(logits(decoder), before)


@pytest.mark.parametrize("model", ["llama", "moe"])
def test_weights_on_demand_are_rounded_when_they_come(
    model: str, request: pytest.FixtureRequest
) -> None:
    source, modules, points = open_model_source(request.getfixturevalue(model))
    settlement = make_qparams(modules, points, lambda name: SVD, smooth=True, cache="FP8")
    resident, demanded = (
        load(source, dtype="float32"),
        load(source, dtype="float32", stream_layers=True),
    )
    before = logits(demanded)
    with FakeQuantModel(resident, points, settlement):
        want = logits(resident)
    simulation = FakeQuantModel(demanded, points, settlement)
    with simulation:
        assert torch.equal(logits(demanded), want)
        assert torch.equal(logits(demanded), want)
    assert not torch.equal(want, before)
    assert torch.equal(logits(demanded), before)
    with simulation:  # once more
        assert torch.equal(logits(demanded), want)
    keeper = find_streamer(demanded)
    assert keeper is not None
    keeper.close()


def test_one_layer_in_memory_and_out_again(llama: Path) -> None:
    """What is in memory when it ends is the layer's own again."""
    source, modules, points = open_model_source(llama)
    settlement = make_qparams(modules, points, lambda n: "W4A16_AWQ" if "layers.1.mlp" in n else "")
    decoder = load(source, dtype="float32", stream_layers=True)
    decoder(Batch(tokens_BS=TOKENS))
    keeper = find_streamer(decoder)
    assert keeper is not None
    keeper.enter("decoder.layers.1")
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    own = decoder.get_parameter(name)
    x_TH, frame = torch.randn(48, 128), decoder.frame(Batch(tokens_BS=TOKENS))
    with torch.inference_mode():
        plain = decoder.decoder.layers["1"](x_TH, frame)
        with FakeQuantModel(decoder, points, settlement):
            rounded = decoder.decoder.layers["1"](x_TH, frame)
            assert decoder.get_parameter(name) is not own
        assert decoder.get_parameter(name) is own
        assert torch.equal(decoder.decoder.layers["1"](x_TH, frame), plain)
    assert not torch.equal(rounded, plain)
    keeper.close()


def test_experts_each_by_its_own_scale(moe: Path) -> None:
    """As if every expert were computed alone."""
    source, modules, points = open_model_source(moe)
    rows_alone = "FP8_PER_CHANNEL_PER_TOKEN"
    algo = {0: rows_alone, 1: "NVFP4", 2: "W4A16_AWQ", 3: rows_alone}

    def of(name: str) -> str:
        return algo[int(name.split(".")[4])] if ".experts." in name and "layers.2." in name else ""

    settlement = make_qparams(modules, points, of, smooth=True)
    decoder = load(source, dtype="float32")
    layer = decoder.decoder.layers["2"].get_submodule("mlp")
    linear = layer.get_submodule("experts.experts.linear_fc1")
    counts_E = torch.tensor([5, 0, 7, 4])
    rows = torch.randn(16, 128)
    want = []
    for e, part in enumerate(rows.split(counts_E.tolist())):
        t = settlement.weights[f"layers.2.mlp.experts.{e}.gate"]
        pair = [settlement.weights[f"layers.2.mlp.experts.{e}.{n}"] for n in ("gate", "up")]
        own = linear.get_parameter("weight")[e].chunk(2)
        weight = torch.cat([fake_weight(w, p) for w, p in zip(own, pair, strict=True)])
        want.append(fake_input(part, t) @ weight.T)
    with FakeQuantModel(decoder, points, settlement), torch.inference_mode():
        got = linear(rows, counts_E)
    torch.testing.assert_close(got, torch.cat(want))


def test_folded_factors_are_in_the_norms_already(llama: Path) -> None:
    """Of a written checkpoint, inputs behind a norm are divided no more; stored factors are."""
    source, modules, points = open_model_source(llama)
    settlement = make_qparams(modules, points, lambda name: "W8A8_SQ_PER_CHANNEL", smooth=True)
    decoder = load(source, dtype="float32")
    attention = decoder.decoder.layers["0"].get_submodule("self_attention")
    qkv, proj = attention.get_submodule("linear_qkv"), attention.get_submodule("linear_proj")
    x = torch.randn(5, 128)
    q, o = (settlement.weights[f"layers.0.attn.{n}"] for n in "qo")
    assert (q.stores_pre_quant_scale, o.stores_pre_quant_scale) == (False, True)
    with FakeQuantModel(decoder, points, StoredQuantization.of(settlement, {})):
        assert torch.equal(qkv.tap(x), fake_input(x, replace(q, smoothing_scale=None)))
        assert torch.equal(proj.tap(x), fake_input(x, o))
    assert (qkv.tap, proj.tap) == (None, None)


def test_caches_are_rounded(llama: Path) -> None:
    source, modules, points = open_model_source(llama)
    decoder = load(source, dtype="float32")
    plain = logits(decoder)
    settlement = make_qparams(modules, points, lambda name: "", cache="NVFP4")
    with FakeQuantModel(decoder, points, StoredQuantization.of(settlement, {})):
        rounded = logits(decoder)
    assert 1e-4 < (rounded - plain).norm() / plain.norm() < 0.2


def test_siblings_that_differ(llama: Path) -> None:
    source, modules, points = open_model_source(llama)
    settlement = make_qparams(
        modules, points, lambda name: "" if name.endswith("attn.k") else "FP8"
    )
    with raises(UsageError, "attn.q", "layers.0.attn.k"):
        FakeQuantModel(load(source), points, StoredQuantization.of(settlement, {}))


def on_rank(rank: int, size: int, folder: str, algo: str) -> np.ndarray:
    torch.set_num_threads(1)
    moe = "moe" in folder
    more = {"tp": 2, "ep": 2, "etp": 1} if moe else {"tp": 2}
    groups = ProcessGroups.start(ParallelConfig(**more), device="cpu")
    try:
        source, modules, points = open_model_source(Path(folder))
        settlement = make_qparams(modules, points, lambda name: algo, smooth=True, cache="FP8")
        decoder = load(source, groups=groups, dtype="float32", stream_layers=not moe)
        with FakeQuantModel(decoder, points, settlement):
            return logits(decoder).numpy()
    finally:
        groups.stop()


@pytest.mark.parametrize(
    ("model", "algo"),
    [("llama", "FP8_PER_CHANNEL_PER_TOKEN"), ("moe", SVD), ("llama", "FP8"), ("llama", SVD)],
)
def test_two_ranks_compute_the_same(model: str, algo: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    source, modules, points = open_model_source(folder)
    settlement = make_qparams(modules, points, lambda name: algo, smooth=True, cache="FP8")
    decoder = load(source, dtype="float32")
    with FakeQuantModel(decoder, points, settlement):
        want = logits(decoder)
    for got in run_world(on_rank, 2, str(folder), algo):
        error = (torch.from_numpy(got) - want).norm() / want.norm()
        assert error < 0.02  # sums in another order, and what rounding makes of that


def test_quality(llama: Path) -> None:
    source, modules, points = open_model_source(llama)
    before, after = load(source, dtype="float32"), load(source, dtype="float32", stream_layers=True)
    documents = [TokenDocument(tokens=[(7 * i * i + n) % 128 for i in range(40)]) for n in range(3)]
    found = []
    for algo in ("FP8", "NVFP4"):
        settlement = make_qparams(modules, points, lambda name, algo=algo: algo)
        with FakeQuantModel(after, points, settlement):
            forwards = Forward(before), Forward(after)
            found.append(compare(*forwards, documents, window=16, stride=16))
    same = compare(Forward(before), Forward(after), documents, window=16, stride=16)
    assert (same.kl_max, same.agreement) == (0, 1)
    assert same.ours.perplexity == same.reference.perplexity
    assert 0 < found[0].kl_mean < found[1].kl_mean
    assert found[0].ours.num_tokens == 117
    assert found[0].ours.perplexity == same.ours.perplexity != found[0].reference.perplexity


def test_nothing_is_left_behind_by_a_failure(llama: Path) -> None:
    source, modules, points = open_model_source(llama)
    decoder = load(source, dtype="float32")
    settlement = make_qparams(modules, points, lambda name: "FP8")
    own = dict(decoder.named_parameters())
    with pytest.raises(RuntimeError), FakeQuantModel(decoder, points, settlement):
        raise RuntimeError
    assert all(own[n] is p for n, p in decoder.named_parameters())
    assert all(getattr(m, "tap", None) is None for m in decoder.modules())
    assert isinstance(decoder.get_parameter("output_layer.weight"), nn.Parameter)
    assert load_file(llama / "model.safetensors")


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_on_a_gpu(model: str, request: pytest.FixtureRequest) -> None:
    source, modules, points = open_model_source(request.getfixturevalue(model))
    settlement = make_qparams(modules, points, lambda name: "NVFP4", smooth=True, cache="FP8")
    here = load(source, dtype="float32")
    there = load(source, dtype="float32", groups=ProcessGroups.alone("cuda"))
    with (
        FakeQuantModel(here, points, settlement),
        FakeQuantModel(there, points, settlement),
        torch.inference_mode(),
    ):
        got = there(Batch(tokens_BS=TOKENS.cuda())).cpu()
        assert (got - logits(here)).norm() / got.norm() < 0.02
