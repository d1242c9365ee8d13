"""T5 against transformers' own models: an encoder, and a decoder that attends to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megtool import quantize, reshard, verify
from megtool.convert.dialects import read_side, write_side
from megtool.convert.families.detection import family
from megtool.convert.megatron.args import args_from_config, megatron_limits
from megtool.dtypes import dtype
from megtool.errors import LayoutError, MappingError
from megtool.export.gguf.architectures import find_architecture
from megtool.formats import open_checkpoint
from megtool.source.open import open_source
from megtool.tensors.sharded import GlobalTensor
from tests.support.errors import raises
from tests.support.folders import read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models import tiny_t5
from tests.support.models.dense_cases import fill_uniform
from tests.support.models.tiny_model import sizes_of, tiny_model

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 101,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
KEYS_OF_CROSS = "decoder.block.0.layer.1.EncDecAttention.k.weight"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "flan, more layers in the decoder": FLAN | {"num_decoder_layers": 3},
    "more layers in the encoder": {"num_layers": 3, "num_decoder_layers": 1},
    "mt5": {"family": "mt5"},
    "umt5": {"family": "umt5", "num_decoder_layers": 3},
}


def fill_untied(model: Any) -> None:
    tiny_t5.untie(model)
    fill_uniform(model)


def save(folder: Path, family: str = "t5", **keys: Any) -> Path:
    fill = fill_uniform if family == "t5" else fill_untied
    tiny_model(family, folder, sizes=SIZES, dtype="bfloat16", fill=fill, **keys)
    return folder


@pytest.fixture(scope="module")
def flan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("t5") / "hf", **CASES["flan, more layers in the decoder"])


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "keys",
    [pytest.param(keys, id=n, marks=SLOW if "family" in keys else ()) for n, keys in CASES.items()],
)
def test_weights_come_back_to_the_same_bytes(keys: dict[str, Any], tmp_path: Path) -> None:
    """Stacked and cut, as rank files, one key per layer, and under the first names again."""
    source = save(tmp_path / "hf", **keys)
    found = open_source(source)
    assert found.model is not None
    assert found.model.family is not None
    assert found.model.family.name == keys.get("family", "t5")
    assert {p.stored for p in found.view.placements.values()} == set(stored(source))
    at = source
    layouts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("torch_dist", {"tp": 2}),
        ("megatron", {"tp": 4}),
        ("dcp", {}),
        ("megatron", {"tp": 1}),
        ("hf", {}),
        ("torch_dist", {"tp": 4}),
        ("megatron", {"tp": 2, "pp": 2, "encoder_pp": 1}),
        ("torch_dist", {"tp": 1, "pp": 2, "encoder_pp": 1}),
        ("hf", {}),
    )
    for number, (to, layout) in enumerate(layouts):
        report = reshard(at, tmp_path / f"{number}", to=to, fsync=False, **layout)
        assert [d for d in report.dropped if d.is_lost] == []
        at = tmp_path / f"{number}"
        assert verify(source, at).verdict == "equal"
        if to == "hf":
            assert stored(at) == stored(source)
            assert read_config(at) == read_config(source)


@pytest.mark.parametrize("name", [pytest.param("t5", marks=SLOW), "mt5"])
def test_an_output_layer_that_repeats_the_embedding_is_tied(name: str, tmp_path: Path) -> None:
    """What config.json says is believed unless the two differ: then both matrices stay."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "hf"
    tiny_model(name, folder, sizes=SIZES)
    file = folder / "model.safetensors"
    for is_copy in (True, False):
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["shared.weight"] + float(not is_copy)
        save_file(tensors, file, metadata={"format": "pt"})
        config = open_source(folder).view.config
        assert config is not None
        assert config.embedding.tied_embeddings is is_copy
        report = reshard(folder, tmp_path / f"{is_copy}", to="torch_dist", fsync=False)
        assert not [d for d in report.dropped if d.is_lost]
        reshard(tmp_path / f"{is_copy}", tmp_path / f"{is_copy}-hf", to="hf", fsync=False)
        assert ("lm_head.weight" in stored(tmp_path / f"{is_copy}-hf")) is not is_copy
        theirs = [
            transformers.AutoModelForSeq2SeqLM.from_pretrained(at).eval()
            for at in (folder, tmp_path / f"{is_copy}-hf")
        ]
        tokens = torch.arange(14).view(2, 7)
        with torch.no_grad():
            logits = [m(input_ids=tokens, decoder_input_ids=tokens).logits for m in theirs]
        assert torch.equal(*logits)


def test_published_files_of_mt5_have_few_keys() -> None:
    """Those of google/mt5-small: sizes, an output layer of its own, and none that has a default."""
    config = family("mt5").read_config(
        {
            "d_ff": 1024,
            "d_kv": 64,
            "d_model": 512,
            "feed_forward_proj": "gated-gelu",
            "num_decoder_layers": 8,
            "num_heads": 6,
            "num_layers": 8,
            "relative_attention_num_buckets": 32,
            "tie_word_embeddings": False,
            "vocab_size": 250112,
        }
    )
    assert (config.mlp.activation, config.mlp.gated) == ("gelu_new", True)
    assert config.head.logit_scale == 1.0
    assert not config.embedding.tied_embeddings
    assert config == family("mt5").read_config({"tie_word_embeddings": False})
    of_umt5 = family("umt5").read_config({})
    assert of_umt5.positions.relative_per_layer
    assert of_umt5.head.logit_scale == 512**-0.5
    assert family("umt5").read_config({"tie_word_embeddings": False}).head.logit_scale == 1.0
    assert "one table of relative positions" in " ".join(megatron_limits(of_umt5, family("umt5")))


