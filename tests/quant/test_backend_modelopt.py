"""ModelOpt behind our interface, and as the oracle of what we find ourselves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megtool.errors import MissingPackageError, RecipeError, UsageError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.quant.backend_modelopt import build_modelopt_config, calibrate_with_modelopt
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.recorder import ActivationRecorder
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.pipeline.write import write
from megtool.quant.qparams import QParams
from megtool.quant.resolve import ResolvedRecipe, resolve_recipe
from megtool.quant.solve_qparams import solve_qparams
from megtool.quant.verification.verify_folder import verify_folder
from megtool.reshard.execute import ExecutionOptions
from megtool.reshard.writers.target_spec import TargetOptions
from tests.support.errors import raises
from tests.support.models import family_models, tiny_models
from tests.support.quant.loaded import points_of, source_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in float32, so that both compute the same."""
    return tiny_models.llama(
        tmp_path_factory.mktemp("modelopt") / "llama", dtype="float32", num_hidden_layers=2
    )


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [Batch(tokens_BS=torch.randint(0, 128, (2, 24), generator=generator)) for _ in range(3)]


def theirs(folder: Path, decided: ResolvedRecipe, batches: Sequence[Batch]) -> QParams:
    return calibrate_with_modelopt(
        folder, decided.recipe, decided.matched.decisions, points_of(decided), batches
    )


def ours(decided: ResolvedRecipe, batches: Sequence[Batch]) -> QParams:
    source, points = source_of(decided), points_of(decided)
    decoder = load(source, dtype="float32")
    recorder = ActivationRecorder(decoder, points)
    statistics = {}
    for layer in (*decoder.stage.layers, None):
        recorder.start(layer)
        with torch.inference_mode():
            for batch in batches:
                recorder.set_batch(batch)
                decoder(batch)
        statistics |= recorder.collect()
    with CanonicalWeights(source) as weights:
        return solve_qparams(
            points,
            statistics,
            {d.module.name: d for d in decided.matched.decisions},
            decided.recipe,
            weights,
            config=decoder.config,
        )


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize(
    ("recipe", "group"),
    [
        ("fp8", 0),
        ("fp8_per_channel", 0),
        ("fp8_block128", 0),
        ("int8_weight_only", 0),
        ("int4_weight_only", 64),
        ("nvfp4", 0),
        ("mxfp8", 0),
        ("kv_fp8", 0),
    ],
)
def test_amaxes_are_modelopts(recipe: str, group: int, folder: Path, batches: list[Batch]) -> None:
    """Those of weights exactly: codes and scales that follow from them are equal."""
    decided = resolve_recipe(folder, recipe, group_size=group or None)
    expected, found = theirs(folder, decided, batches), ours(decided, batches)
    assert expected.weights.keys() == found.weights.keys()
    assert expected.kv_caches.keys() == found.kv_caches.keys()
    assert expected.weights or expected.kv_caches
    with CanonicalWeights(source_of(decided)) as weights:
        for name, t in expected.weights.items():
            weight = weights(name)
            mine = fake_weight(weight, found.weights[name])
            assert torch.equal(fake_weight(weight, t), mine), name
            assert found.weights[name].input_amax == pytest.approx(t.input_amax, rel=1e-6)
            assert found.weights[name].global_amax in (0, t.global_amax), name
    for name, c in expected.kv_caches.items():
        assert found.kv_caches[name].key_amax == pytest.approx(c.key_amax, rel=1e-6)
        assert found.kv_caches[name].value_amax == pytest.approx(c.value_amax, rel=1e-6)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize(("recipe", "group"), [("int8_sq", 0), ("int4_awq", 64), ("w4a8_awq", 64)])
def test_factors_of_columns_go_to_norms_or_are_stored(
    recipe: str, group: int, folder: Path, batches: list[Batch]
) -> None:
    decided = resolve_recipe(folder, recipe, group_size=group)
    decided = replace(decided, recipe=replace(decided.recipe, algorithm=plain(decided)))
    done = theirs(folder, decided, batches)
    for point in points_of(decided):
        some = [done.weights[m] for m in point.modules if m in done.weights]
        if not some:
            continue
        assert all(
            t.smoothing_scale is not None and t.smoothing_scale.shape == (point.width,)
            for t in some
        )
        assert all(np.array_equal(t.smoothing_scale, some[0].smoothing_scale) for t in some)  # type: ignore[arg-type]
        assert {t.stores_pre_quant_scale for t in some} == {not point.norm}
        assert (point.norm in done.norm_scales) == bool(point.norm)
    with CanonicalWeights(source_of(decided)) as weights:
        for name, t in done.weights.items():
            weight = weights(name)
            columns = torch.from_numpy(t.smoothing_scale)
            error = ((fake_weight(weight, t) - weight) * columns).norm()
            assert error < (0.02 if recipe == "int8_sq" else 0.2) * (weight * columns).norm()


