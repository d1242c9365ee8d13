"""Dense families against transformers' own models, through the whole engine and back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool import reshard, verify
from megtool.convert.dialects import read_side, write_side
from megtool.convert.families.detection import detect_family, family
from megtool.convert.megatron.args import args_from_config, config_from_args, megatron_limits
from megtool.dtypes import dtype
from megtool.errors import LayoutError, MappingError
from megtool.options.layout import ParallelConfig
from megtool.source.open import open_source
from megtool.spec import layer_sets
from megtool.tensors.sharded import GlobalTensor
from tests.support.errors import raises
from tests.support.folders import read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models.dense_cases import CASES, MORE, WINDOWED, save
from tests.support.models.openelm_model import LAYERS
from tests.support.models.tiny_model import SIZES, TIED, UNTIED, Case, sizes_of

transformers = pytest.importorskip("transformers")


# In the others further keys follow the number of layers or heads (in Helium the width does).
BOUND = {"linear_num_key_heads", "num_kv_shared_layers"}
OF_ANY_SIZE = [c for c in CASES if not BOUND & {*c.keys} and c.family != "helium"]

SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in MORE]
cases = pytest.mark.parametrize("case", [*CASES, *SLOW], ids=str)


@cases
def test_weights_come_back_to_the_same_bytes(case: Case, tmp_path: Path) -> None:
    save(case, tmp_path / "hf")
    before = stored(tmp_path / "hf")
    opened = open_source(tmp_path / "hf")
    assert opened.model is not None
    assert opened.model.family is not None
    assert opened.model.family.name == case.family
    for unused, _ in opened.view.dropped:
        assert (case.model, unused) in (
            ("MegatronBertForMaskedLM", "cls.predictions.bias"),
            ("RobertaForMaskedLM", "lm_head.bias"),
            ("BertForMaskedLM", "cls.predictions.bias"),
        )
        before.pop(unused)
    assert {p.stored for p in opened.view.placements.values()} == set(before)

    there = reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, pp=2, fsync=False)
    assert [d for d in there.dropped if d.is_lost] == []
    again = reshard(tmp_path / "meg", tmp_path / "meg1", to="megatron", tp=1, pp=1, fsync=False)
    assert [d for d in again.dropped if d.is_lost] == []
    back = reshard(tmp_path / "meg1", tmp_path / "back", to="hf", fsync=False)
    assert [d for d in back.dropped if d.is_lost] == []
    assert stored(tmp_path / "back") == before
    assert read_config(tmp_path / "back") == read_config(tmp_path / "hf")


@given(
    case=st.sampled_from(OF_ANY_SIZE),
    tp=st.sampled_from((1, 2, 4)),
    per_layer=st.booleans(),
    layers=st.integers(1, 3),
    heads=st.sampled_from((4, 8)),
    vocabulary=st.integers(1, 300),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_size_and_layout_comes_back(
    carry: Callable[..., dict[str, np.ndarray]],
    case: Case,
    tp: int,
    per_layer: bool,
    layers: int,
    heads: int,
    vocabulary: int,
) -> None:
    names = ("n_layer", "n_head") if case.family == "gpt2" else ("num_hidden_layers",)
    names = names if case.family == "gpt2" else (*names, "num_attention_heads")
    least = (case.keys.get("pad_token_id") or 0) + 1
    sizes = {names[0]: layers, names[1]: heads, "vocab_size": max(vocabulary, least)}
    lists = ("layer_types", "block_configs")
    keys = {k: [v[0]] * layers if k in lists else v for k, v in case.keys.items()}
    case = replace(case, keys=keys | sizes)
    with TemporaryDirectory() as folder:
        save(case, Path(folder))
        found, keys = family(case.family), read_config(Path(folder))
        arrays = {
            name: np.frombuffer(data, np.uint16).reshape(shape)
            for name, (_, shape, data) in stored(Path(folder)).items()
        }
    held = [GlobalTensor(name=n, shape=a.shape, dtype=dtype("bfloat16")) for n, a in arrays.items()]
    config = found.read_config(keys)
    per_layer = per_layer or not layer_sets.is_homogeneous(config)
    side = read_side(held, family=found, config=config)
    for unused, _ in side.dropped:
        arrays.pop(unused)
    assert side.config is not None
    per_layer = per_layer or not layer_sets.is_homogeneous(side.config)
    there = write_side(
        side, dialect="megatron", parallel=ParallelConfig(tp=tp), per_layer=per_layer
    )
    middle = carry(side, arrays, there)
    back = read_side(there.tensors, family=found, config=side.config)
    again = carry(back, middle, write_side(back, dialect="hf"))
    assert again.keys() == arrays.keys()
    assert all((again[n] == a).all() for n, a in arrays.items())


@cases
def test_args_say_what_the_configuration_does(case: Case, tmp_path: Path) -> None:
    """Megatron's tensors fit the configuration that their args alone give."""
    save(case, tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    config = open_source(tmp_path / "hf").view.config
    assert config is not None
    kind = family(case.family)
    args = args_from_config(config, ParallelConfig(tp=2))
    if kind.traits.get("bidirectional"):  # which no arg says: a reader has it from the family
        args["bidirectional"] = True
    said = config_from_args(args)
    for name in SHAPES:
        assert said.get(name) == config.get(name), name
    shares = config.norms.shared_norm and "shared_norm" not in kind.traits
    if (config.mlp.mlp_bias and not config.attention.qkv_bias) or shares:
        return  # Megatron has no word for that, and a warning says so
    meg = open_source(tmp_path / "meg")
    said_all, _ = kind.completed(said.with_fields(extra=config.extra))
    side = read_side(meg.catalogue.tensors, family=kind, config=said_all, dialect="megatron")
    assert side.canonical == meg.view.canonical


SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
    "tied_embeddings",
    "norm",
    "norm_eps",
    "zero_centered_norm",
    "gated",
    "qk_norm",
    "position_embedding",
    "rotary_percent",
    "rope_base",
    "window_size",
    "window_skip_freq",
    "no_rope_layers",
    "num_token_types",
)


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=str)
def test_a_configuration_is_written_as_transformers_reads_it(case: Case) -> None:
    original = case.config().to_dict()
    found = detect_family({"architectures": [case.model]})
    config = found.read_config(original)
    written = found.write_config(config)
    read = type(case.config())(**written).to_dict()
    assert {k: read[k] for k in original} == original
    assert found.read_config(written) == config


