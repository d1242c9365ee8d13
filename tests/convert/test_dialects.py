"""Whole sides: experts, optimizer state, identity, other spellings, and refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megtool.convert.dialects import DialectNaming, detect_dialect, read_side, write_side
from megtool.convert.families.detection import family
from megtool.convert.megatron.args import args_from_config, config_from_args, megatron_limits
from megtool.convert.megatron.names import split_optimizer
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.canonical_views import BF16, F32, canonical_side, config, stored
from tests.support.errors import raises

Carry = Callable[..., dict[str, np.ndarray]]


MODELS = [
    config(),
    config(
        gated=False,
        activation="gelu",
        mlp_bias=True,
        attn_out_bias=True,
        qkv_bias=True,
        norm="layernorm",
    ),
    config(qk_norm=True, attn_output_gate=True, tied_embeddings=True),
    config(num_experts=3, moe_ffn_hidden_size=6, shared_ffn_hidden_size=4),
    config(num_layers=3, num_experts=3, moe_ffn_hidden_size=6, moe_layer_freq=(0, 1, 1)),
    config(
        num_layers=4,
        num_experts=2,
        moe_ffn_hidden_size=6,
        moe_layer_freq=2,
        gated=False,
        activation="gelu",
    ),
]


@pytest.mark.parametrize("per_layer", [None, True])
@pytest.mark.parametrize("cfg", MODELS, ids=range(len(MODELS)))
def test_megatron_holds_every_canonical_tensor(
    cfg: ModelConfig, per_layer: bool | None, carry: Carry
) -> None:
    source, arrays = canonical_side(cfg, ("", "exp_avg", "main"))
    made = write_side(
        source,
        dialect="megatron",
        parallel=ParallelConfig(tp=2),
        per_layer=per_layer,
        options=DialectNaming(main="param"),
    )
    assert set(made.placements) == set(arrays)
    out = carry(source, arrays, made)
    names = {t.name for t in made.tensors}
    assert "optimizer.state.param.decoder.final_layernorm.weight" in names
    args = args_from_config(cfg, ParallelConfig(tp=2))
    back = read_side(stored(out), config=config_from_args(args))
    assert back.states == {"exp_avg": "exp_avg", "main": "param"}
    assert back.config == cfg
    assert {n: t.shape for n, t in back.canonical.items()} == {
        n: a.shape for n, a in arrays.items()
    }
    again = carry(back, out, write_side(back, dialect="megatron", per_layer=True))
    final = read_side(stored(again), config=cfg)
    for name, p in final.placements.items():
        q = final.placements[name]
        assert p.canonical == name
        value = gather(again[q.stored], q)
        assert (value.reshape(arrays[name].shape) == arrays[name]).all()


def gather(array: np.ndarray, p: Placement) -> np.ndarray:
    out = np.empty(p.shape, array.dtype)
    for at in np.ndindex(*p.shape):
        index = list(p.base)
        for i, d, m in zip(at, p.dims, p.mults, strict=True):
            index[d] += i * m
        out[at] = array[tuple(index)]
    return out


def test_experts_are_stacked_gate_then_up(carry: Carry) -> None:
    source, arrays = canonical_side(MODELS[3])
    out = carry(source, arrays, write_side(source, dialect="megatron"))
    fc1 = out["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert fc1.shape == (2, 3, 12, 8)
    one = [arrays[f"layers.1.mlp.experts.2.{n}.weight"] for n in ("gate", "up")]
    assert (fc1[1, 2] == np.concatenate(one)).all()
    assert "decoder.layers.pre_mlp_layernorm.weight" in out


def test_other_spellings_are_read(carry: Carry) -> None:
    source, arrays = canonical_side(config())
    out = carry(source, arrays, write_side(source, dialect="megatron"))
    local = {
        "module."
        + n.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
        .replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        .replace("final_layernorm", "final_norm"): a
        for n, a in out.items()
    }
    side = read_side(stored(local), config=config())
    assert side.dialect == "megatron"
    again = carry(side, local, write_side(side, dialect="megatron"))
    assert all((again[n] == a).all() for n, a in out.items())
    assert again.keys() == out.keys()


def test_state_is_no_part_of_hugging_face_and_buckets_are_reported() -> None:
    source, arrays = canonical_side(config(), ("", "exp_avg"))
    made = write_side(source, dialect="hf", family=family("llama"), dtype=BF16)
    assert {t.dtype for t in made.tensors} == {BF16}
    assert len(made.dropped) == len(arrays) // 2
    assert made.dropped[0][0] == "exp_avg:embed.weight"
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.param"
    there = write_side(source, dialect="megatron", dtype=BF16)
    kinds = {t.name.startswith("optimizer."): t.dtype for t in there.tensors}
    assert kinds == {False: BF16, True: F32}
    read = [*there.tensors, GlobalTensor(name=bucket, shape=(7,), dtype=F32)]
    side = read_side(read, config=config())
    assert [name for name, _ in side.dropped] == [bucket]


def test_identity_keeps_names_and_pads_the_vocabulary_again(carry: Carry) -> None:
    source, arrays = canonical_side(config(vocab_size=130), ("", "exp_avg"))
    two = write_side(source, dialect="megatron", parallel=ParallelConfig(tp=2))
    out = carry(source, arrays, two)
    strange = {**out, "decoder.layers.something.new": np.ones((2, 4), np.float32)}
    side = read_side(stored(strange), dialect="identity", config=config(vocab_size=130))
    made = write_side(side, dialect="identity", parallel=ParallelConfig(), dtype=BF16)
    assert made.shards is not None
    shapes = {t.name: t for t in made.tensors}
    assert shapes["embedding.word_embeddings.weight"].shape == (256, 8)
    assert shapes["embedding.word_embeddings.weight"].dtype == BF16
    assert shapes["optimizer.state.exp_avg.output_layer.weight"].dtype == F32
    again = carry(side, strange, made)
    one = carry(source, arrays, write_side(source, dialect="megatron"))
    assert all((again[n] == a).all() for n, a in one.items())
    # Without a configuration, what is stored counts as real, and grows only if it must.
    blind = read_side(stored(strange))
    assert blind.dialect == "identity"
    grown = write_side(blind, dialect="identity", parallel=ParallelConfig(pp=2))
    assert {t.name: t.shape for t in grown.tensors} == {n: a.shape for n, a in strange.items()}
    assert grown.fills == []


def test_refusals() -> None:
    source, _ = canonical_side(MODELS[4])
    with pytest.raises(MappingError, match="cannot be stacked"):
        write_side(source, dialect="megatron", per_layer=False)
    with pytest.raises(MappingError, match=r"no place in 'hf'.*router"):
        write_side(source, dialect="hf", family=family("llama"))
    with pytest.raises(MappingError, match="'gguf' cannot be written"):
        write_side(source, dialect="gguf", family=family("llama"))
    blind = read_side([GlobalTensor(name="w", shape=(2,), dtype=F32)])
    with pytest.raises(MappingError, match="read as 'identity'"):
        write_side(blind, dialect="hf", family=family("llama"))
    with raises(MappingError, id="no-model-config"):
        read_side([], dialect="megatron")
    with raises(MappingError, "need a family", hint="family=, like= in Python"):
        read_side(blind.tensors, dialect="hf", config=config())


def test_dialects_are_told_by_names() -> None:
    assert detect_dialect(["module.decoder.layers.mlp.linear_fc1.weight"]) == "megatron"
    assert (
        detect_dialect(["optimizer.state.exp_avg.embedding.word_embeddings.weight"]) == "megatron"
    )
    assert detect_dialect(["token_embd.weight", "blk.0.attn_q.weight"]) == "gguf"
    assert detect_dialect(["model.layers.0.self_attn.q_proj.weight"]) == "hf"


def test_args_say_what_megatron_cannot_run() -> None:
    assert megatron_limits(config()) == []
    odd = config(attn_out_bias=True, qkv_bias=True, rope_scaling={"rope_type": "longrope"})
    assert len(megatron_limits(odd)) == 2
    kept = args_from_config(config(), ParallelConfig(tp=4), base_args={"seed": 7, "world_size": 99})
    assert (kept["seed"], kept["world_size"], kept["padded_vocab_size"]) == (7, 4, 512)
    with pytest.raises(MappingError, match="lack 'num_layers'"):
        config_from_args({"num_attention_heads": 4, "hidden_size": 8})


@pytest.mark.parametrize("wrapper", ["", "model.", "module."])
@pytest.mark.parametrize(
    "spelling", ["optimizer.state.{state}.{name}", "optimizer.state.{name}.{state}"]
)
def test_state_beside_hugging_face_names(wrapper: str, spelling: str) -> None:
    cfg, llama = config(), family("llama")
    side, _ = canonical_side(cfg, ("", "exp_avg", "exp_avg_sq"))
    made = write_side(
        side, dialect="hf", family=llama, config=cfg, options=DialectNaming(state_names=spelling)
    )
    assert {p.stored for n, p in made.placements.items() if n == "exp_avg:norm.weight"} == {
        spelling.format(state="exp_avg", name="model.norm.weight")
    }
    wrapped = [
        t
        if t.name.startswith("optimizer.")
        else GlobalTensor(name=wrapper + t.name, shape=t.shape, dtype=t.dtype)
        for t in made.tensors
    ]
    step = GlobalTensor(name="optimizer.state.model.norm.weight.step", shape=(), dtype=F32)
    again = read_side([*wrapped, step], dialect="hf", family=llama, config=cfg)
    assert again.canonical.keys() == side.canonical.keys()
    assert [name for name, _ in again.dropped] == [step.name]
    without = write_side(again, dialect="hf", family=llama, config=cfg)
    assert {n.partition(":")[0] for n, _ in without.dropped} == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("name", "state", "weight"),
    [
        ("optimizer.state.exp_avg.a.b.weight", "exp_avg", "a.b.weight"),
        ("optimizer.state.a.b.weight.exp_avg", "exp_avg", "a.b.weight"),
        ("optim.state.a.b.weight.step", "step", "a.b.weight"),
        ("optimizer.state.param.a.weight", "main", "a.weight"),
        ("optimizer.state.fp32_param.a.weight", "main", "a.weight"),
        ("optimizer.state.a.weight.param", "main", "a.weight"),
        ("optimizer.state.a.weight.fp32_param", "main", "a.weight"),
        ("optimizer.state.a.weight.master_param", "main", "a.weight"),
        ("optimizer.state.exp_avg.a.param", "exp_avg", "a.param"),
        ("optimizer.state.param.a.param", "main", "a.param"),
        ("a.b.param", "", "a.b.param"),
    ],
)
def test_states_are_told_from_weights(name: str, state: str, weight: str) -> None:
    """The state stands before the weight's name or behind it, and a weight may be a `param`."""
    found, _, key = split_optimizer(name)
    assert (found, key) == (state, weight)


def test_incomplete_state_is_named() -> None:
    source, _ = canonical_side(config(), ("", "exp_avg"))
    del source.canonical["exp_avg:layers.1.mlp.up.weight"]
    with raises(
        MappingError,
        "'exp_avg'",
        tensor="exp_avg:layers.1.mlp.up.weight",
        hint="--optimizer-format none",
    ):
        write_side(source, dialect="megatron")
