"""ModelOpt on our decoder finds what it finds on the transformers model, in every layout."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megtool.errors import CalibrationError, MissingPackageError
from megtool.model.batch import Batch
from megtool.options.execution import ExecutionOptions
from megtool.options.target import TargetOptions
from megtool.parallel.process_groups import Group
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.modelopt.unit_solver import ModelOptSolver
from megtool.quant.qparams import QParams, WeightQParams
from megtool.quant.resolve import resolve_recipe
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quantize.layout.write import write
from megtool.quantize.verification.verify_folder import verify_folder
from tests.support.models import family_models, tiny_models
from tests.support.quant.calibrated import (
    Case,
    calibrate_by_modelopt,
    case,
    modelopt_on_rank,
    random_moe,
    tokens,
)
from tests.support.quant.loaded import source_of
from tests.support.quant.modelopt_on_transformers import (
    calibrate_on_transformers,
    emulated_kernels,
    own_config,
)
from tests.support.worlds.gloo_world import run_world

pytestmark = [pytest.mark.peers, pytest.mark.slow]

MODELOPT_GPTQ = """
algorithm: {method: gptq, perc_damp: 0.01, layerwise: {enable: true,
            get_qdq_activations_from_prev_layer: true}}
quant_cfg:
  - {quantizer_name: "*", enable: false}
  - {quantizer_name: "*.layers.*weight_quantizer", cfg: {num_bits: 4, block_sizes: {-1: 64}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in float32, so that both compute the same."""
    return tiny_models.llama(
        tmp_path_factory.mktemp("modelopt") / "llama", dtype="float32", num_hidden_layers=2
    )


def plain(made: Case) -> Case:
    """The case with the algorithm alone, without options that ModelOpt does not have."""
    recipe = made.decided.recipe
    algorithm = {k: v for k, v in recipe.algorithm.items() if k in ("method", "alpha", "clip")}
    decided = replace(made.decided, recipe=replace(recipe, algorithm=algorithm))
    return replace(made, decided=decided)


def same_branch(found: WeightQParams, wanted: WeightQParams) -> None:
    """The same weight; a scale next to a tie of bfloat16, and codes then, may be others."""
    np.testing.assert_allclose(found.smoothing_scale, wanted.smoothing_scale, rtol=2**-7)
    zeros = torch.zeros(wanted.codes.shape)  # type: ignore[union-attr]
    f, w = (fake_weight(zeros, t) for t in (found, wanted))
    assert (f - w).norm() / w.norm() < 0.02, wanted.module


def same(found: QParams, wanted: QParams, *, rtol: float = 2e-5) -> None:
    """The same modules with the same parameters, up to the rounding of activations."""
    assert found.weights.keys() == wanted.weights.keys()
    assert found.kv_caches.keys() == wanted.kv_caches.keys()
    assert found.norm_scales.keys() == wanted.norm_scales.keys()
    assert wanted.weights or wanted.kv_caches
    for name, w in wanted.weights.items():
        f = found.weights[name]
        assert f.stores_pre_quant_scale == w.stores_pre_quant_scale, name
        assert f.input_amax == pytest.approx(w.input_amax, rel=rtol), name
        if w.branch is None:  # else it is of what matrices rounded to bfloat16 leave
            assert f.global_amax == pytest.approx(w.global_amax, rel=rtol), name
        if w.branch is not None:
            same_branch(f, w)
            continue
        for key in ("amax", "smoothing_scale", "codes"):
            a, b = getattr(f, key), getattr(w, key)
            assert (a is None) == (b is None), (name, key)
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7, err_msg=f"{name} {key}")
    for name, c in wanted.kv_caches.items():
        k = found.kv_caches[name]
        assert (k.key_amax, k.value_amax) == pytest.approx((c.key_amax, c.value_amax), rel=rtol)
    for name, scale in wanted.norm_scales.items():
        np.testing.assert_allclose(found.norm_scales[name], scale, rtol=rtol, err_msg=name)


RECIPES = [
    ("fp8", 0),
    ("fp8_per_channel", 0),
    ("fp8_block128", 0),
    ("int8_weight_only", 0),
    ("int8_sq", 0),
    ("int4_weight_only", 64),
    ("int4_awq", 64),
    ("w4a8_awq", 64),
    ("nvfp4", 0),
    ("nvfp4_awq", 0),
    ("nvfp4_svdquant", 0),
    ("mxfp8", 0),
    ("kv_fp8", 0),
]


@pytest.mark.parametrize(("recipe", "group"), RECIPES)
def test_parameters_are_those_of_the_transformers_model(
    recipe: str, group: int, folder: Path
) -> None:
    made = plain(case(folder, recipe, group_size=group or None))
    wanted = calibrate_on_transformers(folder, made.decided, made.batches)
    same(calibrate_by_modelopt(made), wanted)


PRESETS, GENERAL = "configs/ptq/presets/model", "general/ptq"
OWN = [
    *(f"{PRESETS}/{n}" for n in ("int8_smoothquant", "nvfp4_awq_clip", "nvfp4_awq_full")),
    *(f"{PRESETS}/{n}" for n in ("nvfp4_w4a4_weight_mse_fp8_sweep", "nvfp4_four_over_six")),
    *(f"{PRESETS}/{n}" for n in ("w4a16_nvfp4", "w4a8_nvfp4_fp8", "fp8_per_channel_per_token")),
    f"{GENERAL}/nvfp4_act_headroom-kv_fp8_cast",
]


QAD = "general/qad"


@pytest.mark.parametrize(
    ("recipe", "chooses"), [("nvfp4_lsq-mse_init-fp8_kv", 0), ("nvfp4_dual_lsq-mse_init-fp8_kv", 1)]
)
def test_learned_scales_begin_as_modelopts(recipe: str, chooses: int, folder: Path) -> None:
    """Codes are those under the pre scale, which the second recipe does not round. The weight that
    they stand for is that of ModelOpt's own quantizer."""
    path, config = own_config(f"{QAD}/{recipe}")
    made = case(folder, path)
    models: list[Any] = []
    wanted = calibrate_on_transformers(folder, made.decided, made.batches, config, models.append)
    found = calibrate_by_modelopt(made)
    same(found, wanted)
    assert all((q.codes is not None) == chooses for q in found.weights.values())
    (model,) = models
    by_name = {d.module.name: d.module.names_in("hf")[0] for d in made.decided.matched.decisions}
    for name in ("layers.0.attn.q", "layers.1.mlp.down"):
        module = model.get_submodule(by_name[name])
        with torch.no_grad(), emulated_kernels():
            rounded = module.weight_quantizer(module.weight)
        mine = fake_weight(module.weight.detach(), found.weights[name])
        torch.testing.assert_close(mine, rounded, rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", OWN)
def test_recipes_of_modelopt_give_what_modelopt_reads_from_them(recipe: str, folder: Path) -> None:
    path, config = own_config(recipe)
    made = case(folder, path)
    wanted = calibrate_on_transformers(folder, made.decided, made.batches, config)
    same(calibrate_by_modelopt(made), wanted)


def test_weights_are_weighed_by_their_inputs(folder: Path) -> None:
    """ModelOpt's inputs of a layer are of others whose inputs it rounds; ours are of none."""
    path, config = own_config(f"{PRESETS}/nvfp4_w4a4_weight_local_hessian")
    made = case(folder, path)
    wanted = calibrate_on_transformers(folder, made.decided, made.batches, config)
    found = calibrate_by_modelopt(made)
    nearest = calibrate_by_modelopt(case(folder, "nvfp4"))
    for name, w in wanted.weights.items():
        f = found.weights[name]
        assert f.amax is not None
        assert w.amax is not None
        share = (f.amax == w.amax).mean()
        assert share == 1 if name in ("layers.0.attn.q", "layers.0.attn.k") else share > 0.85
        assert f.input_amax == nearest.weights[name].input_amax


def test_gptq_keeps_the_scales_of_blocks(folder: Path) -> None:
    path, config = own_config(f"{GENERAL}/nvfp4_default-kv_none-gptq")
    made = case(folder, path)
    found = calibrate_by_modelopt(made)
    wanted = calibrate_on_transformers(folder, made.decided, made.batches, config)
    for name in ("layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v"):
        f, w = found.weights[name], wanted.weights[name]
        np.testing.assert_array_equal(f.amax, w.amax)  # type: ignore[arg-type]
        assert f.codes is not None
        assert w.codes is not None
        assert (f.codes == w.codes).mean() > 0.99
        with CanonicalWeights(source_of(made.decided)) as weights:
            weight = weights(name)
        assert not torch.equal(fake_weight(weight, f), fake_weight(weight, replace(f, codes=None)))


IN_LAYOUTS: dict[str, dict[str, Any]] = {
    "fp8_kv_fp8": {},
    "int8_sq": {},
    "int4_awq": {"group_size": 64},
    "nvfp4_awq": {},
    "nvfp4_svdquant": {},
}


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}, {"pp": 2}, {"cp": 2}])
def test_every_layout_finds_the_same(layout: dict[str, int], folder: Path) -> None:
    own = [own_config(f"{GENERAL}/nvfp4_act_headroom-kv_fp8_cast")[0]]
    own += [own_config(f"{PRESETS}/nvfp4_four_over_six")[0]]
    recipes = IN_LAYOUTS | {str(path): {} for path in own}
    results = run_world(modelopt_on_rank, 2, folder, recipes, layout)
    for i, (recipe, more) in enumerate(recipes.items()):
        made = case(folder, recipe, **more)
        wanted = calibrate_by_modelopt(made)
        for found in results:
            same(found[i], wanted, rtol=1e-4)
            same(found[i], results[0][i], rtol=0)
        if layout == {"tp": 2}:
            same(results[0][i], calibrate_on_transformers(folder, made.decided, made.batches))


