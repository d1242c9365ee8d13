"""What quantized folders hold: decoded by the reader, from any layout, after any fault."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import reshard, verify
from megtool.errors import (
    CalibrationError,
    DestinationError,
    FormatError,
    MappingError,
    MegtoolError,
    SourceChangedError,
)
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.packed_tensors import pack
from megtool.quant.qparams import QParams
from megtool.quant.resolve import ResolvedRecipe, resolve_recipe
from megtool.quantize.layout.write import check_storable
from megtool.source.open import open_source
from megtool.storage.files import Files
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed
from tests.support.errors import raises
from tests.support.folders import contents, file_states, staging_folders, stored_tensors
from tests.support.models import tiny_models
from tests.support.quant.write_runs import (
    canonical_values,
    make_qparams,
    shared_amaxes,
    write_quantized,
)

RECIPES = [
    "fp8",
    "fp8_per_channel",
    "fp8_block128",
    "int8_sq",
    "int8_weight_only",
    "int4_weight_only",
    "w4a8_awq",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "w4a16_nvfp4",
    "mixed_nvfp4_fp8",
    "kv_fp8",
    "kv_nvfp4",
]
SIZE = {"num_hidden_layers": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("w") / "source", **SIZE)


def held(folder: Path) -> dict[str, Any]:
    """What hf_quant_config.json says."""
    said: dict[str, Any] = json.loads((folder / "hf_quant_config.json").read_text())
    return said["quantization"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", RECIPES)
def test_decoded_it_is_what_simulation_says(source: Path, tmp_path: Path, recipe: str) -> None:
    import torch

    before = file_states(source)
    decided = resolve_recipe(source, recipe)
    settlement = make_qparams(decided)
    report = write_quantized(source, tmp_path / "out", recipe, settlement)
    assert file_states(source) == before
    original, found = canonical_values(source), canonical_values(tmp_path / "out")
    assert original.keys() == found.keys()
    shared = shared_amaxes(decided, settlement)
    for name, x in original.items():
        t = shared.get(name.removesuffix(".weight"))
        if t is None:
            assert np.array_equal(x, found[name]), name
            continue
        want = fake_weight(torch.from_numpy(x), t, dtype="bfloat16")
        assert np.array_equal(want.to(torch.bfloat16).float().numpy(), found[name]), name
    assert report.num_bytes < open_source(source).catalogue.num_bytes or recipe.startswith("kv")
    assert set(report.files) == {p.name for p in (tmp_path / "out").iterdir()} - {"megtool.json"}
    assert not staging_folders(tmp_path)


def test_fp8_weights_of_one_layer_have_its_scale(source: Path, tmp_path: Path) -> None:
    """Engines that find several round all weights but one again."""
    write_quantized(source, tmp_path / "out", "fp8")
    original, raw = canonical_values(source), stored_tensors(tmp_path / "out")
    layer = "model.layers.0"
    for names in (("attn.q", "attn.k", "attn.v"), ("attn.o",), ("mlp.gate", "mlp.up")):
        top = max(np.abs(original[f"layers.0.{n}.weight"]).max() for n in names)
        for name in names:
            part, last = name.split(".")
            stored = f"{layer}.{'self_attn' if part == 'attn' else part}.{last}_proj.weight_scale"
            (scale,) = np.frombuffer(raw[stored][2], "<f4")
            assert scale == pytest.approx(top / 448, rel=1e-6), stored


@pytest.mark.parametrize("recipe", ["fp8", "int4_weight_only", "nvfp4"])
def test_any_layout_of_the_source_gives_the_same_bytes(
    source: Path, tmp_path: Path, recipe: str
) -> None:
    write_quantized(source, tmp_path / "from-hf", recipe)
    reshard(source, tmp_path / "dist", to="torch_dist", tp=2, pp=2)
    write_quantized(tmp_path / "dist", tmp_path / "from-dist", recipe, threads=2)
    reshard(source, tmp_path / "ranks", to="megatron", tp=2)
    write_quantized(tmp_path / "ranks", tmp_path / "from-ranks", recipe)
    want = contents(tmp_path / "from-hf")
    assert want
    for name in ("from-dist", "from-ranks"):
        assert contents(tmp_path / name) == want
    assert (tmp_path / "from-dist" / "tokenizer.json").exists()


def test_small_units_and_narrow_memory_change_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for recipe in ("fp8_block128", "nvfp4", "int4_weight_only"):
        write_quantized(source, tmp_path / f"{recipe}-a", recipe)
        monkeypatch.setattr(pack, "UNIT_BYTES", 20_000)
        more = {"threads": 3, "memory": "1"}
        write_quantized(source, tmp_path / f"{recipe}-b", recipe, max_shard_size="100000", **more)
        monkeypatch.undo()
        assert stored_tensors(tmp_path / f"{recipe}-a") == stored_tensors(tmp_path / f"{recipe}-b")


def test_a_quantized_source_is_decoded_and_says_nothing_of_its_past(
    source: Path, tmp_path: Path
) -> None:
    write_quantized(source, tmp_path / "fp8", "fp8")
    write_quantized(tmp_path / "fp8", tmp_path / "int8", "int8_weight_only")
    reshard(tmp_path / "fp8", tmp_path / "plain", to="hf")
    write_quantized(tmp_path / "plain", tmp_path / "again", "int8_weight_only")
    assert stored_tensors(tmp_path / "int8") == stored_tensors(tmp_path / "again")
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == held(tmp_path / "int8")["quant_algo"]
    assert held(tmp_path / "int8")["quant_algo"] == "W8A16"


# ---- treatments


def one(decided: ResolvedRecipe, module: str, **more: Any) -> QParams:
    """Of all modules, with more said of one."""
    out = make_qparams(decided)
    out.weights[module] = dataclasses.replace(out.weights[module], **more)
    return out


def test_factors_of_columns_are_stored_or_taken_by_the_norm(source: Path, tmp_path: Path) -> None:
    decided = resolve_recipe(source, "int4_awq")
    factors = np.exp2(np.arange(128) % 3 - 1).astype(np.float32)
    told = one(decided, "layers.1.attn.o", smoothing_scale=factors, stores_pre_quant_scale=True)
    for name in "qkv":
        t = told.weights[f"layers.0.attn.{name}"]
        told.weights[t.module] = dataclasses.replace(t, smoothing_scale=factors)
    told.norm_scales["layers.0.attn_norm"] = factors
    write_quantized(source, tmp_path / "out", "int4_awq", told)
    original, found = canonical_values(source), canonical_values(tmp_path / "out")
    norm = "layers.0.attn_norm.weight"
    assert np.array_equal(found[norm] * factors, original[norm])
    for name in ("layers.0.attn.q", "layers.1.attn.o"):
        x, y = original[f"{name}.weight"], found[f"{name}.weight"]
        y = y / factors if name.startswith("layers.0") else y
        assert 0.01 < np.linalg.norm(x - y) / np.linalg.norm(x) < 0.3
    raw = stored_tensors(tmp_path / "out")
    scales = [n for n in raw if n.endswith("pre_quant_scale")]
    assert scales == ["model.layers.1.self_attn.o_proj.pre_quant_scale"]
    assert raw[scales[0]][:2] == ("BF16", (128,))
    assert held(tmp_path / "out")["pre_quant_scale"] is True


def test_codes_that_were_chosen_are_stored(source: Path, tmp_path: Path) -> None:
    decided = resolve_recipe(source, "int4_gptq")
    codes = np.random.default_rng(0).integers(-8, 8, (128, 128)).astype(np.int8)
    amax = np.full((128, 1), 14.0, np.float32)
    told = one(decided, "layers.0.attn.o", codes=codes, amax=amax)
    write_quantized(source, tmp_path / "out", "int4_gptq", told)
    assert np.array_equal(canonical_values(tmp_path / "out")["layers.0.attn.o.weight"], codes * 2.0)
    told = one(decided, "layers.0.attn.o", codes=codes)
    with pytest.raises(CalibrationError, match="calibration chose codes but no amax"):
        write_quantized(source, tmp_path / "no", "int4_gptq", told)


def test_an_amax_that_is_smaller_saturates(source: Path, tmp_path: Path) -> None:
    decided = resolve_recipe(source, "int8_weight_only")
    told = one(decided, "layers.0.mlp.down", amax=np.full(128, 0.127, np.float32))
    write_quantized(source, tmp_path / "out", "int8_weight_only", told)
    name = "layers.0.mlp.down.weight"
    x, y = canonical_values(source)[name], canonical_values(tmp_path / "out")[name]
    assert np.abs(y).max() < 0.129
    assert np.abs(x - y)[np.abs(x) < 0.127].max() <= 0.0006
    told = one(decided, "layers.0.mlp.down", amax=np.ones(3, np.float32))
    with pytest.raises(CalibrationError, match="does not fit"):
        write_quantized(source, tmp_path / "no", "int8_weight_only", told)


def test_what_calibration_did_not_find_is_no_scale(source: Path, tmp_path: Path) -> None:
    decided = resolve_recipe(source, "fp8")
    with pytest.raises(CalibrationError, match="needs a static input scale"):
        write_quantized(
            source, tmp_path / "o", "fp8", one(decided, "layers.0.mlp.up", input_amax=0.0)
        )
    missing = make_qparams(decided)
    del missing.weights["layers.1.attn.k"]
    with raises(CalibrationError, "layers.1.attn.k", "FP8"):
        write_quantized(source, tmp_path / "o", "fp8", missing)
    told = make_qparams(decided)
    told.norm_scales["layers.9.attn_norm"] = np.ones(128, np.float32)
    with pytest.raises(MappingError, match=r"layers\.9\.attn_norm"):
        write_quantized(source, tmp_path / "o", "fp8", told)
    assert not (tmp_path / "o").exists()
    assert not staging_folders(tmp_path)


@pytest.mark.parametrize("recipe", ["fp8", "int8_weight_only", "fp8_block128", "mxfp4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(tmp_path: Path, recipe: str, bad: float) -> None:
    from safetensors.torch import load_file, save_file

    file = tiny_models.llama(tmp_path / "source", num_hidden_layers=1) / "model.safetensors"
    held = load_file(file)
    held["model.layers.0.mlp.up_proj.weight"][77, 5] = bad
    save_file(held, file, metadata={"format": "pt"})
    with raises(FormatError, tensor="layers.0.mlp.up.weight"):
        write_quantized(tmp_path / "source", tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


# ---- families


def family_folder(folder: Path, case: tuple[str, str, str], sizes: dict[str, Any]) -> Path:
    """A model of transformers with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{case[2]}Config")(**sizes)
    model = getattr(transformers, case[1])(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


@pytest.mark.parametrize("recipe", ["fp8", "int4_weight_only", "nvfp4", "kv_fp8"])
def test_weights_stored_as_one_are_one_module(tmp_path: Path, recipe: str) -> None:
    case = ("phi3", "Phi3ForCausalLM", "Phi3")
    family_folder(tmp_path / "phi", case, SIZES)
    write_quantized(tmp_path / "phi", tmp_path / "out", recipe)
    raw = stored_tensors(tmp_path / "out")
    qkv = "model.layers.0.self_attn.qkv_proj"
    if recipe == "kv_fp8":
        assert held(tmp_path / "out")["kv_cache_quant_algo"] == "FP8"
        scale = np.frombuffer(raw["model.layers.0.self_attn.k_proj.k_scale"][2], np.float32)
        assert raw["model.layers.0.self_attn.v_proj.v_scale"][:2] == ("F32", ())
        assert scale.tolist() == [2.0]
        assert f"{qkv}.weight_scale" not in raw
        return
    shapes = {n.removeprefix(qkv): t[1] for n, t in raw.items() if n.startswith(qkv)}
    scale_shape = {"fp8": (), "int4_weight_only": (256, 1), "nvfp4": (256, 8)}[recipe]
    assert shapes[".weight_scale"] == scale_shape
    original, found = canonical_values(tmp_path / "phi"), canonical_values(tmp_path / "out")
    for name, x in original.items():
        error = np.linalg.norm(x - found[name]) / np.linalg.norm(x)
        assert error < 0.15, name
    assert held(tmp_path / "out")["exclude_modules"] == ["lm_head"]


def test_parts_of_one_tensor_need_one_format(tmp_path: Path) -> None:
    family_folder(tmp_path / "phi", ("phi3", "Phi3ForCausalLM", "Phi3"), SIZES)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "description: one of three\nformats: {a: {algo: W8A16}}\nrules:\n"
        "  - {match: {glob: '*.attn.q'}, format: a}\n  - {match: {glob: '*'}, format: keep}\n"
    )
    decided = resolve_recipe(tmp_path / "phi", recipe)
    with raises(MappingError, "attn.q", "W8A16", "layers.0.attn.k"):
        check_storable(decided.source, decided.matched.decisions)


