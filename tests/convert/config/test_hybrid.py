"""Layers of several kinds: patterns, both classes of models, and tensors of several parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from megtool import reshard, verify
from megtool.convert.canonical_view import CanonicalView
from megtool.convert.config.hybrid import (
    are_hybrid,
    from_hybrid,
    gpt_form,
    hybrid_form,
    needs_hybrid,
    to_hybrid,
)
from megtool.convert.dialects import DialectNaming, read_side, write_side
from megtool.convert.families.detection import family
from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.convert.megatron.hybrid_pattern import parse_pattern, pattern_of, pattern_text
from megtool.convert.megatron.parallel_args import layout_fields
from megtool.convert.megatron.rank_parameters import RankPlace, rank_parameters
from megtool.convert.megatron.sections import joined, part_names, section_rows, split_part
from megtool.convert.megatron.sharding import rule_of, shard
from megtool.dtypes import dtype
from megtool.errors import LayoutError, MappingError
from megtool.options.layout import ParallelConfig
from megtool.source.open import open_source
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.trained import canonical_tensors, config, write
from tests.support.checkpoints.trained_models import MODELS
from tests.support.errors import raises
from tests.support.folders import stored_tensors as stored
from tests.support.models import mtp_models
from tests.support.models.moe_cases import CASES, FIRST, case_config, save

BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_state_dim": 16,
    "mamba_num_groups": 2,
}
HYBRID = ModelConfig.from_fields(**BASE, **MAMBA, layer_kinds=("M", "-", "*", "-"))
FLOAT = dtype("float32")


def hybrid_side() -> Any:
    """The canonical tensors of a small Nemotron-H."""
    config = family("nemotron_h").read_config(case_config(FIRST["nemotron_h"]).to_dict())
    from transformers import NemotronHForCausalLM

    model = NemotronHForCausalLM(case_config(FIRST["nemotron_h"]))
    tensors = [
        GlobalTensor(name=n.replace("model.", "backbone."), shape=tuple(t.shape), dtype=FLOAT)
        for n, t in model.state_dict().items()
        if ".experts." not in n
    ]
    for layer in (1,):
        for e in range(4):
            for name, shape in (("up", (24, 32)), ("down", (32, 24))):
                stored_name = f"backbone.layers.{layer}.mixer.experts.{e}.{name}_proj.weight"
                tensors.append(GlobalTensor(name=stored_name, shape=shape, dtype=FLOAT))
    return read_side(tensors, family=family("nemotron_h"), config=config)


# ---- patterns


def test_a_pattern_has_layers_chunks_and_further_layers() -> None:
    pattern = parse_pattern("M-|M*-/*E/*E")
    assert pattern.symbols == "M-M*-"
    assert (pattern.mtp, pattern.depths, pattern.is_cut) == ("*E", 2, True)
    assert pattern.layout() == "Ett|t*3mmL"
    assert pattern_text(pattern.symbols, "*E", 1, ParallelConfig()) == "M-M*-/*E"
    cut = ParallelConfig(pp=2, pipeline_layout=pattern.layout())
    assert pattern_text(pattern.symbols, pattern.mtp, 2, cut) == "M-|M*-/*E/*E"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("M-W", "symbol 'W' (attention within a window)"),
        ("MDX", "symbol 'X'"),
        ("M[*-]", r"symbol '['"),
        ("M-/*E/*-", "MTP layers that are empty or differ"),
        ("M-/", "MTP layers that are empty or differ"),
        ("", "has 0 layers"),
    ],
)
def test_a_pattern_that_is_none_is_refused(text: str, why: str) -> None:
    with raises(
        MappingError, match=why.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[")
    ):
        parse_pattern(text)


def test_args_that_contradict_the_pattern_are_refused() -> None:
    with raises(MappingError, match="pattern has 4 layers, and num_layers is 5"):
        pattern_of({"hybrid_layer_pattern": "M-*-", "num_layers": 5})
    with raises(MappingError, match="of None layers"):
        pattern_of({"is_hybrid_model": True})
    with raises(MappingError, match="hybrid_mlp_ratio 0.75"):
        pattern_of({"hybrid_attention_ratio": 0.5, "hybrid_mlp_ratio": 0.75, "num_layers": 4})
    older = pattern_of(
        {
            "hybrid_override_pattern": "M*",
            "mtp_hybrid_override_pattern": "*-",
            "mtp_num_layers": 2,
        }
    )
    assert older == parse_pattern("M*/*-/*-")


def test_chunks_of_a_pattern_are_the_layout() -> None:
    args = {"hybrid_layer_pattern": "M-|M*|-|-", "pipeline_model_parallel_size": 2}
    assert layout_fields(args) == {"pp": 2, "vpp": 2, "pipeline_layout": "Ett|tt|t|tL"}
    assert layout_fields(args | {"pipeline_model_parallel_size": 1}) == {"pp": 1}


# ---- one model in both classes


def test_a_model_of_both_classes_is_one_configuration() -> None:
    config = ModelConfig.from_fields(
        **BASE,
        num_experts=4,
        num_experts_per_token=2,
        moe_ffn_hidden_size=8,
        moe_layer_freq=(0, 1, 0, 1),
        window_size=8,
        window_skip_freq=(1, 0, 1, 0),
    )
    hybrid = hybrid_form(config)
    assert hybrid.layer_kinds == tuple("*-*E*-*E")
    assert hybrid.window.window_skip_freq == (1, 1, 0, 0, 1, 1, 0, 0)
    assert layer_sets.moe_layers(hybrid) == {3, 7}
    assert gpt_form(hybrid) == config
    assert hybrid_form(hybrid) is hybrid
    assert needs_hybrid(HYBRID)
    assert gpt_form(HYBRID) is HYBRID
    assert not needs_hybrid(config)


def test_branches_side_by_side_have_no_pattern() -> None:
    with raises(MappingError, match="side by side"):
        hybrid_form(ModelConfig.from_fields(**BASE, **MAMBA, layer_kinds=("M*-",) * 4))


def test_names_of_both_classes() -> None:
    config = ModelConfig.from_fields(**BASE, num_mtp_layers=1)
    pairs = {
        "decoder.layers.1.self_attention.linear_qkv.weight": (
            "decoder.layers.2.self_attention.linear_qkv.weight"
        ),
        "decoder.layers.1.mlp.linear_fc1.weight": "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.final_layernorm.weight": "decoder.final_norm.weight",
        "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight": (
            "optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc2.weight"
        ),
        "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight": (
            "mtp.layers.0.mtp_model_layer.layers.1.mlp.linear_fc1.weight"
        ),
        "mtp.layers.0.eh_proj.weight": "mtp.layers.0.eh_proj.weight",
    }
    there, back = to_hybrid(config), from_hybrid(config)
    for gpt, hybrid in pairs.items():
        assert there(gpt) == hybrid
        assert back(hybrid) == gpt
    assert are_hybrid(list(pairs.values()), config)
    assert not are_hybrid(list(pairs), config)
    assert are_hybrid([n for n in pairs.values() if "final" not in n], config) is False
    all_layers = [f"decoder.layers.{2 * i}.self_attention.linear_proj.weight" for i in range(4)]
    assert are_hybrid(all_layers, config)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("decoder.layers.8.mlp.linear_fc1.weight", "layer 8, and the configuration has 8"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "of the kind '\\*' by the pattern"),
    ],
)
def test_a_layer_that_the_pattern_does_not_have_is_refused(name: str, why: str) -> None:
    with raises(MappingError, match=why):
        from_hybrid(ModelConfig.from_fields(**BASE))(name)


def test_args_of_both_classes() -> None:
    config = ModelConfig.from_fields(**BASE)
    hybrid = hybrid_form(config)
    args = args_from_config(hybrid, ParallelConfig(pp=2))
    assert args["hybrid_layer_pattern"] == "*-*-|*-*-"
    assert args["num_layers"] == 8
    assert config_from_args(args).num_layers == 4
    assert config_from_args(args).layer_kinds is None
    again = args_from_config(config, base_args=args)
    assert (again["num_layers"], again["hybrid_layer_pattern"]) == (4, None)
    old = args_from_config(hybrid, base_args={"hybrid_override_pattern": "*-" * 4})
    assert old["hybrid_override_pattern"] == "*-" * 4
    assert "hybrid_layer_pattern" not in old


# ---- parts


def test_parts_of_both_delta_rules_have_one_name() -> None:
    whole = "decoder.layers.0.self_attention.in_proj.weight"
    net = [f"{whole}.{x}" for x in ("query", "key", "value", "z", "beta", "alpha")]
    assert part_names(whole, net) == tuple(net)
    assert part_names(whole, net[:3]) == tuple(net[:3])  # Kimi delta attention
    assert part_names(whole, net[:4]) == part_names(whole, net[:2]) == ()


def test_a_projection_is_cut_part_by_part() -> None:
    rows = section_rows("decoder.layers.0.mixer.in_proj.weight", HYBRID)
    assert rows == (32, 32, 32, 32, 4)
    names = [f"decoder.layers.0.mixer.in_proj.weight.{x}" for x in ("z", "x", "B", "C", "dt")]
    whole = GlobalTensor(name="decoder.layers.0.mixer.in_proj.weight", shape=(132, 32), dtype=FLOAT)
    parts = [
        GlobalTensor(name=n, shape=(k, 32), dtype=FLOAT) for n, k in zip(names, rows, strict=True)
    ]
    assert [split_part(p.name) for p in parts] == [
        (whole.name, part) for part in ("z", "x", "B", "C", "dt")
    ]
    assert joined(parts) == [whole]
    assert part_names(whole.name, names) == tuple(names)
    assert part_names(whole.name, names[1:]) == ()
    cut = shard([whole], ParallelConfig(tp=2), config=HYBRID)
    of_rank = [
        (lo[0], hi[0])
        for lo, hi, owner in zip(
            cut.boxes.lo.tolist(), cut.boxes.hi.tolist(), cut.owner.tolist(), strict=True
        )
        if owner == 1
    ]
    assert of_rank == [(16, 32), (48, 64), (80, 96), (112, 128), (130, 132)]
    for tensors in ([whole], parts):
        (parameter,) = rank_parameters(tensors, HYBRID, ParallelConfig(tp=2))[RankPlace(0, 0, 0, 1)]
        assert parameter.local_shape == (66, 32)
        assert [(lo[0], hi[0]) for lo, hi in parameter.boxes] == of_rank


def test_parts_of_unknown_sizes_are_not_cut() -> None:
    whole = GlobalTensor(name="decoder.layers.0.mixer.in_proj.weight", shape=(132, 32), dtype=FLOAT)
    with raises(LayoutError, match="several parts"):
        shard([whole], ParallelConfig(tp=2))


@pytest.mark.parametrize(
    ("model", "tp", "why"),
    [
        (HYBRID, 4, "tp=4 does not divide mamba_num_groups=2"),
        (HYBRID, 3, "tp=3 does not divide mamba_num_heads=4"),
    ],
)
def test_groups_that_tp_does_not_divide_are_refused(model: ModelConfig, tp: int, why: str) -> None:
    with raises(LayoutError, match=why) as caught:
        rank_parameters([], model, ParallelConfig(tp=tp))
    assert caught.value.hint == "sizes that do: 1, 2"


def test_parts_have_names_of_their_own_where_shapes_are_global() -> None:
    side = hybrid_side()
    whole = {t.name for t in write_side(side, dialect="megatron").tensors}
    parts = write_side(side, dialect="megatron", options=DialectNaming(in_parts=True))
    names = {t.name for t in parts.tensors}
    assert "decoder.layers.0.mixer.in_proj.weight" in whole
    assert {
        "decoder.layers.0.mixer.in_proj.weight." + x for x in ("z", "x", "B", "C", "dt")
    } <= names
    assert "decoder.layers.0.mixer.conv1d.bias.B" in names
    assert "decoder.final_norm.weight" in names & whole
    assert {t.name: t.shape for t in joined(parts.tensors)}.keys() == whole
    again = read_side(parts.tensors, config=side.config, dialect="megatron")
    assert again.canonical == side.canonical


@pytest.mark.parametrize("spelling", ["separate", "memory"])
def test_other_spellings_are_read(spelling: str) -> None:
    side = hybrid_side()
    changes = {
        "separate": (
            ("mixer.in_proj.layer_norm_", "norm."),
            ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
            ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
        ),
        "memory": (("conv1d.", "conv1d_"),),
    }[spelling]
    tensors = []
    for t in write_side(side, dialect="megatron").tensors:
        name = t.name
        for old, new in changes:
            name = name.replace(old, new)
        tensors.append(GlobalTensor(name=name, shape=t.shape, dtype=t.dtype))
    assert any(t.name not in {x.name for x in side.tensors} for t in tensors)
    assert read_side(tensors, config=side.config, dialect="megatron").canonical == side.canonical


def test_a_model_that_only_hybrid_can_hold_is_not_written_as_gpt() -> None:
    with raises(MappingError, match="GPTModel has attention and an MLP in every layer"):
        write_side(hybrid_side(), dialect="megatron", options=DialectNaming(model_class="gpt"))


@pytest.mark.parametrize("model_class", ["gpt", "hybrid"])
def test_the_norm_before_experts_in_megatrons_own_layers(model_class: str) -> None:
    """GPTModel's local layers call it as before an MLP; HybridModel's as Transformer Engine's."""
    model = config(**MODELS["some experts"])
    tensors = [
        GlobalTensor(name=n, shape=s, dtype=FLOAT) for n, s in canonical_tensors(model).items()
    ]
    side = CanonicalView(
        dialect="hf",
        tensors=tuple(tensors),
        placements={},
        canonical={t.name: t for t in tensors},
        states={},
        config=model,
    )
    options = DialectNaming(own_layers=True, model_class=model_class)
    names = {t.name for t in write_side(side, dialect="megatron", options=options).tensors}
    assert any("pre_mlp_layernorm" in n for n in names) == (model_class == "hybrid")