def test_names_and_cuts_are_those_of_megatrons_t5(flan: Path, tmp_path: Path) -> None:
    reshard(flan, tmp_path / "two", to="torch_dist", tp=2, fsync=False)
    held = open_checkpoint(tmp_path / "two")
    shapes = {t.name: t.shape for t in held.tensors}
    pieces = {
        t.name: held.shards.boxes.shape[held.shards.of(i)] for i, t in enumerate(held.tensors)
    }
    assert shapes["encoder.layers.self_attention.linear_qkv.weight"] == (2, 96, 32)
    assert shapes["decoder.layers.cross_attention.linear_kv.weight"] == (3, 64, 32)
    assert pieces["decoder.layers.cross_attention.linear_kv.weight"][0].tolist() == [1, 32, 32]
    assert pieces["decoder.layers.cross_attention.linear_q.weight"][0].tolist() == [1, 16, 32]
    assert pieces["decoder.layers.mlp.linear_fc1.weight"][0].tolist() == [1, 24, 32]
    bias = "{}_relative_pos_emb.relative_attention_bias.weight"
    for part in ("encoder", "decoder"):
        assert shapes[bias.format(part)] == (8, 4)
        assert pieces[bias.format(part)].tolist() == [[8, 4, 1]]


def test_args_say_both_numbers_of_layers(flan: Path) -> None:
    config = open_source(flan).view.config
    assert config is not None
    args = args_from_config(config)
    assert (args["encoder_num_layers"], args["decoder_num_layers"]) == (2, 3)
    assert args["position_embedding_type"] == "relative"
    assert args["relative_attention_num_buckets"] == 8
    said = " ".join(megatron_limits(config, family("t5")))
    assert "the root of a head's size" in said
    assert "--dist-ckpt-strictness" in said


def test_a_bias_of_megatrons_logits_is_kept_but_for_hugging_face(flan: Path) -> None:
    """Megatron has it under two names."""
    config = open_source(flan).view.config
    assert config is not None
    there = write_side(open_source(flan).view, dialect="megatron", per_layer=False).tensors
    bias = GlobalTensor(name="output_layer.bias", shape=(128,), dtype=dtype("bfloat16"))
    both = [*there, bias, replace(bias, name="lm_head.output_layer.bias")]
    side = read_side(both, family=family("t5"), config=config)
    assert side.config is not None
    assert side.config.head.head_bias
    assert side.canonical["head.bias"].shape == (101,)
    again = write_side(side, dialect="megatron", per_layer=True).tensors
    assert "output_layer.bias" in {t.name for t in again}
    with raises(MappingError, "head.bias"):
        write_side(side, dialect="hf")


@pytest.mark.parametrize(
    ("said", "gated", "activation"),
    [
        ("relu", False, "relu"),
        ("gated-gelu", True, "gelu_new"),
        ("gated-silu", True, "silu"),
        ("gelu", False, "gelu"),
    ],
)
def test_one_key_names_the_activation_and_the_gate(said: str, gated: bool, activation: str) -> None:
    config = family("t5").read_config(SIZES | {"feed_forward_proj": said})
    assert (config.mlp.gated, config.mlp.activation) == (gated, activation)
    assert family("t5").write_config(config)["feed_forward_proj"] == said


@pytest.mark.parametrize("name", ["t5", "bert", "roberta"])
def test_a_gguf_file_is_for_decoders(name: str) -> None:
    sizes = SIZES if name == "t5" else sizes_of(name)
    config = family(name).read_config(sizes)
    with raises(MappingError, "which has an encoder", hint="convert_hf_to_gguf.py"):
        find_architecture(family(name), config)


def test_what_cannot_be_is_refused(flan: Path, tmp_path: Path) -> None:
    for said in ("tanh", "gated-tanh", "half-gelu"):
        with raises(MappingError, f"feed_forward_proj={said!r}", "'gated-'"):
            family("t5").read_config(SIZES | {"feed_forward_proj": said})
    with raises(MappingError, "num_layers is 2", hint="at most 10,000 layers"):
        family("t5").read_config(SIZES | {"num_decoder_layers": 10**9})
    with raises(LayoutError, "encoder_pp does not say how many", hint="--encoder-pp 1"):
        reshard(flan, tmp_path / "out", to="torch_dist", pp=2)
    with raises(LayoutError, "do not divide num_decoder_layers=3", hint="1, 3"):
        reshard(flan, tmp_path / "out", to="torch_dist", pp=4, encoder_pp=2)
    with raises(LayoutError, "tp=3"):
        reshard(flan, tmp_path / "out", to="torch_dist", tp=3)
    with raises(MappingError, "t5 is a model of an encoder and a decoder", hint="decoders"):
        quantize(flan, tmp_path / "out", recipe="int8_weight_only")
    config = open_source(flan).view.config
    with raises(MappingError, "1 tensor is missing", "decoder.0.cross.k.weight"):
        some = [t for t in open_source(flan).catalogue.tensors if t.name != KEYS_OF_CROSS]
        read_side(some, family=family("t5"), config=config)