def test_what_is_written_loads_in_transformers(tmp_path: Path) -> None:
    """One of each kind of layout: the model is whole, and computes the same."""
    for number, case in enumerate(CASES):
        if number and CASES[number - 1].family == case.family:
            continue
        folder = tmp_path / f"{number}"
        kind = type(save(case, folder / "hf"))
        reshard(folder / "hf", folder / "meg", to="torch_dist", tp=2, fsync=False)
        reshard(folder / "meg", folder / "back", to="hf", fsync=False)
        model = kind.from_pretrained(folder / "hf")
        theirs, info = kind.from_pretrained(folder / "back", output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        tokens = torch.arange(12).reshape(1, 12)
        with torch.no_grad():
            ours, want = theirs.eval()(tokens)[0], model.eval()(tokens)[0]
        assert torch.equal(ours, want), case


WINDOWS = [
    ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, (0, None)),
    ("qwen2", WINDOWED | {"max_window_layers": 4}, (16, (0, 0, 0, 0, 1, 1))),
    ("qwen2", WINDOWED | {"max_window_layers": 0}, (16, None)),
    ("gemma2", {"sliding_window": 16}, (16, 2)),
    ("gemma3", {"sliding_window": 16}, (16, 6)),
    ("gemma3", {"sliding_window": 16, "sliding_window_pattern": 3}, (16, 3)),
    ("phi3", {"sliding_window": 16}, (16, None)),
    ("phi3", {"sliding_window": None}, (0, None)),
    ("llama", {"layer_types": ["full_attention"] * 6, "sliding_window": 16}, (0, None)),
    ("cwm", {"sliding_window": 16}, (16, (0, 1, 1, 1, 0, 1))),
]