# ---- whole checkpoints


@pytest.mark.slow
def test_every_format_holds_both_classes(tmp_path: Path) -> None:
    save(FIRST["qwen3_next"], tmp_path / "hf")
    before = stored(tmp_path / "hf")
    at = tmp_path / "hf"
    steps: list[dict[str, Any]] = [
        {"to": "torch_dist", "tp": 2, "pp": 2, "model_class": "hybrid"},
        {"to": "megatron", "tp": 2, "pp": 4},
        {"to": "megatron", "tp": 1, "pp": 2, "model_class": "gpt"},
        {"to": "torch_dist", "ep": 2, "model_class": "hybrid"},
        {"to": "zarr"},
        {"to": "dcp"},
        {"to": "torch_dist", "tp": 2, "model_class": "gpt"},
    ]
    for number, step in enumerate(steps):
        report = reshard(at, tmp_path / f"{number}", fsync=False, verify=True, **step)
        assert not [d for d in report.dropped if d.is_lost], step
        at = tmp_path / f"{number}"
        if "model_class" in step:
            assert open_source(at).view.is_hybrid == (step["model_class"] == "hybrid")
        if step["to"] == "zarr":
            continue
        like = {"like": tmp_path / "hf"} if step["to"] == "dcp" else {}
        reshard(at, tmp_path / f"back{number}", to="hf", fsync=False, **like)
        assert stored(tmp_path / f"back{number}") == before, step


