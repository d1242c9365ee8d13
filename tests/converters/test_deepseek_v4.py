"""DeepSeek-V4 as it is published: names, settings, numbers of four and eight bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, lint, quantize, reshard, verify
from megtool.convert.families.detection import family
from megtool.errors import FormatError, RecipeError
from megtool.formats import open_checkpoint
from megtool.quant.resolve import resolve_recipe
from megtool.source.open import open_source
from megtool.spec.model_config import CONFIG_FIELDS
from tests.support.errors import raises
from tests.support.folders import read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models import family_models, mtp_models
from tests.support.models.moe_cases import CASES, FIRST, SIZES, case_config, change_config, save

pytest.importorskip("transformers")


def test_deepseek_v4_travels_as_published(tmp_path: Path) -> None:
    """With its layer of multi-token prediction, by Megatron's args alone."""
    before = mtp_models.save_deepseek_v4(tmp_path / "hf")
    copies = {"mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"}
    layout = {"tp": 2, "pp": 2, "ep": 2}
    report = reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False, **layout)
    assert {d.name for d in report.dropped} == copies
    assert not any(d.is_lost for d in report.dropped)
    held = {t.name: (t.shape, t.dtype.name) for t in open_checkpoint(tmp_path / "meg").tensors}
    layer, inner = "decoder.layers.", "mtp.layers.0.transformer_layer."
    assert held["mtp.layers.0.e_proj.weight"] == ((32, 32), "bfloat16")
    assert held["mtp.layers.0.hc_head_fn"] == held["decoder.hc_head_fn"] == ((2, 64), "float32")
    assert held[inner + "mlp.router.expert_bias"] == ((4,), "float32")
    assert inner + "mlp.router.tid2eid" not in held
    assert held[layer + "0.mlp.router.tid2eid"] == ((101, 2), "int64")
    assert held[layer + "1.mlp_hyper_connection.alpha_res"] == ((1,), "float32")
    attention = layer + "{}.self_attention.core_attention."
    assert held[attention.format(1) + "attn_sink"][0] == (4,)
    assert held[attention.format(1) + "compressor.ape"] == ((4, 32), "float32")
    assert held[attention.format(2) + "compressor.ape"] == ((8, 16), "float32")
    assert held[attention.format(3) + "indexer.compressor.linear_wkv.weight"][0] == (16, 32)
    for file in (tmp_path / "meg" / "release" / "hf").iterdir():
        file.unlink()
    back = reshard(tmp_path / "meg", tmp_path / "back", to="hf", family="deepseek_v4", fsync=False)
    assert [d for d in back.dropped if d.is_lost] == []
    assert stored(tmp_path / "back") == {n: t for n, t in before.items() if n not in copies}
    config = read_config(tmp_path / "back")
    assert config["compress_ratios"] == [0, 4, 8, 4, 0]
    assert (config["num_hash_layers"], config["qk_rope_head_dim"]) == (1, 4)
    cast = reshard(
        tmp_path / "hf", tmp_path / "cast", to="torch_dist", dtype="float16", fsync=False
    )
    assert not any(d.is_lost for d in cast.dropped)
    kinds = {t.name: t.dtype.name for t in open_checkpoint(tmp_path / "cast").tensors}
    assert {k for n, k in kinds.items() if "hc_head" in n or "hyper" in n} == {"float32"}
    assert kinds["decoder.layers.1.self_attention.linear_kv_proj.weight"] == "float16"


@pytest.mark.parametrize("to", ["megatron", "zarr", "safetensors"])
def test_deepseek_v4_travels_in_other_formats(to: str, tmp_path: Path) -> None:
    before = mtp_models.save_deepseek_v4(tmp_path / "hf")
    layout = {"tp": 2, "pp": 2, "ep": 2} if to == "megatron" else {}
    reshard(tmp_path / "hf", tmp_path / "other", to=to, fsync=False, **layout)
    like = {"like": tmp_path / "hf"} if to == "safetensors" else {}
    reshard(tmp_path / "other", tmp_path / "back", to="hf", fsync=False, **like)
    copies = set() if like else {"mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"}
    assert stored(tmp_path / "back") == {n: t for n, t in before.items() if n not in copies}


def test_transformers_own_names_of_deepseek_v4_are_read(tmp_path: Path) -> None:
    case = FIRST["deepseek_v4"]
    save(case, tmp_path / "published")
    for original in (True, False):
        folder = tmp_path / f"{original}"
        save(case, folder, save_original_format=original)
        assert any(n.startswith("model.layers.0.") for n in stored(folder))
        assert verify(folder, tmp_path / "published").verdict == "equal"


def test_published_settings_of_deepseek_v4_are_those_of_transformers() -> None:
    """Released files have other keys, which transformers turns into its own."""
    case = next(c for c in CASES if c[0] == "deepseek_v4" and "rope_parameters" in c[2])
    keys = {k: v for k, v in case[2].items() if k not in ("layer_types", "rope_parameters")}
    yarn = {"type" if k == "rope_type" else k: v for k, v in case[2]["rope_parameters"].items()}
    keys |= {
        "compress_ratios": [4, 0, 4, 0],
        "num_hash_layers": 0,
        "n_shared_experts": 1,
        "rope_scaling": {k: v for k, v in yarn.items() if k != "rope_theta"},
        "rope_theta": 10000.0,
        "qk_rope_head_dim": 4,
    }
    del keys["partial_rotary_factor"], keys["mlp_layer_types"]
    found = family("deepseek_v4")
    ours, theirs = found.read_config(SIZES | keys), found.read_config(case_config(case).to_dict())
    differ = {name for name in CONFIG_FIELDS if ours.get(name) != theirs.get(name)}
    assert differ == {"extra"}
    of_theirs = found.read_config(type(case_config(case))(**SIZES | keys).to_dict())
    assert (ours.compression.compress_ratios, ours.positions.rope_scaling) == (
        of_theirs.compression.compress_ratios,
        of_theirs.positions.rope_scaling,
    )