@pytest.mark.parametrize(("name", "keys", "want"), WINDOWS)
def test_windows_are_read_as_megatron_counts_them(
    name: str, keys: dict[str, Any], want: tuple[int, Any]
) -> None:
    """Older configurations, which have no `layer_types`, among them."""
    stored = SIZES | {"num_hidden_layers": 6} | keys
    config = family(name).read_config(stored)
    assert (config.window.window_size, config.window.window_skip_freq) == want
    args = args_from_config(config)
    assert args["window_size"] == ((want[0] - 1, 0) if want[0] else None)
    assert config_from_args(args).window.window_skip_freq == want[1]
    written = family(name).write_config(config)
    assert {k: written[k] for k in keys} == keys


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({}, (0, 0, 0, 1, 0, 0)),
        ({"no_rope_layer_interval": 3}, (0, 0, 1, 0, 0, 1)),
        ({"no_rope_layers": [1, 1, 1, 1, 1, 1]}, None),
        ({"no_rope_layers": [0, 1, 1, 1, 1, 1]}, (1, 0, 0, 0, 0, 0)),
    ],
)
def test_layers_without_rotary_embedding(keys: dict[str, Any], want: Any) -> None:
    config = family("smollm3").read_config(SIZES | {"num_hidden_layers": 6} | keys)
    assert config.positions.no_rope_layers == want
    assert config_from_args(args_from_config(config)).positions.no_rope_layers == want
    assert config_from_args(
        args_from_config(config) | {"no_rope_freq": 3}
    ).positions.no_rope_layers == ((0, 0, 1, 0, 0, 1))


FULL = {"layer_types": ["full_attention"] * 6}


@pytest.mark.parametrize(
    ("name", "keys", "want"),
    [
        ("cohere2", {}, (0, 0, 0, 1, 0, 0)),
        ("cohere2", {"sliding_window_pattern": 3}, (0, 0, 1, 0, 0, 1)),
        ("cohere2", FULL, (1,) * 6),
        ("exaone4", {}, (0, 0, 0, 1, 0, 0)),
        ("exaone4", FULL, (1,) * 6),
        ("exaone4", FULL | {"sliding_window": None}, None),
    ],
)
def test_layers_without_a_window_have_no_rotary_embedding(
    name: str, keys: dict[str, Any], want: Any
) -> None:
    """Also where Megatron's args alone say which."""
    config = family(name).read_config(SIZES | {"num_hidden_layers": 6} | keys)
    assert config.positions.no_rope_layers == want
    said, _ = family(name).completed(config_from_args(args_from_config(config)))
    assert said.positions.no_rope_layers == want
    assert (
        family(name).read_config(family(name).write_config(said)).positions.no_rope_layers == want
    )
    with raises(MappingError, "no_rope_layers", "without a window"):
        family(name).write_config(config.with_fields(no_rope_layers=(0, 1, 0, 0, 0, 0)))


@pytest.mark.parametrize(
    ("factors", "widths"),
    [(1.0, (32, 32, 32, 32)), ([1.0, 4.0], (32, 64, 96, 128)), ([2, 1, 1, 3], (64, 32, 32, 96))],
)
def test_factors_of_the_first_and_the_last_layer_stand_for_all(factors: Any, widths: Any) -> None:
    """Published code fills the list in; a wider model's are written as a list."""
    heads = {"num_query_heads": [4] * 4, "num_kv_heads": [2] * 4, "num_transformer_layers": 4}
    stored = SIZES | OPENELM | heads | {"ffn_multipliers": factors}
    config = family("openelm").read_config(stored)
    assert config.layer_sizes is not None
    assert config.layer_sizes["ffn_hidden_size"] == widths
    assert family("openelm").write_config(config)["ffn_multipliers"] == factors
    written = family("openelm").write_config(config.with_fields(extra={}))
    assert written["ffn_multipliers"] == [w / 32 for w in widths]
    assert family("openelm").read_config(written).layer_sizes == config.layer_sizes


def test_a_base_for_layers_with_a_window_is_written_for_old_and_new_readers() -> None:
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = family("olmo3").read_config(SIZES | {"rope_parameters": kinds})
    assert (config.positions.rope_base, config.positions.rope_local_base) == (5e5, 2e4)
    written = family("olmo3").write_config(config)
    assert written["rope_parameters"] == kinds
    assert (written["rope_theta"], written["rope_scaling"]["factor"]) == (5e5, 2.0)


def test_what_a_norm_of_queries_covers_is_checked() -> None:
    config = family("olmo2").read_config(SIZES)
    with raises(MappingError, "qk_norm_of is 'some'", "head, each, all"):
        config.with_fields(qk_norm_of="some")