def test_a_norm_that_megatron_centres_around_zero(tmp_path: Path) -> None:
    """Weights far from 1 lose digits in bfloat16, which is said, and none in float32."""
    from safetensors.torch import load_file, save_file

    save(FIRST["qwen3_next"], tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    held = load_file(file)
    name = "model.layers.0.linear_attn.norm.weight"
    held[name] = torch.tensor([1.0, 0.5, 1.9921875, 0.01, 3.0, -1.0, 0.75, 1.25]).bfloat16()
    save_file(held, file, metadata={"format": "pt"})
    exact, rounded = (tmp_path / "exact"), (tmp_path / "rounded")
    report = reshard(tmp_path / "hf", rounded, to="torch_dist", fsync=False, verify=True)
    assert "1 element of 1 tensor rounded" in " ".join(report.warnings)
    reshard(tmp_path / "hf", exact, to="torch_dist", dtype="float32", fsync=False, verify=True)
    key = "decoder.layers.0.self_attention.out_norm.weight"
    values = {}
    for folder in (exact, rounded):
        reshard(folder, tmp_path / f"{folder.name}_st", to="safetensors", fsync=False)
        values[folder.name] = load_file(tmp_path / f"{folder.name}_st")[key]
    want = held[name].float() - 1
    assert torch.equal(values["exact"], want)
    assert torch.equal(values["rounded"], want.bfloat16())
    reshard(exact, tmp_path / "back", to="hf", dtype="bfloat16", fsync=False)
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[name], held[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in CASES if c[0] == "nemotron_h"], ids=["mixed", "latent"]
)
def test_a_hybrid_comes_back_from_every_format(case: Any, tmp_path: Path) -> None:
    save(case, tmp_path / "hf")
    before = stored(tmp_path / "hf")
    for number, step in enumerate(
        (
            {"to": "torch_dist", "tp": 1},
            {"to": "torch_dist", "tp": 2, "pp": 2, "ep": 2},
            {"to": "megatron", "tp": 1, "pp": 2},
            {"to": "megatron", "tp": 2},
            {"to": "dcp"},
            {"to": "zarr"},
        )
    ):
        at = tmp_path / f"{number}"
        reshard(tmp_path / "hf", at, fsync=False, verify=True, **step)
        reshard(at, tmp_path / f"back{number}", to="hf", fsync=False, like=tmp_path / "hf")
        assert stored(tmp_path / f"back{number}") == before, step


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("glm4_moe", "qwen3_5_text", "qwen3_5_moe")
        ),
    ],
)
def test_layers_of_multi_token_prediction_change_class(name: str, tmp_path: Path) -> None:
    _, before = mtp_models.save(name, tmp_path / "hf")
    steps: list[dict[str, Any]] = [
        {"to": "torch_dist", "tp": 2, "pp": 2, "model_class": "hybrid"},
        {"to": "megatron", "tp": 2, "pp": 2},
        {"to": "megatron", "pp": 1, "model_class": "gpt"},
        {"to": "torch_dist", "tp": 2, "model_class": "hybrid"},
        {"to": "dcp"},
        {"to": "torch_dist", "pp": 2, "model_class": "gpt"},
    ]
    at = tmp_path / "hf"
    for number, step in enumerate(steps):
        reshard(at, tmp_path / f"{number}", fsync=False, strict=True, **step)
        at = tmp_path / f"{number}"
        names = {n for t in open_source(at).catalogue.tensors if "mtp." in (n := t.name)}
        inner = "mtp_model_layer.layers.1." if step.get("model_class") == "hybrid" else "_layer.mlp"
        if "model_class" in step:
            assert any(inner in n for n in names), step
    reshard(at, tmp_path / "back", to="hf", fsync=False)
    assert stored(tmp_path / "back") == before


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*E", "M*-E"], ids=["pair", "numbered"])
def test_layers_of_multi_token_prediction_of_a_hybrid_travel(pattern: str, tmp_path: Path) -> None:
    """Each is several layers of Hugging Face's."""
    if pattern == "*E":
        _, before = mtp_models.save("nemotron_h", tmp_path / "hf")
    else:
        _, before = mtp_models.save_numbered(tmp_path / "hf")
    at = tmp_path / "hf"
    steps: list[dict[str, Any]] = [
        {"to": "torch_dist", "tp": 2, "pp": 2, "ep": 2},
        {"to": "megatron", "tp": 2, "pp": 4, "ep": 1},
        {"to": "zarr", "tp": 1, "pp": 1},
        {"to": "dcp"},
        {"to": "torch_dist", "pp": 2, "ep": 4},
        {"to": "megatron", "pp": 1, "ep": 2},
    ]
    for number, step in enumerate(steps):
        reshard(at, tmp_path / f"{number}", fsync=False, strict=True, verify=True, **step)
        at = tmp_path / f"{number}"
    assert "hybrid_layer_pattern" in args_of(tmp_path / "4")
    assert args_of(tmp_path / "4")["hybrid_layer_pattern"].endswith(f"/{pattern}" * 2)
    names = {t.name for t in open_source(tmp_path / "4").catalogue.tensors}
    last = len(pattern) - 1
    assert f"mtp.layers.1.mtp_model_layer.layers.{last}.mlp.router.weight" in names
    reshard(at, tmp_path / "back", to="hf", fsync=False)
    assert stored(tmp_path / "back") == before


