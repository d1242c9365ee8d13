"""Mixtures of experts, latent attention and multi-token prediction against transformers' models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import reshard, verify
from megtool.convert.dialects import read_side, write_side
from megtool.convert.families.detection import detect_family, family
from megtool.convert.megatron.args import args_from_config, config_from_args, megatron_limits
from megtool.dtypes import dtype
from megtool.errors import MappingError
from megtool.formats import open_checkpoint
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.options.layout import ParallelConfig
from megtool.source.open import open_source
from megtool.spec.model_config import CONFIG_FIELDS
from megtool.tensors.sharded import GlobalTensor
from tests.support.errors import raises
from tests.support.folders import read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models import moe_models, mtp_models
from tests.support.models.moe_cases import (
    CASES,
    DEEPSEEK,
    EIGHT,
    FIRST,
    MORE,
    SIZES,
    YARN,
    Case,
    case_config,
    change_config,
    save,
    with_mtp,
)
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.loading import source_of

IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate([*CASES, *MORE])]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in MORE]
cases = pytest.mark.parametrize("case", [*CASES, *SLOW], ids=IDS)
FOREIGN = [
    pytest.param(name, marks=[pytest.mark.slow] if FIRST[name] in MORE else [])
    for name in FIRST
    # Megatron's args do not hold how Mistral 4 scales queries by position, nor Gemma 4's rotation,
    # nor that Trinity scales embeddings.
    if name not in ("mistral4", "gemma4", "afmoe")
]


LAYOUTS: list[dict[str, int]] = [
    {"tp": 2, "ep": 2},
    {"tp": 1, "pp": 2, "ep": 4, "etp": 1},
    {"tp": 2, "pp": 1, "ep": 1, "etp": 2},
]


# ---- whole models, there and back


@cases
def test_weights_come_back_to_the_same_bytes(case: Case, tmp_path: Path) -> None:
    save(case, tmp_path / "hf")
    before = stored(tmp_path / "hf")
    opened = open_source(tmp_path / "hf")
    assert opened.model is not None
    assert opened.model.family is not None
    assert opened.model.family.name == case[0]
    assert opened.view.dropped == []
    assert {p.stored for p in opened.view.placements.values()} == set(before)

    at, options = tmp_path / "hf", {"to": "torch_dist"}
    for number, layout in enumerate(LAYOUTS):
        report = reshard(at, tmp_path / f"{number}", fsync=False, **options, **layout)
        assert [d for d in report.dropped if d.is_lost] == []
        assert report.layout | layout == report.layout
        at, options = tmp_path / f"{number}", {}
    back = reshard(at, tmp_path / "back", to="hf", fsync=False)
    assert [d for d in back.dropped if d.is_lost] == []
    assert stored(tmp_path / "back") == before
    assert read_config(tmp_path / "back") == read_config(tmp_path / "hf")
    assert verify(tmp_path / "hf", tmp_path / "1").verdict == "equal"


@cases
def test_args_say_what_the_configuration_does(case: Case, tmp_path: Path) -> None:
    """Megatron's tensors are whole and the same by what their args alone say."""
    save(case, tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    meg = open_source(tmp_path / "meg")
    config = meg.view.config
    assert config is not None
    said = config_from_args(args_from_config(config, ParallelConfig(tp=2, ep=2)))
    said, _ = family(case[0]).completed(said)
    differ = {name for name in CONFIG_FIELDS if said.get(name) != config.get(name)}
    # A bias of the router or the head is told by its tensor; what only generation needs, by no arg.
    told = {"attn_out_bias"} if megatron_limits(config) else set()
    unsaid = {"router_group_best", "attn_chunk_size", "latent_norm_eps", "mamba_norm_eps"}
    unsaid |= {"attn_temperature_floor", "attn_temperature_scale"}
    unsaid |= {"embedding_scale", "residual_scale", "softmax_scale", "logit_scale"}
    if config.attention.attn_temperature_rotated and config.attention.attn_temperature_scale:
        unsaid.add("rope_scaling")  # which has that scale among its keys
    if (config.positions.rope_scaling or {}).get("rope_type") == "longrope":
        unsaid.add("rope_scaling")
    if config.layer_sizes:
        unsaid |= {"rope_scaling", "rope_local_base", "logit_softcap"}
    assert differ <= {"extra", "router_bias", "head_bias"} | told | unsaid
    own = family(case[0])
    side = read_side(meg.catalogue.tensors, family=own, config=said, dialect="megatron")
    assert side.canonical == meg.view.canonical
    assert side.dropped == []


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=IDS)
def test_a_configuration_is_written_as_transformers_reads_it(case: Case) -> None:
    original = case_config(case).to_dict()
    found = detect_family({"architectures": [f"{case[1]}ForCausalLM"]})
    config = found.read_config(original)
    written = found.write_config(config)
    read = type(case_config(case))(**written).to_dict()
    renamed = {"decoder_sparse_step", "mlp_only_layers", "interleave_moe_layer_step"}
    assert {k: read[k] for k in original if k not in renamed} == {
        k: v for k, v in original.items() if k not in renamed
    } | (
        {"head_dim": config.attention.head_dim}
        if "head_dim" in original and case[0] == "mixtral"
        else {}
    )
    assert found.read_config(written) == config