def test_older_gemma3_keys() -> None:
    old = SIZES | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = family("gemma3").read_config(old)
    assert (config.positions.rope_base, config.positions.rope_local_base) == (1e6, 2e4)
    written = family("gemma3").write_config(config)
    assert {k: written[k] for k in old} == old
    assert any("one rotary base" in text for text in megatron_limits(config))


def test_published_gpt2_names_lack_the_prefix(tmp_path: Path) -> None:
    """The checkpoints of the hub hold the bare model, and causal masks beside it."""
    from safetensors.torch import load_file, save_file

    save(Case("gpt2", TIED), tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    held = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    held["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(held, file)
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    report = reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    assert [d for d in report.dropped if d.is_lost] == []
    new = load_file(tmp_path / "back" / "model.safetensors")
    assert {k.removeprefix("transformer.") for k in new} == set(held) - {"h.0.attn.bias"}
    assert all(torch.equal(v, held[k.removeprefix("transformer.")]) for k, v in new.items())


GGUF = [
    ("QWEN2", Case("qwen2", UNTIED)),
    ("QWEN3", Case("qwen3", UNTIED | {"head_dim": 16})),
    ("PHI3", Case("phi3", UNTIED)),
    ("PHI3", Case("phi3", TIED | {"sliding_window": 16, "num_key_value_heads": 4})),
]


@pytest.mark.parametrize(("arch", "case"), GGUF, ids=str)
def test_gguf_files_hold_the_same_tensors(arch: str, case: Case, tmp_path: Path) -> None:
    """A file made of transformers' tensors, under the names the gguf package gives them."""
    gguf = pytest.importorskip("gguf")
    model = save(case, tmp_path / "hf").float()
    c = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], c.num_hidden_layers)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[arch]])
    writer.add_block_count(c.num_hidden_layers)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    if getattr(c, "head_dim", None):
        writer.add_key_length(c.head_dim)
    if case.keys.get("sliding_window"):
        writer.add_sliding_window(c.sliding_window)
    held = stored(tmp_path / "hf")
    for name, tensor in model.state_dict().items():
        if name in held:
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    report = reshard(
        tmp_path / "model.gguf", tmp_path / "out", to="hf", dtype="bfloat16", fsync=False
    )
    assert report.family == case.family
    assert stored(tmp_path / "out") == held
    written = read_config(tmp_path / "out")
    found = family(case.family)
    want, got = found.read_config(read_config(tmp_path / "hf")), found.read_config(written)
    assert all(got.get(name) == want.get(name) for name in SHAPES)


def test_gemma_files_are_refused_by_name() -> None:
    found = detect_family({"general.architecture": "gemma2"})
    some = [GlobalTensor(name="token_embd.weight", shape=(101, 32), dtype=dtype("float32"))]
    with raises(MappingError, "'gemma2'", "'gguf'"):
        read_side(some, dialect="gguf", family=found, config=found.read_config(SIZES))


def test_older_names_of_berts_norms_are_read(tmp_path: Path) -> None:
    """Files of the first releases call a norm's weight and bias gamma and beta."""
    from safetensors.torch import load_file, save_file

    save(Case("bert_post_norm", TIED, model_class="BertForPreTraining"), tmp_path / "hf")
    want, file = stored(tmp_path / "hf"), tmp_path / "hf" / "model.safetensors"
    new = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    held = load_file(file)
    for now, before in new:
        held = {n.replace(now, before): t for n, t in held.items()}
    save_file(held, file)
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, fsync=False)
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    assert stored(tmp_path / "back") == want
    assert "cls.seq_relationship.weight" in want