def test_experts_in_fp4_and_linear_layers_in_fp8_are_decoded(tmp_path: Path) -> None:
    """DeepSeek-V4 as it ships: scales beside the weights, powers of two, blocks with edges."""
    want = mtp_models.save_deepseek_v4_quantized(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, ep=2, fsync=False)
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    assert stored(tmp_path / "back") == want
    assert {"quantization_config", "expert_dtype"}.isdisjoint(read_config(tmp_path / "back"))


def test_a_scale_of_deepseek_v4_without_its_weight_is_refused(tmp_path: Path) -> None:
    mtp_models.save_deepseek_v4_quantized(tmp_path)
    file, lost = tmp_path / "model.safetensors", "layers.0.attn.wkv.weight"
    held = load_file(file)
    del held[lost]
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(FormatError, match="belongs to a quantized weight that is missing"):
        open_source(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sizes that blocks of 128 divide, in bfloat16."""
    return family_models.save("deepseek_v4", tmp_path_factory.mktemp("plain") / "hf")


@pytest.mark.slow
def test_it_is_quantized_and_exported_as_its_base_models_are(plain: Path, tmp_path: Path) -> None:
    """FP8 in blocks with float32 scales; what compresses keys, and mixes residuals, as it was."""
    own, out = tmp_path / "own", tmp_path / "out"
    quantize(plain, own, recipe="fp8_block128", fsync=False)
    names = {f.id for f in lint(own, target="vllm").findings}
    assert names == {"deepseek-v4-form"}
    export(own, out, to="fp8-blocks", fsync=False)
    assert verify(own, out).verdict == "equal"
    assert verify(plain, out).verdict == "close"
    for engine in ("vllm", "sglang"):
        assert lint(out, target=engine).findings == ()
    before, after = stored(plain), stored(out)
    scales = {n for n in after if n.endswith(".scale")}
    assert set(after) - scales == set(before)
    changed = {n.removesuffix(".weight") for n in before if after[n] != before[n]}
    assert changed == {n.removesuffix(".scale") for n in scales}
    parts = {".".join(n.split(".")[2:]) for n in changed}
    attention = {f"attn.{x}" for x in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")}
    experts = {
        f"ffn.{e}.w{n}" for e in ("shared_experts", "experts.0", "experts.3") for n in (1, 2, 3)
    }
    assert attention | experts <= parts
    assert not any("compressor" in p or "indexer" in p or "hc_" in p for p in parts)
    assert after["layers.0.attn.wq_a.scale"][:2] == ("F32", (1, 1))
    config = read_config(out)
    assert config["expert_dtype"] == "fp8"
    assert config["quantization_config"]["modules_to_not_convert"] == ["layers.0.attn.indexer.wq_b"]
    back = tmp_path / "back"
    export(out, back, to="unified", fsync=False)
    assert stored(back) == stored(own)


@pytest.mark.parametrize("recipe", ["kv_fp8", "fp8_kv_fp8", "mixed_nvfp4_fp8"])
def test_its_cache_has_no_scales(plain: Path, tmp_path: Path, recipe: str) -> None:
    with raises(RecipeError, "has no scales to calibrate"):
        resolve_recipe(plain, recipe)


def test_engines_run_it_in_blocks_alone(plain: Path) -> None:
    for recipe in ("fp8", "nvfp4"):
        with raises(RecipeError, "in FP8 blocks, and in the mix", hint="--to fp8-blocks"):
            resolve_recipe(plain, recipe, target="vllm")
    assert resolve_recipe(plain, "fp8_block128", target="vllm").matched.decisions


def test_what_is_published_is_sound_to_lint(tmp_path: Path) -> None:
    """The fused projection of these sizes has blocks of two matrices; nothing else is wrong."""
    folder = tmp_path / "hf"
    mtp_models.save_deepseek_v4_quantized(folder)
    (folder / "tokenizer.json").write_text("{}")

    def found() -> dict[str, str]:
        return {f.id: f.module for f in lint(folder, target="vllm").findings}

    assert set(found()) == {"divides"}
    change_config(folder, expert_dtype="fp8")
    assert found()["expert-dtype"].startswith("layers.")
    change_config(folder, expert_dtype="fp4")
    held = load_file(folder / "model.safetensors")
    wrong = {
        "layers.1.ffn.experts.2.w2.scale": lambda t: t[:, :1].contiguous(),
        "layers.1.attn.wq_b.scale": lambda t: t.float(),
        "layers.0.ffn.shared_experts.w1.scale": lambda t: (
            t.view(torch.uint8).fill_(255).view(t.dtype)
        ),
    }
    for (name, change), rule in zip(
        wrong.items(), ("fp8-scales", "expert-dtype", "scale-value"), strict=True
    ):
        changed = held | {name: change(held[name].clone())}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        assert found()[rule] == name.removesuffix(".scale"), rule