@pytest.mark.parametrize("name", FOREIGN)
def test_what_a_foreign_checkpoint_becomes_loads_in_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any file of Hugging Face's: the configuration comes from Megatron's args alone."""
    case = FIRST[name]
    kind = type(save(case, tmp_path / "hf"))
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, fsync=False)
    for file in (tmp_path / "meg" / "release" / "hf").iterdir():
        file.unlink()
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", family=name, fsync=False)
    told = "qk_l2_norm_unrotated is True in Megatron, which has no arg for it, and False in"
    assert (told in caplog.text) == (name == "llama4")
    if name in ("flex_olmo", "kimi_linear"):  # whose usual token of padding is none of so few
        change_config(tmp_path / "back", pad_token_id=None)
    model = kind.from_pretrained(tmp_path / "hf")
    theirs, info = kind.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        ours, want = theirs.eval()(tokens).logits, model.eval()(tokens).logits
    assert want.isfinite().all()
    assert torch.equal(ours, want)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_5_moe_text", "deepseek_v3"])
def test_fused_experts_are_read_and_written_one_by_one(name: str, tmp_path: Path) -> None:
    case = FIRST[name]
    save(case, tmp_path / "hf")
    save(case, tmp_path / "fused", save_original_format=False)
    assert any(n.endswith("experts.gate_up_proj") for n in stored(tmp_path / "fused"))
    assert verify(tmp_path / "hf", tmp_path / "fused").verdict == "equal"
    reshard(tmp_path / "fused", tmp_path / "meg", to="torch_dist", tp=2, ep=2, fsync=False)
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "hf")


# ---- multi-token prediction, expert bias


@pytest.mark.parametrize("end", ["embed_tokens", "shared_head.head"])
def test_layers_of_multi_token_prediction_with_ends_of_their_own(tmp_path: Path, end: str) -> None:
    with_mtp(tmp_path / "hf")
    from safetensors.torch import load_file, save_file

    file, name = tmp_path / "hf" / "model.safetensors", f"model.layers.5.{end}.weight"
    held = load_file(file)
    held[name][0, 0] += 1
    save_file(held, file, metadata={"format": "pt"})
    own = [f"model.layers.{layer}.{end}.weight" for layer in (4, 5)]
    with pytest.raises(MappingError, match="of its own; 'megatron' has the model's") as caught:
        reshard(tmp_path / "hf", tmp_path / "no", to="torch_dist")
    assert caught.value.tensor == ", ".join(own)
    assert all(f"--exclude '{n}'" in str(caught.value.hint) for n in own)
    assert not (tmp_path / "no").exists()
    before = stored(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "same", to="hf", fsync=False)
    assert stored(tmp_path / "same") == before
    report = reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", exclude=own, fsync=False)
    assert not any(d.is_lost for d in report.dropped)
    back = tmp_path / "back"
    reshard(tmp_path / "meg", back, to="hf", fsync=False)
    ends = (".embed_tokens.weight", ".shared_head.head.weight")
    copies = {n for n in before if n.startswith("model.layers.") and n.endswith(ends)}
    assert set(own) <= copies
    assert stored(back) == {n: t for n, t in before.items() if n not in copies}


def test_layers_of_multi_token_prediction_travel(tmp_path: Path) -> None:
    before = with_mtp(tmp_path / "hf")
    copies = {n for n in before if n.endswith((".embed_tokens.weight", "_head.head.weight"))}
    copies -= {"model.embed_tokens.weight"}
    report = reshard(
        tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, ep=2, pp=2, fsync=False
    )
    assert {d.name for d in report.dropped} == copies
    assert not any(d.is_lost for d in report.dropped)
    held = {t.name: t.shape for t in open_checkpoint(tmp_path / "meg").tensors}
    inner = "mtp.layers.1.transformer_layer."
    assert held["mtp.layers.1.eh_proj.weight"] == (32, 64)
    assert held[inner + "mlp.experts.experts.linear_fc1.weight"] == (4, 48, 32)
    assert held[inner + "mlp.router.expert_bias"] == (4,)
    assert held[inner + "self_attention.linear_kv_up_proj.layer_norm_weight"] == (16,)
    for file in (tmp_path / "meg" / "release" / "hf").iterdir():
        file.unlink()
    back = reshard(tmp_path / "meg", tmp_path / "back", to="hf", family="deepseek_v3", fsync=False)
    assert [d for d in back.dropped if d.is_lost] == []
    assert stored(tmp_path / "back") == {n: t for n, t in before.items() if n not in copies}
    assert read_config(tmp_path / "back")["num_nextn_predict_layers"] == 2


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in ("exaone_moe", "mimo_v2_flash") else n
        for n in mtp_models.FAMILIES
    ],
)
def test_published_families_with_multi_token_prediction(
    name: str, carry: Callable[..., dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """Bytes come back by the args alone, and the rest of the model is its twin."""
    twin, before = mtp_models.save(name, tmp_path / "hf")
    opened = open_source(tmp_path / "hf")
    assert opened.view.dropped == []
    layout = {"tp": 2, "pp": 2} | ({} if name in ("mimo", "qwen3_5_text") else {"ep": 2})
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False, **layout)
    for file in (tmp_path / "meg" / "release" / "hf").iterdir():
        file.unlink()
    tower = {"like": tmp_path / "hf"} if name == "qwen3_5_moe" else {"family": name}
    back = reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False, **tower)
    assert [d for d in back.dropped if d.is_lost] == []
    assert stored(tmp_path / "back") == before
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        want = twin.float().eval()(tokens).logits
        got = load(source_of(tmp_path / "hf"), dtype="float32")(Batch(tokens_BS=tokens))
    assert float((want - got).abs().max()) < 1e-4 * float(want.abs().max())

    # Megatron's projection reads the embedding, then the hidden state.
    arrays = {
        t.name: np.random.default_rng(0).random(t.shape, np.float32)
        for t in opened.catalogue.tensors
    }
    tensors = [
        GlobalTensor(name=n, shape=a.shape, dtype=dtype("float32")) for n, a in arrays.items()
    ]
    side = read_side(tensors, family=family(name), config=opened.view.config)
    megatron = carry(side, arrays, write_side(side, dialect="megatron", per_layer=True))
    proj = arrays[mtp_models.PROJECTIONS[name]]
    if name == "mimo":
        proj = np.concatenate(np.split(proj, 2, axis=1)[::-1], axis=1)
    assert opened.view.config is not None
    last = opened.view.config.mtp.num_mtp_layers - 1
    assert (megatron[f"mtp.layers.{last}.eh_proj.weight"] == proj).all()


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "nemotron_h"])
def test_a_missing_tensor_of_multi_token_prediction_is_named(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    mtp_models.save(name, tmp_path)
    file, lost = tmp_path / "model.safetensors", mtp_models.PROJECTIONS[name]
    held = load_file(file)
    del held[lost]
    save_file(held, file, metadata={"format": "pt"})
    with raises(MappingError, "1 tensor is missing", repr(lost), id="missing-tensors"):
        open_source(tmp_path)


def test_more_layers_than_a_family_has_are_refused(tmp_path: Path) -> None:
    """Their parts beside the layers are the same tensors; Megatron has some for each."""
    mtp_models.save("qwen3_5_text", tmp_path / "hf")
    change_config(tmp_path / "hf", mtp_num_hidden_layers=2)
    with raises(MappingError, "mtp_num_hidden_layers=2", "knows 0, 1"):
        reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)


def without_layers(folder: Path, out: Path, *numbers: int, to: str = "hf") -> dict[str, Any]:
    """The written config.json, or Megatron's args, without some layers."""
    globs = [f"model.layers.{n}.*" for n in numbers]
    reshard(folder, out, to=to, exclude=globs, fsync=False)
    if to == "hf":
        return read_config(out)
    return {
        "num_nextn_predict_layers": open_checkpoint(out).metadata["args"]["mtp_num_layers"] or 0,
        "hf": read_config(next(out.glob("*/hf")))["num_nextn_predict_layers"],
    }