def args_of(folder: Path) -> dict[str, Any]:
    args: dict[str, Any] = open_source(folder).catalogue.metadata["args"]
    return args


CLASS_HOPS: list[dict[str, Any]] = [
    {"to": "torch_dist", "tp": 2, "pp": 2, "model_class": "hybrid"},
    {"optimizer_format": "dp_reshardable", "dp": 4, "tp": 2, "pp": 4},
    {"to": "megatron", "tp": 1, "pp": 2, "model_class": "gpt"},
    {"to": "megatron", "tp": 2, "pp": 2, "model_class": "hybrid"},
    {"to": "zarr"},
    {"to": "torch_dist", "tp": 1, "pp": 1, "model_class": "gpt"},
]


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        pytest.param("some experts", marks=pytest.mark.slow),
        pytest.param("delta net", marks=pytest.mark.slow),
    ],
)
def test_optimizer_state_changes_class_with_the_weights(
    name: str, tmp_path: Path, materialize: Any
) -> None:
    write(tmp_path / "0", config(**MODELS[name]), ParallelConfig(), materialize)
    for number, hop in enumerate(CLASS_HOPS):
        here, there = tmp_path / f"{number}", tmp_path / f"{number + 1}"
        reshard(here, there, fsync=False, strict=True, **hop)
        assert verify(tmp_path / "0", there).exit_status == 0, hop
    last = tmp_path / f"{len(CLASS_HOPS)}"
    before, after = open_source(tmp_path / "0"), open_source(last)
    assert {t.name for t in after.catalogue.tensors} == {t.name for t in before.catalogue.tensors}