OPENELM = LAYERS | {"num_transformer_layers": 2, "model_dim": 32}
FALCON = {"mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_state": 8}


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("qwen2", {"hidden_act": "laplace"}, "hidden_act='laplace'"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types is"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": {},
                    "sliding_attention": {"rope_type": "linear"},
                }
            },
            "layers with a window",
        ),
        ("qwen2", WINDOWED | {"num_hidden_layers": 10**12}, "num_layers is 1000000000000"),
        ("smollm3", {"no_rope_layers": [1, 2]}, r"no_rope_layers is \[1, 2\]"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
            "whole heads",
        ),
        ("nemotron", {"hidden_act": "laplace"}, "hidden_act='laplace'"),
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types is"),
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bamba", {"attn_layer_indices": [2]}, r"attn_layer_indices is \[2\]"),
        ("bamba", {"attn_layer_indices": "all"}, "attn_layer_indices is all"),
        ("bamba", {"mamba_n_heads": 7}, "mamba_n_heads is 7"),
        ("openelm", OPENELM | {"num_query_heads": [4]}, r"num_query_heads is \[4\]"),
        ("openelm", OPENELM | {"num_kv_heads": [2, 0]}, r"num_kv_heads is \[2, 0\]"),
        ("openelm", OPENELM | {"ffn_multipliers": [1.0, "2"]}, "ffn_multipliers is"),
        ("openelm", OPENELM | {"ffn_dim_divisor": 0}, "ffn_dim_divisor is 0"),
        ("openelm", OPENELM | {"ffn_with_glu": False}, "ffn_with_glu=False"),
        ("bamba", {"mamba_n_heads": 4, "mamba_d_head": 8}, "mamba_d_head 8"),
        ("bamba", {"mamba_n_heads": 4, "mamba_expand": "2"}, "mamba_expand '2'"),
        ("bamba", {"mamba_n_heads": 4, "mamba_proj_bias": True}, "mamba_proj_bias=True"),
        ("falcon_h1", {"mamba_n_heads": 5, "mamba_d_ssm": 64}, "mamba_n_heads is 5"),
        ("falcon_h1", FALCON | {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is"),
        ("falcon_h1", FALCON | {"mlp_multipliers": ["a", 1]}, r"mlp_multipliers is \['a', 1\]"),
        ("falcon_h1", FALCON | {"ssm_in_multiplier": "x"}, "ssm_in_multiplier is"),
        ("falcon_h1", FALCON | {"projectors_bias": True}, "projectors_bias=True"),
    ],
)
def test_values_a_family_does_not_know_are_refused(
    name: str, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(MappingError, match=said):
        family(name).read_config(SIZES | keys)


def test_gpt2_values_are_checked() -> None:
    with pytest.raises(MappingError):
        family("gpt2").read_config(sizes_of("gpt2") | {"n_inner": 0})


def test_heads_of_mixers_may_be_said_to_share_out_the_channels() -> None:
    stored = SIZES | {"mamba_n_heads": 8, "mamba_d_head": "auto", "attn_layer_indices": [1]}
    config = family("bamba").read_config(stored)
    assert config.layer_kinds == ("M", "-", "*", "-")
    assert (config.mamba.mamba_num_heads, config.mamba.mamba_head_dim) == (8, 8)
    written = family("bamba").write_config(config)
    assert {k: written[k] for k in stored} == stored
    written = family("bamba").write_config(config.with_fields(extra={}))
    assert written["attn_layer_indices"] == [1]
    assert (written["mamba_d_head"], written["mamba_expand"]) == (8, 2)
    with raises(MappingError, "8 heads of 9", "hidden size 32", "mamba_expand"):
        family("bamba").write_config(config.with_fields(mamba_head_dim=9))
    with raises(MappingError, "'MM--' are not a mixer and an MLP by turns"):
        family("bamba").write_config(config.with_fields(layer_kinds=tuple("MM--")))


def test_multipliers_are_read_and_written() -> None:
    stored = (
        SIZES
        | FALCON
        | {
            "ssm_multipliers": [2.0, 1.0, 1.0, 1.0, 4.0],
            "ssm_in_multiplier": 0.5,
            "mlp_multipliers": [0.25, 3.0],
            "key_multiplier": 2.0,
        }
    )
    config = family("falcon_h1").read_config(stored)
    assert config.layer_kinds == ("M*-", "M*-")
    assert config.mamba.mamba_in_scales == (1.0, 0.5, 0.5, 0.5, 2.0)
    assert (config.mlp.mlp_gate_scale, config.mlp.mlp_out_scale) == (0.25, 3.0)
    assert config.attention.softmax_scale == pytest.approx(2 * config.attention.head_dim**-0.5)
    written = family("falcon_h1").write_config(config)
    assert {k: written[k] for k in stored} == stored
    written = family("falcon_h1").write_config(config.with_fields(extra={}, softmax_scale=None))
    assert written["ssm_multipliers"] == [1.0, 0.5, 0.5, 0.5, 2.0]
    assert (written["mlp_multipliers"], written["mamba_d_ssm"]) == ([0.25, 3.0], 64)
    with raises(MappingError, "a layer is of the kind 'M-'", "'M*-'"):
        family("falcon_h1").write_config(config.with_fields(layer_kinds=("M*-", "M-")))


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_limits_of_mamba_steps(name: str) -> None:
    """Infinity as Python's json and as transformers 5 write it."""
    tiny = {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 64, "intermediate_size": 8}
    tiny |= {"num_key_value_heads": 4}
    tiny |= {"num_attention_heads": 4, "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_ssm": 128}
    tiny |= {"attn_layer_indices": [], "layer_types": ["mamba"], "layers_block_type": ["mamba"]}
    infinities: list[Any] = [float("inf"), {"__float__": "Infinity"}]
    for most, want in [(x, x) for x in infinities] + [(0.5, 0.5)]:
        stored = tiny | {"time_step_limit": [0.25, most]}
        config = family(name).read_config(stored)
        assert config.mamba.mamba_step_limit == (0.25, 0.5 if want == 0.5 else float("inf"))
        assert family(name).write_config(config)["time_step_limit"] == [0.25, most]
        written = family(name).write_config(config.with_fields(extra={}))["time_step_limit"]
        assert written == [0.25, 0.5 if want == 0.5 else infinities[1]]
    for none in ([0.0, float("inf")], None):
        config = family(name).read_config(tiny | {"time_step_limit": none})
        assert config.mamba.mamba_step_limit is None
    with raises(MappingError, "time_step_limit is"):
        family(name).read_config(tiny | {"time_step_limit": [1]})


def test_one_group_of_mixers_is_not_split(tmp_path: Path) -> None:
    """Published models have one, so tensor parallelism does not cut their mixers."""
    save(Case("bamba", UNTIED | {"mamba_n_heads": 8, "mamba_d_state": 8}), tmp_path / "hf")
    with raises(LayoutError, "tp=2 does not divide mamba_num_groups=1", "sizes that do: 1"):
        reshard(tmp_path / "hf", tmp_path / "no", to="torch_dist", tp=2)
    reshard(tmp_path / "hf", tmp_path / "two", to="megatron", pp=2, fsync=False)
    reshard(tmp_path / "two", tmp_path / "back", to="hf", fsync=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "hf")


def test_a_family_says_what_it_cannot_write() -> None:
    neox = family("gpt_neox")
    config = neox.read_config({k: v for k, v in SIZES.items() if k != "num_key_value_heads"})
    with raises(MappingError, "head_dim", "16"):
        neox.write_config(config.with_fields(head_dim=16))
    with pytest.raises(MappingError, match="activation is 'xielu'"):
        neox.write_config(config.with_fields(activation="xielu"))
    assert any("parallel" in text for text in megatron_limits(config, neox))


def test_limits_are_told_when_converting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(Case("gpt_neox", UNTIED), tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    assert "attention and MLP in parallel" in caplog.text


OTHER_NAMES = [
    *(next(case for case in CASES if case.model_type == kind) for kind in ("gemma2", "gpt2")),
    next(case for case in CASES if case.model_class == "MegatronBertForPreTraining"),
]


@pytest.mark.parametrize("case", OTHER_NAMES, ids=str)
def test_args_alone_are_enough_for_another_layout(case: Case, tmp_path: Path) -> None:
    """A Megatron checkpoint that names no family keeps its names where it has others than GPT's."""
    save(case, tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    (carried,) = (tmp_path / "meg").glob("**/hf")
    shutil.rmtree(carried)
    reshard(tmp_path / "meg", tmp_path / "two", tp=2, pp=2, fsync=False)
    assert verify(tmp_path / "meg", tmp_path / "two").verdict == "equal"
    with pytest.raises(MappingError):
        reshard(tmp_path / "two", tmp_path / "back", to="hf", fsync=False)
    reshard(tmp_path / "two", tmp_path / "back", to="hf", like=tmp_path / "hf", fsync=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "hf")