def test_excluded_layers_of_multi_token_prediction_are_not_counted(tmp_path: Path) -> None:
    with_mtp(tmp_path / "hf")
    key = "num_nextn_predict_layers"
    before = read_config(tmp_path / "hf")
    for number, (excluded, count) in enumerate({(4, 5): 0, (5,): 1, (4,): 2, (): 2}.items()):
        out = tmp_path / f"out{number}"
        assert without_layers(tmp_path / "hf", out, *excluded) == before | {key: count}
    args = without_layers(tmp_path / "hf", tmp_path / "args", 4, 5, to="torch_dist")
    assert args == {key: 0, "hf": 0}
    reshard(tmp_path / "out0", tmp_path / "again", to="torch_dist", fsync=False)  # it is complete


def test_expert_bias_keeps_its_type(tmp_path: Path) -> None:
    before = with_mtp(tmp_path / "hf", layers=1)
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", dtype="float16", fsync=False)
    kinds = {t.name: t.dtype.name for t in open_checkpoint(tmp_path / "meg").tensors}
    bias = "mlp.router.expert_bias"
    assert kinds[f"mtp.layers.0.transformer_layer.{bias}"] == "float32"
    assert kinds[f"decoder.layers.1.{bias}"] == "bfloat16"
    assert kinds["decoder.layers.1.mlp.router.weight"] == "float16"
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", dtype="bfloat16", fsync=False)
    name = "model.layers.4.mlp.gate.e_score_correction_bias"
    assert stored(tmp_path / "back")[name] == before[name]