@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_of_tensor_ranks_are_read(tp: int, tmp_path: Path, materialize: Any) -> None:
    """Megatron-FSDP puts the parameters of tensor ranks together, parts and all."""
    kept: dict[str, Any] = {"optimizer_format": "none", "fsync": False}
    mixers = config(**MODELS["delta net"] | MODELS["mamba"] | {"layer_kinds": ("M", "-", "G", "-")})
    write(tmp_path / "0", mixers.with_fields(num_experts=0), ParallelConfig(), materialize)
    reshard(tmp_path / "0", tmp_path / "whole", to="torch_dist", **kept)
    reshard(tmp_path / "0", tmp_path / "ranks", to="megatron", tp=tp, **kept)
    files = sorted((tmp_path / "ranks").glob("**/model_optim_rng.pt"))
    trees = [torch.load(file, weights_only=False) for file in files]
    assert len(trees) == tp
    args = trees[0]["args"]
    args.ckpt_format = "fsdp_dtensor"
    model: dict[str, Any] = {}
    for name, first in trees[0]["model"].items():
        if name.endswith("_extra_state"):
            continue
        cut = rule_of(name, False).tp_dim
        ranks = [tree["model"][name] for tree in trees]
        gates = ranks[0].shape[0] // 2
        if name.endswith("linear_fc1.weight") and args.swiglu:  # these it takes apart
            model[f"module.{name}_w"] = torch.cat([x[:gates] for x in ranks])
            model[f"module.{name}_v"] = torch.cat([x[gates:] for x in ranks])
        else:
            model[f"module.{name}"] = torch.cat(ranks, cut) if cut else first
    folder, step = tmp_path / "fsdp" / "iter_0000007", trees[0]["iteration"]
    state = {"model": model, "args": args, "checkpoint_version": 3.0, "iteration": step}
    torch.distributed.checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    (tmp_path / "fsdp" / "latest_checkpointed_iteration.txt").write_text("7")
    found = open_source(tmp_path / "fsdp")
    assert any("mixer.in_proj.weight" in t.name for t in found.catalogue.tensors)
    reshard(tmp_path / "fsdp", tmp_path / "back", to="torch_dist", tp=2, fsync=False)
    assert verify(tmp_path / "whole", tmp_path / "back").verdict == "equal"
    assert verify(tmp_path / "whole", tmp_path / "fsdp").verdict == "equal"
    reshard(tmp_path / "fsdp", tmp_path / "same", to="dcp", fsync=False)
    assert verify(tmp_path / "whole", tmp_path / "same").verdict == "equal"
    if tp > 1:
        with raises(LayoutError, "lie in blocks of tp=2", "decoder.layers", hint="torch_dist"):
            reshard(tmp_path / "fsdp", tmp_path / "other", to="dcp", tp=1, fsync=False)