def test_gptq_gives_its_codes(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "gptq.yaml"
    recipe.write_text(MODELOPT_GPTQ)
    made = case(folder, recipe)
    first = in_first_layers(made, 1)
    found = calibrate_by_modelopt(made)
    wanted = calibrate_on_transformers(folder, made.decided, made.batches)
    nearest = calibrate_by_modelopt(case(folder, "int4_weight_only", group_size=64))
    for name in first:
        f, w, n = found.weights[name], wanted.weights[name], nearest.weights[name]
        assert f.codes is not None
        assert w.codes is not None
        np.testing.assert_allclose(f.amax, w.amax, rtol=1e-6)  # type: ignore[arg-type]
        # A column that lies half-way may round either way, and later ones make up for it.
        assert (f.codes == w.codes).mean() > 0.99
        with CanonicalWeights(source_of(made.decided)) as weights:
            weight = weights(name)
        assert not torch.equal(fake_weight(weight, f), fake_weight(weight, n))


def in_first_layers(made: Case, count: int) -> list[str]:
    """The quantized modules of the first layers, whose inputs no rounding has changed."""
    return [
        d.module.name
        for d in made.decided.matched.decisions
        if d.format is not None and d.module.layer is not None and d.module.layer < count
    ]


@pytest.mark.parametrize("layout", [{"ep": 2, "dp": 2}, {"tp": 2, "ep": 2, "etp": 1}])
def test_each_expert_has_its_own(layout: dict[str, int], tmp_path: Path) -> None:
    """Transformers has experts in one tensor, which ModelOpt sees as one module; ours are apart."""
    moe = random_moe(tmp_path / "moe")
    recorded, wanted = case(moe).run(), calibrate_by_modelopt(case(moe))
    experts = [n for n in wanted.weights if ".experts." in n]
    assert len(experts) > 2
    for site in case(moe).points:
        for m in site.modules:
            if m in experts:
                amax = float(recorded.statistics[site.name].amax.max())
                assert wanted.weights[m].input_amax == pytest.approx(amax, rel=1e-5)
    for found in run_world(modelopt_on_rank, 2, moe, {"fp8": {}}, layout):
        same(found[0], wanted, rtol=1e-3)


def test_an_expert_without_tokens_is_an_error(tmp_path: Path) -> None:
    moe = random_moe(tmp_path / "moe")
    few = [Batch(tokens_BS=torch.full((1, 1), 3))]
    with pytest.raises(CalibrationError, match=r"ModelOpt has no amax for .*experts"):
        calibrate_by_modelopt(case(moe, batches=few))


def test_documents_of_a_row_do_not_see_each_other(folder: Path) -> None:
    (batch,) = tokens(128, count=1)
    packed = Batch(
        tokens_BS=batch.tokens_BS,
        positions_BS=torch.arange(12).repeat(2).expand(2, -1).contiguous(),
        documents_BS=torch.arange(2).repeat_interleave(12).expand(2, -1).contiguous(),
    )
    made = case(folder, batches=[packed])
    wanted = calibrate_on_transformers(folder, made.decided, made.batches)
    found = calibrate_by_modelopt(made)
    same(found, wanted)
    whole = calibrate_by_modelopt(case(folder, batches=[batch])).weights
    name = "layers.1.mlp.down"
    assert found.weights[name].input_amax != pytest.approx(whole[name].input_amax, rel=1e-5)


def test_padding_counts_for_nothing(folder: Path) -> None:
    (batch,) = tokens(128, count=1)
    filled = batch.padded(8)
    assert filled.valid_BS is not None
    wanted = calibrate_by_modelopt(case(folder, "int8_sq", batches=[batch]))
    same(calibrate_by_modelopt(case(folder, "int8_sq", batches=[filled])), wanted)


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


def test_factors_stay_out_of_norms_before_modules_that_are_kept(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(SOME_KEPT)
    made = case(folder, tmp_path / "recipe.yaml")
    found, decided = calibrate_by_modelopt(made), made.decided
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


AMAXES = ["fp8", "fp8_per_channel", "fp8_block128", "int8_weight_only", "nvfp4", "mxfp8", "kv_fp8"]


@pytest.mark.parametrize("recipe", AMAXES)
def test_our_own_amaxes_are_modelopts(recipe: str, folder: Path) -> None:
    """Those of weights exactly: codes and scales that follow from them are equal."""
    made = case(folder, recipe)
    expected, found = calibrate_by_modelopt(made), made.run().qparams
    wanted = expected.weights if recipe != "kv_fp8" else {}
    assert set(wanted) <= set(found.weights)
    with CanonicalWeights(source_of(made.decided)) as weights:
        for name, t in wanted.items():
            weight = weights(name)
            assert torch.equal(fake_weight(weight, t), fake_weight(weight, found.weights[name]))
            assert found.weights[name].input_amax == pytest.approx(t.input_amax, rel=1e-6)
            assert found.weights[name].global_amax in (0, t.global_amax), name
    for name, c in expected.kv_caches.items():
        assert found.kv_caches[name].key_amax == pytest.approx(c.key_amax, rel=1e-6)
        assert found.kv_caches[name].value_amax == pytest.approx(c.value_amax, rel=1e-6)


@pytest.mark.parametrize("family", ["mimo_v2_flash", "deepseek_v3"])
def test_caches_of_wide_keys_and_latents_are_ours(family: str, tmp_path: Path) -> None:
    made = case(family_models.save(family, tmp_path / "hf"), "kv_fp8")
    expected, found = calibrate_by_modelopt(made).kv_caches, made.run()
    assert len(expected) == 2
    for name, c in expected.items():
        own, amax = found.qparams.kv_caches[name], found.statistics[name].amax
        assert (own.key_amax, own.value_amax) == (c.key_amax, c.value_amax)
        keys = len(amax) * 2 // 3 if family == "mimo_v2_flash" else len(amax)
        assert own.key_amax == amax[:keys].max()
        assert own.value_amax == (amax[keys:] if keys < len(amax) else amax).max()


def test_units_that_are_done_are_not_solved_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megtool.quant.modelopt import unit_solver

    solved: list[Sequence[str]] = []
    solve = unit_solver.ModelOptSolver.solve_unit

    def fail_at_the_second(self: unit_solver.ModelOptSolver, *args: object) -> QParams:
        solved.append([s.name for s in args[1]])  # type: ignore[attr-defined]
        if len(solved) == 2:
            raise CalibrationError("interrupted")
        return solve(self, *args)  # type: ignore[arg-type]

    work, made = tmp_path / "work", case(folder, "int8_sq")
    monkeypatch.setattr(unit_solver.ModelOptSolver, "solve_unit", fail_at_the_second)
    with pytest.raises(CalibrationError, match="interrupted"):
        calibrate_by_modelopt(made, resume_folder=work)
    found = calibrate_by_modelopt(made, resume_folder=work)
    assert [s[0].split(".")[1] for s in solved[:3]] == ["0", "1", "1"]
    monkeypatch.undo()
    same(found, calibrate_by_modelopt(made), rtol=0)


def test_a_unit_leaves_memory_before_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier: list[weakref.ref[Any]] = []
    units = 0
    quantize = ModelOptSolver._quantize

    def quantize_unit(solver: ModelOptSolver, modules: Any, rounds: Any) -> None:
        nonlocal units
        assert not [name() for name in earlier if name() is not None]
        quantize(solver, modules, rounds)
        tensors = (p for m in modules.values() for p in (*m.parameters(), *m.buffers()))
        earlier.extend(weakref.ref(p) for p in tensors)
        units += 1

    monkeypatch.setattr(ModelOptSolver, "_quantize", quantize_unit)
    gc.disable()
    try:
        calibrate_by_modelopt(plain(case(folder, "fp8")))
    finally:
        gc.enable()
    assert units > 1
    assert earlier


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    with pytest.raises(MissingPackageError, match=r"megtool\[modelopt\]"):
        calibrate_by_modelopt(case(folder))


def test_a_recipe_names_its_modules(folder: Path) -> None:
    decided = resolve_recipe(folder, "fp8")
    names = {d.module.name for d in decided.matched.decisions if d.format is not None}
    assert calibrate_by_modelopt(case(folder)).weights.keys() == names


class _Asked(Exception):
    """A module was made."""


def test_a_site_is_solved_if_one_of_its_modules_is_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(self: ModelOptSolver, site: ActivationSite, module: str, *more: Any) -> Any:
        raise _Asked(module)

    monkeypatch.setattr(ModelOptSolver, "_make_module", make)
    solver = object.__new__(ModelOptSolver)
    solver._stage = Group(ranks=(0,), rank=0)
    solver._decisions = {"k": cast(Any, SimpleNamespace(format="NVFP4"))}
    site = ActivationSite(name="qk", kind="input", layer=0, modules=("q", "k"), width=4)
    decoder = cast(Any, SimpleNamespace(dtype=torch.float32))
    with pytest.raises(_Asked, match="k"):
        solver.solve_unit(decoder, [site], cast(Any, {}), lambda recorder: None)
    kept = replace(site, modules=("q", "v"))
    assert solver.solve_unit(decoder, [kept], cast(Any, {}), lambda recorder: None) == QParams()