def test_one_layer_too_many_is_named(tmp_path: Path) -> None:
    with_mtp(tmp_path / "hf")
    change_config(tmp_path / "hf", num_nextn_predict_layers=1)
    with pytest.raises(MappingError, match=r"model\.layers\.5\..*num_layers is 4"):
        open_source(tmp_path / "hf")
    change_config(tmp_path / "hf", num_nextn_predict_layers=3)
    with pytest.raises(MappingError, match=r"missing: 'mtp\.2\.attn_norm"):
        open_source(tmp_path / "hf")


# ---- Megatron's other spellings


def singleton(name: str, a: np.ndarray) -> dict[str, np.ndarray]:
    """Experts one by one, gate and up rows apart: Megatron's `singleton_local_shards`."""
    return one_by_one(name, a, "experts.experts.{e}.{module}.{kind}{end}", apart=True)


def fsdp(name: str, a: np.ndarray) -> dict[str, np.ndarray]:
    """Megatron-FSDP's names."""
    return one_by_one(name, a, "experts.{module}.{kind}{e}{end}", apart=True)


def grouped(name: str, a: np.ndarray) -> dict[str, np.ndarray]:
    """Legacy checkpoints of Transformer Engine's grouped layers, as newer releases name them."""
    out = one_by_one(name, a, "experts.{module}.{kind}{e}{end}", apart=False)
    return {n.replace(".transformer_layer.", ".mtp_model_layer."): v for n, v in out.items()}


def sequential(name: str, a: np.ndarray) -> dict[str, np.ndarray]:
    """Legacy checkpoints of local layers, whose norms are modules of their own."""
    out = one_by_one(name, a, "experts.local_experts.{e}.{module}.{kind}{end}", apart=False)
    renames = {
        "linear_q_up_proj.layer_norm_": "q_layernorm.",
        "linear_kv_up_proj.layer_norm_": "kv_layernorm.",
        "linear_fc1.layer_norm_": "pre_mlp_layernorm.",
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.pre_mlp": "pre_mlp",
    }
    for old, new in renames.items():
        out = {n.replace(old, new): v for n, v in out.items()}
    return out


def one_by_one(name: str, a: np.ndarray, form: str, *, apart: bool) -> dict[str, np.ndarray]:
    at, found, part = name.partition("experts.experts.")
    if not found:
        return halves(name, a) if apart else {name: a}
    module, kind = part.split(".")
    out = {}
    for e, one in enumerate(a):
        made = at + form.format(e=e, module=module, kind=kind, end="")
        split = apart and module == "linear_fc1"
        out |= halves(made, one, is_fc1=True) if split else {made: one}
    return out