@pytest.mark.parametrize(
    ("case", "sizes", "why"),
    [
        (
            ("gpt2", "GPT2LMHeadModel", "GPT2"),
            {"n_embd": 128, "n_layer": 1, "n_head": 2, "vocab_size": 128, "n_positions": 64},
            "transposed",
        ),
        (
            ("gpt_oss", "GptOssForCausalLM", "GptOss"),
            {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": None},
            "stacked",
        ),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_what_no_folder_can_hold_is_refused_at_once(
    tmp_path: Path, case: tuple[str, str, str], sizes: dict[str, Any], why: str
) -> None:
    sizes = {k: v for k, v in sizes.items() if v is not None}
    family_folder(tmp_path / "source", case, sizes)
    decided = resolve_recipe(tmp_path / "source", "int8_weight_only")
    with pytest.raises(MappingError, match=why) as e:
        check_storable(decided.source, decided.matched.decisions)
    hint = e.value.hint or ""
    if case[0] == "gpt2":
        assert "--recipe fp8" in hint
    else:  # the rule it gives names all of them
        recipe = tmp_path / "r.yaml"
        recipe.write_text(
            "description: by the hint\nformats: {a: {algo: W8A16}}\nrules:\n"
            f"  {hint.partition(': ')[2]}\n"
            "  - {match: {kind: linear}, format: a}\n  - {match: {glob: '*'}, format: keep}\n"
        )
        kept = resolve_recipe(tmp_path / "source", recipe)
        assert any(d.format is not None for d in kept.matched.decisions)
        check_storable(kept.source, kept.matched.decisions)
    with pytest.raises(MappingError, match=why):
        write_quantized(tmp_path / "source", tmp_path / "out", "int8_weight_only")
    assert not staging_folders(tmp_path)


def test_gammas_around_zero_take_factors(tmp_path: Path) -> None:
    case = ("gemma", "GemmaForCausalLM", "Gemma")
    family_folder(tmp_path / "gemma", case, SIZES)
    decided = resolve_recipe(tmp_path / "gemma", "int8_weight_only")
    told = make_qparams(decided)
    factors = np.linspace(0.5, 3, 128).astype(np.float32)
    told.norm_scales["layers.0.mlp_norm"] = factors
    write_quantized(tmp_path / "gemma", tmp_path / "out", "int8_weight_only", told)
    name = "layers.0.mlp_norm.weight"
    x, y = canonical_values(tmp_path / "gemma")[name], canonical_values(tmp_path / "out")[name]
    want = (1 + x) / factors - 1
    assert np.abs(y - want).max() <= 2.0**-8
    assert "lm_head" in held(tmp_path / "out")["exclude_modules"], "tied, and a module to engines"


def test_experts_are_stored_one_by_one(tmp_path: Path) -> None:
    tiny_models.moe(tmp_path / "moe")
    write_quantized(tmp_path / "moe", tmp_path / "out", "nvfp4")
    raw = stored_tensors(tmp_path / "out")
    expert = "model.layers.2.mlp.experts.3.up_proj"
    assert {n.removeprefix(expert) for n in raw if n.startswith(expert)} == {
        ".weight",
        ".weight_scale",
        ".weight_scale_2",
        ".input_scale",
    }
    routers = [f"model.layers.{i}.mlp.gate" for i in (1, 2, 3)]
    assert held(tmp_path / "out")["exclude_modules"] == ["lm_head", *routers]


# ---- digests, dry runs, faults


def test_digests_of_what_is_kept_are_true(source: Path, tmp_path: Path) -> None:
    reshard(source, tmp_path / "digested", digest="all")
    write_quantized(tmp_path / "digested", tmp_path / "out", "fp8")
    report = verify(tmp_path / "out")
    assert report.digests[0].matching > 0
    assert report.digests[0].differing == 0
    assert report.digests[0].unverified == ()  # packed weights too, by the digests of files


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    told = write_quantized(source, tmp_path / "out", "nvfp4", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    report = write_quantized(source, tmp_path / "out", "nvfp4")
    assert (told.num_bytes, told.files) == (report.num_bytes, report.files)
    with raises(DestinationError, id="destination-exists"):
        write_quantized(source, tmp_path / "out", "nvfp4", dry_run=True)


@pytest.mark.parametrize(
    "fault",
    [
        errno.ENOSPC,
        "torn",
        *(pytest.param(f, marks=pytest.mark.slow) for f in (errno.EIO, "short", "kill")),
    ],
)
def test_whatever_fails_the_folder_is_absent_or_complete(tmp_path: Path, fault: int | str) -> None:
    small = tiny_models.llama(tmp_path / "source", num_hidden_layers=1)
    before = file_states(small)
    calm = FaultyFiles()
    out = tmp_path / "out"
    write_quantized(small, out, "nvfp4", files=calm, fsync=True)
    expected = contents(out)
    for n in range(1, len(calm.calls) + 1, 9):
        Files().remove(out)
        files = FaultyFiles(n, fault)
        try:
            write_quantized(small, out, "nvfp4", files=files, fsync=True)
        except (MegtoolError, Killed):
            assert contents(out) in (None, expected), (n, calm.calls[n - 1])
        if contents(out) is None:
            write_quantized(small, out, "nvfp4")
        else:
            with raises(DestinationError, id="destination-exists"):
                write_quantized(small, out, "nvfp4")
        assert contents(out) == expected, (n, calm.calls[n - 1])
        assert file_states(small) == before
        assert not staging_folders(tmp_path)


def strike(run: Callable[[Files], object], calls: Sequence[str], name: str) -> None:
    with pytest.raises(Killed):
        run(FaultyFiles(calls.index(name), "kill"))


def test_a_killed_run_goes_on_and_repairs(source: Path, tmp_path: Path) -> None:
    calm, out = FaultyFiles(), tmp_path / "out"
    write_quantized(source, out, "int8_sq", files=calm)
    expected = contents(out)
    Files().remove(out)
    strike(lambda f: write_quantized(source, out, "int8_sq", files=f), calm.calls, "rename")
    file = next((tmp_path / ".out.megtool" / "tree").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.write_bytes(data)
    report = write_quantized(source, out, "int8_sq")
    assert report.copied is not None
    assert report.copied.verified > 0
    assert report.copied.repaired > 0
    assert contents(out) == expected


def test_other_treatments_do_not_resume(source: Path, tmp_path: Path) -> None:
    calm, out = FaultyFiles(), tmp_path / "out"
    write_quantized(source, out, "fp8", files=calm)
    Files().remove(out)
    strike(lambda f: write_quantized(source, out, "fp8", files=f), calm.calls, "rename")
    told = one(resolve_recipe(source, "fp8"), "layers.0.attn.o", input_amax=7.0)
    report = write_quantized(source, out, "fp8", told)
    assert report.copied is not None
    assert report.copied.verified == 0
    scale = stored_tensors(out)["model.layers.0.self_attn.o_proj.input_scale"][2]
    assert np.frombuffer(scale, np.float32).tolist() == [0.015625]


def test_a_source_that_changes_meanwhile_is_told(tmp_path: Path) -> None:
    folder = tiny_models.llama(tmp_path / "source", num_hidden_layers=1)
    file = folder / "model.safetensors"

    def meddle(stage: str, done: int, total: int) -> None:
        if stage == "quantize" and done:
            file.write_bytes(file.read_bytes())

    with pytest.raises(SourceChangedError):
        write_quantized(folder, tmp_path / "out", "int8_weight_only", progress=meddle)
    assert not (tmp_path / "out").exists()