SOME_KEPT = """
description: queries and keys alone, whose norm feeds values too
algorithm: {method: smoothquant, alpha: 0.5}
formats: {int8: {algo: W8A8_SQ_PER_CHANNEL}}
rules:
  - match: {glob: [layers.*.attn.q, layers.*.attn.k, layers.*.mlp.gate, layers.*.mlp.up]}
    format: int8
  - match: {glob: "*"}
    format: keep
"""


@pytest.mark.slow
@pytest.mark.peers
def test_factors_stay_out_of_norms_before_modules_that_are_kept(
    folder: Path, batches: list[Batch], tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(SOME_KEPT)
    decided = resolve_recipe(folder, tmp_path / "recipe.yaml")
    found = theirs(folder, decided, batches)
    assert found.norm_scales.keys() == {f"layers.{i}.mlp_norm" for i in range(2)}
    for name, t in found.weights.items():
        assert t.smoothing_scale is not None
        assert t.stores_pre_quant_scale == (".attn." in name)
    decisions = decided.matched.decisions
    write(
        decided.source,
        decisions,
        found,
        TargetOptions(to="hf", destination=tmp_path / "out"),
        ExecutionOptions(threads=1, fsync=False),
    )
    proof = verify_folder(decided.source, tmp_path / "out", decisions, found, threads=1)
    assert not proof.num_errors, proof.findings


def plain(decided: ResolvedRecipe) -> dict[str, object]:
    """The algorithm without options that it does not have."""
    return {"method": decided.recipe.algorithm["method"]}


@pytest.mark.slow
@pytest.mark.peers
def test_documents_of_a_row_do_not_see_each_other(folder: Path, batches: list[Batch]) -> None:
    tokens = batches[0].tokens_BS
    places = torch.arange(12).repeat(2)
    packed = Batch(
        tokens_BS=tokens,
        positions_BS=places.expand(2, -1).contiguous(),
        documents_BS=torch.arange(2).repeat_interleave(12).expand(2, -1).contiguous(),
    )
    apart = Batch(tokens_BS=tokens.view(4, 12))
    decided = resolve_recipe(folder, "fp8")
    a, b = (theirs(folder, decided, [batch]).weights for batch in (packed, apart))
    whole = theirs(folder, decided, batches[:1]).weights
    name = "layers.1.mlp.down"
    assert a[name].input_amax == pytest.approx(b[name].input_amax, rel=1e-5)
    assert a[name].input_amax != pytest.approx(whole[name].input_amax, rel=1e-5)


def test_what_it_cannot_do_is_said_before_anything_is_loaded(folder: Path) -> None:
    decided = resolve_recipe(folder, "int4_gptq", group_size=64)
    with raises(RecipeError, "ModelOpt", "'gptq'"):
        build_modelopt_config(decided.recipe, decided.matched.decisions)
    decided = resolve_recipe(folder, "nvfp4")
    searched = replace(decided.recipe, algorithm={"method": "max", "four_over_six": True})
    with raises(RecipeError, "four_over_six", hint="--backend megtool"):
        build_modelopt_config(searched, decided.matched.decisions)
    decided = resolve_recipe(folder, "nvfp4_awq")
    with pytest.raises(UsageError, match=r"runs awq_(lite|full) for NVFP4 only on a GPU"):
        build_modelopt_config(decided.recipe, decided.matched.decisions)
    assert build_modelopt_config(decided.recipe, decided.matched.decisions, device="cuda")
    decided = resolve_recipe(folder, "auto_nvfp4_fp8")
    with pytest.raises(RecipeError, match="is not chosen yet"):
        build_modelopt_config(decided.recipe, decided.matched.decisions)


def test_weights_in_one_module_have_no_amaxes_by_rows(tmp_path: Path) -> None:
    source = family_models.save("gpt_neox", tmp_path / "neox")
    for recipe in ("int4_awq", "fp8_per_channel"):
        decided = resolve_recipe(source, recipe)
        with raises(RecipeError, "attn.q", "attn.k", "query_key_value"):
            build_modelopt_config(decided.recipe, decided.matched.decisions)
    decided = resolve_recipe(source, "fp8")
    assert build_modelopt_config(decided.recipe, decided.matched.decisions)


def test_settings_name_each_module(folder: Path) -> None:
    decided = resolve_recipe(folder, "fp8")
    config = build_modelopt_config(decided.recipe, decided.matched.decisions)
    entries = config["quant_cfg"]
    assert entries[0] == {"quantizer_name": "*", "enable": False}
    names = [e["quantizer_name"] for e in entries[1:]]
    assert len(names) == len(set(names)) == 2 * 2 * 7
    assert "model.layers.1.mlp.down_proj.weight_quantizer" in names


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = resolve_recipe(folder, "fp8")
    monkeypatch.setitem(sys.modules, "modelopt", None)
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    with pytest.raises(MissingPackageError, match=r"megtool\[modelopt\]"):
        theirs(folder, decided, [])