def halves(name: str, a: np.ndarray, *, is_fc1: bool = False) -> dict[str, np.ndarray]:
    if not is_fc1 and not name.endswith(("linear_fc1.weight", "linear_fc1.bias")):
        return {name: a}
    gate, up = np.split(a, 2)
    return {f"{name}_w": gate, f"{name}_v": up}


@pytest.mark.parametrize("spell", [singleton, fsdp, grouped, sequential])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_every_spelling_of_megatron_is_read(
    name: str,
    spell: Callable[[str, np.ndarray], dict[str, np.ndarray]],
    tmp_path: Path,
    carry: Callable[..., dict[str, np.ndarray]],
) -> None:
    if name == "deepseek_v3":
        with_mtp(tmp_path)
    else:
        save(FIRST[name], tmp_path)
    opened = open_source(tmp_path)
    rng = np.random.default_rng(0)
    arrays = {t.name: rng.random(t.shape).astype(np.float32) for t in opened.catalogue.tensors}
    tensors = [
        GlobalTensor(name=n, shape=a.shape, dtype=dtype("float32")) for n, a in arrays.items()
    ]
    hf = read_side(tensors, family=family(name), config=opened.view.config)
    megatron = carry(hf, arrays, write_side(hf, dialect="megatron", per_layer=True))
    spelled = {n: v for key, a in megatron.items() for n, v in spell(key, a).items()}
    assert set(spelled) != set(megatron)
    side = read_side(
        [GlobalTensor(name=n, shape=a.shape, dtype=dtype("float32")) for n, a in spelled.items()],
        family=family(name),
        config=opened.view.config,
    )
    back = carry(side, spelled, write_side(side, dialect="hf"))
    assert all((back[n] == arrays[n]).all() for n in back)
    assert set(back) == {p.stored for p in hf.placements.values()}


def test_a_fused_down_projection_is_read() -> None:
    config = family("deepseek_v2").read_config(SIZES | DEEPSEEK)
    key = "decoder.layers.1.self_attention.linear_qkv_down_proj.weight"
    tensor = GlobalTensor(name=key, shape=(12 + 16 + 4, 32), dtype=dtype("bfloat16"))
    side = read_side([tensor], config=config, partial=True)
    held = {n: p.base for n, p in side.placements.items()}
    assert held == {
        "layers.1.attn.q_down.weight": (0, 0),
        "layers.1.attn.kv_down.weight": (12, 0),
    }


def test_packed_experts_are_rows(carry: Callable[..., dict[str, np.ndarray]]) -> None:
    """gpt-oss's packed tensors, once decoded, are the transposed of the plain ones."""
    config = family("gpt_oss").read_config(SIZES | EIGHT | {"head_dim": 8})
    rng = np.random.default_rng(0)
    at = "model.layers.2.mlp.experts."
    packed = {
        f"{at}gate_up_proj_blocks": rng.random((8, 48, 32)),
        f"{at}down_proj_blocks": rng.random((8, 32, 24)),
    }
    tensors = [
        GlobalTensor(name=n, shape=a.shape, dtype=dtype("float64")) for n, a in packed.items()
    ]
    side = read_side(tensors, family=family("gpt_oss"), config=config, partial=True)
    plain = carry(side, packed, write_side(side, dialect="hf"))
    assert set(plain) == {f"{at}gate_up_proj", f"{at}down_proj"}
    for name, a in packed.items():
        assert (plain[name.removesuffix("_blocks")] == a.transpose(0, 2, 1)).all()


# ---- configurations


