"""Decoders with their weights in them: whole, on demand, and what is said where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megtool import reshard
from megtool.errors import (
    LayoutError,
    MappingError,
    OutOfMemoryError,
    StorageError,
    UsageError,
)
from megtool.inference import load as loading
from megtool.inference.forward import Forward
from megtool.inference.layer_streaming import find_streamer
from megtool.inference.load import find_nan, load, named_weights
from megtool.inference.rank_weights import Weights
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import TensorFilter, open_source
from megtool.tensors.registration_order import Order
from megtool.train.model.build import load_for_training
from tests.support.errors import raises
from tests.support.models import dense_cases, moe_cases, tiny_llama
from tests.support.runs.loading import source_of
from tests.support.threads import kill_threads, refuse_threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("load") / "hf", dtype="float32")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    """transformers' logits of `TOKENS`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits


TOKENS = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(0))


def logits(decoder: Decoder) -> Tensor:
    with torch.no_grad():
        return decoder(Batch(tokens_BS=TOKENS))


@pytest.mark.parametrize("stream_layers", [False, True], ids=["whole", "on demand"])
def test_it_computes_what_transformers_does(
    stream_layers: bool, folder: Path, expected: Tensor
) -> None:
    decoder = load(source_of(folder), stream_layers=stream_layers)
    assert decoder.dtype == torch.float32
    assert not decoder.training
    for _ in range(2):
        torch.testing.assert_close(logits(decoder), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("stream_layers", [False, True], ids=["whole", "on demand"])
def test_on_a_gpu(stream_layers: bool, folder: Path, expected: Tensor) -> None:
    decoder = load(
        source_of(folder), groups=ProcessGroups.alone("cuda"), stream_layers=stream_layers
    )
    with torch.no_grad():
        found = decoder(Batch(tokens_BS=TOKENS.cuda())).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_formats_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    want = logits(load(source_of(folder)))
    for kind, layout in (("torch_dist", {"tp": 2, "pp": 2}), ("megatron", {"tp": 2})):
        reshard(folder, tmp_path / kind, to=kind, fsync=False, **layout)
        assert logits(load(source_of(tmp_path / kind))).equal(want)


def test_types_are_cast_by_the_plan(folder: Path) -> None:
    for how in ("bfloat16", torch.bfloat16):
        decoder = load(source_of(folder), dtype=how)
        want = load_file(folder / "model.safetensors")["model.norm.weight"].bfloat16()
        assert decoder.decoder.final_layernorm.weight.equal(want)
        assert {t.dtype for t in decoder.state_dict().values()} == {torch.bfloat16}
    with pytest.raises(UsageError, match="models cannot run in int8"):
        load(source_of(folder), dtype="int8")


def test_parameters_keep_their_marks(folder: Path) -> None:
    """What gradients need is written on parameters, which are other objects once loaded."""
    decoder = load(source_of(folder))
    weight: Any = decoder.get_parameter("decoder.layers.1.mlp.linear_fc2.weight")
    assert weight.tensor_model_parallel
    assert weight.partition_dim == 1


def test_one_layer_is_in_memory_at_a_time(folder: Path) -> None:
    decoder = load(source_of(folder), stream_layers=True)
    keeper = find_streamer(decoder)
    assert keeper is not None
    seen: list[set[str]] = []

    def look(*_: object) -> None:
        seen.append({n for n, p in decoder.named_parameters() if p.device.type != "meta"})

    for number in decoder.stage.layers:
        decoder.decoder.layers[str(number)].register_forward_hook(look)
    logits(decoder)
    assert len(seen) == 4
    for number, held in enumerate(seen):
        assert held == set(keeper.units[f"decoder.layers.{number}"])
    keeper.close()
    assert all(p.device.type == "meta" for p in decoder.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_comes_when_it_is_asked_for(tied: bool, tmp_path: Path) -> None:
    """Logits and losses of rows from elsewhere, before any pass and after one was broken off."""
    path = tiny_llama.save(tmp_path / "hf", dtype="float32", tie_word_embeddings=tied)
    whole, decoder = load(source_of(path)), load(source_of(path), stream_layers=True)
    x_TH = torch.randn(18, 32, generator=torch.Generator().manual_seed(3))
    found = decoder.logits(x_TH)
    assert found.equal(whole.logits(x_TH))
    assert not decoder.output_weight.is_meta
    frame = decoder.frame(Batch(tokens_BS=TOKENS))
    embedded = decoder.embed(Batch(tokens_BS=TOKENS), frame)  # the head is let go of
    assert embedded.equal(whole.embed(Batch(tokens_BS=TOKENS), frame))
    assert decoder.loss_of(x_TH, TOKENS)[0].equal(whole.loss_of(x_TH, TOKENS)[0])
    labels_T = TOKENS.flatten()
    decoder.embed(Batch(tokens_BS=TOKENS), frame)
    scores = [Forward(d).token_log_probs(x_TH, labels_T)[0] for d in (decoder, whole)]
    assert scores[0].equal(scores[1])


def test_a_decoder_without_weights_says_so(folder: Path) -> None:
    """torch multiplies by nothing without a word: the numbers are whatever memory held."""
    decoder = Decoder(load(source_of(folder), stream_layers=True).config)
    x_TH = torch.ones(18, 32)
    for call in (
        lambda: decoder.logits(x_TH),
        lambda: decoder.loss_of(x_TH, TOKENS),
        lambda: Forward(decoder).token_log_probs(x_TH, TOKENS.flatten()),
        lambda: decoder(Batch(tokens_BS=TOKENS)),
    ):
        with pytest.raises(UsageError, match="is not loaded yet"):
            call()
    assert decoder.logits(x_TH.to("meta")).shape == (18, 101), "shapes alone are fine"


def test_it_goes_on_after_a_failure(folder: Path, expected: Tensor) -> None:
    """A pass that ends in the middle leaves no layer behind, and the next one is right."""
    decoder = load(source_of(folder), stream_layers=True)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = decoder.decoder.layers["2"].mlp.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logits(decoder)
    hook.remove()
    torch.testing.assert_close(logits(decoder), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stream_layers", [False, True], ids=["whole", "on demand"])
def test_tied_embeddings(stream_layers: bool, tmp_path: Path) -> None:
    path = tiny_llama.save(tmp_path / "hf", dtype="float32", tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    decoder = load(source_of(path), stream_layers=stream_layers)
    with torch.no_grad():
        torch.testing.assert_close(logits(decoder), model(TOKENS).logits, rtol=1e-4, atol=1e-5)
    names = [n for n, _ in named_weights(decoder)]
    assert len(names) == len(set(names)) == len(decoder.state_dict())


FAMILIES = [
    *[("dense", c) for c in dense_cases.CASES if c.model.startswith(("Gemma3", "GPT2", "Phi3"))][
        :3
    ],
    *[("moe", c) for c in moe_cases.CASES if c[0] in ("deepseek_v3", "gpt_oss")][:2],
]


@pytest.mark.parametrize(("kind", "case"), FAMILIES, ids=lambda x: str(x)[:18])
def test_families(kind: str, case: Any, tmp_path: Path) -> None:
    (dense_cases if kind == "dense" else moe_cases).save(case, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    source = source_of(tmp_path)
    whole = load(source, dtype="float32")
    with torch.no_grad():
        torch.testing.assert_close(logits(whole), model(TOKENS).logits, rtol=1e-3, atol=1e-4)
    assert logits(load(source, dtype="float32", stream_layers=True)).equal(logits(whole))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_every_parameter_has_a_place_in_megatrons_registration(name: str, tmp_path: Path) -> None:
    """Buckets of optimizers follow that order: every name is one of Transformer Engine's."""
    if name == "llama":
        tiny_llama.save(tmp_path / "hf", attention_bias=True, mlp_bias=True)
    else:
        moe_cases.save(next(c for c in moe_cases.CASES if c[0] == name), tmp_path / "hf")
    decoder = load(source_of(tmp_path / "hf"), stream_layers=True)
    order = Order(fused_norms=True, grouped_experts=True)
    places = {order.position(n) for n, _ in decoder.named_parameters()}
    assert len(places) == len(list(decoder.parameters()))


def test_a_rank_of_a_layout_has_its_part(folder: Path) -> None:
    parallel = ParallelConfig(tp=2, pp=2)
    groups = ProcessGroups(
        parallel=parallel,
        rank=3,
        tp=Group(ranks=(2, 3), rank=1),
        pp=Group(ranks=(1, 3), rank=1),
        etp=Group(ranks=(2, 3), rank=1),
    )
    decoder = load(source_of(folder), groups=groups)
    assert decoder.stage.layers == (2, 3)
    assert decoder.embedding is None
    fc2 = load_file(folder / "model.safetensors")["model.layers.3.mlp.down_proj.weight"]
    assert decoder.get_parameter("decoder.layers.3.mlp.linear_fc2.weight").equal(fc2[:, 24:])
    assert decoder.output_layer.weight.shape == (128, 32)
    assert (decoder.output_layer.weight == 0).all()  # all 101 words are the other rank's


# ---- what is said


def refused(source: CheckpointSource, error: type[Exception], said: str, **how: Any) -> None:
    with pytest.raises(error, match=said):
        load(source, **how)


def test_a_layout_that_does_not_divide_the_model(folder: Path) -> None:
    groups = ProcessGroups(parallel=ParallelConfig(tp=3), tp=Group(ranks=(0, 1, 2)))
    with raises(LayoutError, "tp=3", "num_heads=4") as e:
        load(source_of(folder), groups=groups)
    assert e.value.hint == "sizes that do: 1, 2, 4"
    virtual = ProcessGroups(parallel=ParallelConfig(pp=2, vpp=2), pp=Group(ranks=(0, 1)))
    refused(source_of(folder), LayoutError, "vpp is 2", groups=virtual)


def test_what_is_no_decoder(folder: Path, tmp_path: Path) -> None:
    case = next(c for c in dense_cases.CASES if "Bert" in c.model)
    dense_cases.save(case, tmp_path / "bert")
    refused(
        source_of(tmp_path / "bert"), MappingError, "is an encoder, and only models of one stack"
    )
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    refused(source_of(bare), MappingError, "the model of these tensors is unknown")


def test_a_part_of_the_model(folder: Path) -> None:
    source = source_of(folder, tensors=TensorFilter(select=lambda name: "layers.2" not in name))
    refused(source, MappingError, "9 tensors of the model are not selected")


def test_a_configuration_of_another_model(folder: Path) -> None:
    decoder = load(source_of(folder))
    weights = loading.Weights(source_of(folder), vocab_multiple=128)
    shapes = dict(decoder.state_dict())
    loading.check_names(weights, shapes)
    norm = "decoder.final_layernorm.weight"
    for change, said in (
        ({norm: torch.empty(7)}, r"has shape \[32\], and of the model \[7\]"),
        ({"decoder.other": torch.empty(7)}, "the checkpoint does not hold"),
    ):
        with pytest.raises(MappingError, match=said):
            loading.check_names(weights, shapes | change)
    del shapes[norm]
    with raises(MappingError, "1 tensors"):
        loading.check_names(weights, shapes)


def test_memory_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda: 40_000)
    with raises(OutOfMemoryError, "153.1 KiB", "39.1 KiB", hint="--stream-layers") as e:
        load(source_of(folder))
    assert e.value.hint is not None
    assert "--dtype bfloat16" in e.value.hint
    with pytest.raises(OutOfMemoryError, match="at a time"):
        load(source_of(folder), stream_layers=True)
    load(source_of(folder), stream_layers=True, dtype="bfloat16")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, "--tp 2"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, "--tp 3"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, "--pp 2"),
    ],
)
def test_a_layout_that_is_hinted_at_divides_the_model(
    sizes: dict[str, int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda: 40_000)
    stored = source_of(tiny_llama.save(tmp_path / "hf", **sizes))
    with pytest.raises(OutOfMemoryError) as e:
        load(stored)
    assert f"torchrun, {said})" in str(e.value.hint)
    with pytest.raises(OutOfMemoryError) as e:
        load_for_training(stored)
    assert str(e.value.hint) == f"spread the model over more processes (torchrun, {said})"


@pytest.mark.parametrize("stream_layers", [False, True], ids=["whole", "on demand"])
def test_weights_that_are_no_numbers(stream_layers: bool, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][3, 5] = float("nan")
    tensors["model.layers.3.mlp.down_proj.weight"][0, 0] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    source = source_of(tmp_path)
    decoder = load(source, stream_layers=stream_layers)
    assert find_nan(decoder) == "decoder.layers.2.mlp.linear_fc2.weight"
    sound = load(source_of(folder), stream_layers=stream_layers)
    assert find_nan(sound) is None


def test_multi_token_prediction_is_skipped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = next(c for c in moe_cases.CASES if c[0] == "deepseek_v3")
    moe_cases.save(case, tmp_path)
    moe_cases.with_mtp(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with caplog.at_level("INFO"):
        decoder = load(source_of(tmp_path), dtype="float32")
    assert config["num_nextn_predict_layers"] == 2
    said = [r.message for r in caplog.records if "multi-token prediction are skipped" in r.message]
    assert len(said) == 1
    assert not any("mtp" in n for n in decoder.state_dict())


def test_progress_adds_up(folder: Path) -> None:
    done: list[tuple[str, int, int]] = []
    decoder = load(source_of(folder), progress=lambda *told: done.append(told))
    total = sum(t.nbytes for t in decoder.state_dict().values())
    assert {(stage, size) for stage, _, size in done} == {("load", total)}
    assert sum(n for _, n, _ in done) == total
    done.clear()
    weights = Weights(source_of(folder), progress=lambda *told: done.append(told))
    for name in weights.tensors:
        weights.load([name])
    assert {(stage, size) for stage, _, size in done} == {("load", weights.num_bytes())}
    assert sum(n for _, n, _ in done) == weights.num_bytes()


def test_streamed_layers_have_no_progress(folder: Path) -> None:
    """They are read in every pass, and there is no total."""
    done: list[tuple[str, int, int]] = []
    decoder = load(source_of(folder), stream_layers=True, progress=lambda *told: done.append(told))
    logits(decoder)
    keeper = find_streamer(decoder)
    assert keeper is not None
    keeper.close()
    assert done == []


def test_optimizer_state_is_left_alone(tmp_path: Path, folder: Path) -> None:
    """A training checkpoint opened with its state gives the same model."""
    tensors = load_file(folder / "model.safetensors")
    state = {f"optimizer.state.exp_avg.{n}": t for n, t in tensors.items()}
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_file(state, tmp_path / "optimizer.safetensors")
    opened = open_source(tmp_path)
    assert any(":" in n for n in opened.view.canonical)
    assert opened.model is not None
    source = opened
    assert logits(load(source)).equal(logits(load(source_of(folder))))


def test_a_layer_whose_thread_dies_or_cannot_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next layer is read in a thread: the pass ends with an error, and does not wait."""
    decoder = load(source_of(folder), stream_layers=True)
    keeper = find_streamer(decoder)
    assert keeper is not None
    with monkeypatch.context() as patch:
        kill_threads(patch, {1})
        with pytest.raises(MemoryError):
            logits(decoder)
    keeper.close()
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with raises(StorageError, "thread", hint="ulimit -u"):
            logits(decoder)
    keeper.close()
    assert torch.equal(logits(decoder), logits(load(source_of(folder))))
    keeper.close()