@pytest.mark.parametrize(
    ("name", "keys", "want"),
    [
        ("qwen2_moe", {"decoder_sparse_step": 1}, 1),
        ("qwen2_moe", {"decoder_sparse_step": 2}, (0, 1, 0, 1)),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (0, 1, 0, 0)),
        ("qwen3_moe", {"mlp_only_layers": []}, 1),
        ("deepseek_v2", {"first_k_dense_replace": 3}, (0, 0, 0, 1)),
        ("deepseek_v3", {"first_k_dense_replace": 0}, 1),
        ("llama4", {"interleave_moe_layer_step": 2}, (0, 1, 0, 1)),
        ("llama4", {"interleave_moe_layer_step": 1, "moe_layers": [0]}, (1, 0, 0, 0)),
        ("ernie4_5_moe", {"moe_layer_end_index": 2}, (0, 1, 1, 0)),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, (0, 1, 0, 1)),
        ("ernie4_5_moe", {"moe_layer_start_index": 0}, 1),
    ],
)
def test_which_layers_are_mixtures(name: str, keys: dict[str, Any], want: Any) -> None:
    config = family(name).read_config(SIZES | FIRST[name][2] | keys)
    assert config.moe.moe_layer_freq == want
    written = family(name).write_config(config)
    assert family(name).read_config(written).moe.moe_layer_freq == want


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("qwen2_moe", {"mlp_only_layers": [4]}, "layer 4 is listed in 'mlp_only_layers'"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("llama4", {"moe_layers": "all"}, "moe_layers is 'all'"),
        ("qwen3_moe", {"num_experts": None}, "lacks 'num_experts'"),
        ("deepseek_v2", {"v_head_dim": 0}, "kv_lora_rank is 16"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("mistral4", {"n_group": 2}, "n_group=2"),
        ("mistral4", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank is -1"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "by steps of 0"),
        ("ernie4_5_moe", {"moe_layer_start_index": [1, 2]}, r"in layers \[1, 2\]"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ("phimoe", {"router_jitter_noise": -1.0}, "router_jitter is -1.0"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 1, 2, 1]}, r"moe_topk is \[1, 1, 2, 1\]"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace=1"),
        ("exaone_moe", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
        ("deepseek_v4", {"compress_rate_csa": 8}, "compress_rates=8 for compressed_sparse"),
        ("deepseek_v4", {"layer_types": ["full_attention"] * 4}, "layer_types is"),
        ("deepseek_v4", {"mlp_layer_types": ["moe", "hash_moe"] * 2}, "mlp_layer_types is"),
        ("deepseek_v4", {"num_hash_layers": -1, "mlp_layer_types": None}, "num_hash_layers is -1"),
        (
            "deepseek_v4",
            {"layer_types": None, "compress_ratios": [0, 4, 8, 4, 4]},
            "after the first 4 compress keys",
        ),
        ("deepseek_v4", {"layer_types": None, "compress_ratios": [0, 8, 16, 0]}, r"has \[8, 16\]"),
        ("deepseek_v4", {"o_groups": 3}, "out_groups 3 of 4 heads"),
        ("deepseek_v4", {"index_head_dim": 2}, "less than the 4 elements that turn"),
        ("deepseek_v4", {"index_n_heads": 0}, "index_num_heads is 0"),
        ("deepseek_v4", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
    ],
)
def test_wrong_configurations_are_named(name: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(MappingError, match=said):
        family(name).read_config(SIZES | FIRST[name][2] | keys)


def test_what_a_family_cannot_say_is_refused() -> None:
    v3 = family("deepseek_v3").read_config(SIZES | DEEPSEEK)
    with raises(MappingError, "moe_ffn_hidden_size 24"):
        family("deepseek_v3").write_config(v3.with_fields(shared_ffn_hidden_size=25))
    with pytest.raises(MappingError, match="moe_layer_freq"):
        family("deepseek_v3").write_config(v3.with_fields(moe_layer_freq=(1, 0, 1, 0)))


def test_yarn_reaches_megatrons_args() -> None:
    config = family("deepseek_v2").read_config(SIZES | DEEPSEEK | {"rope_parameters": YARN})
    args = args_from_config(config)
    assert (args["rope_type"], args["rotary_scaling_factor"], args["mscale"]) == (
        "yarn",
        40.0,
        0.707,
    )
    oss = family("gpt_oss").read_config(SIZES | EIGHT | {"head_dim": 8, "rope_parameters": YARN})
    args = args_from_config(oss)
    assert args["position_embedding_type"] == "yarn"
    assert args["yarn_rotary_scaling_factor"] == 40.0
    assert args["window_size"] == (127, 0)
    assert megatron_limits(config, family("deepseek_v2")) == []
    assert megatron_limits(oss, family("gpt_oss")) == []


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        (["moe", "linear_attention", "full_attention", "mlp"], "list of layers is another model's"),
        (["linear_attention", "moe", "full_attention"], "list of layers is too short"),
    ],
)
def test_a_list_of_layers_that_does_not_fit_is_told(
    layers: list[str], told: str, tmp_path: Path
) -> None:
    tiny_model("nemotron_h", tmp_path, **moe_models.HYBRID)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layers_block_type": layers}))
    with raises(MappingError, "backbone.layers.", hint=told):
        reshard(tmp_path, tmp_path / "out", to="torch_dist", fsync=False)
