"""Settle: treatments of whole models from statistics, the rules of siblings, norms and experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from megtool.errors import CalibrationError, StorageError
from megtool.quant.calibration.requirements import derive_requirements
from megtool.quant.calibration.solve_qparams import FOLD_NOTE, solve_qparams
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.qparams import QParams
from megtool.quant.recipes.dialects import load_recipe
from megtool.quant.recipes.match import Decision, match_rules
from megtool.quant.recipes.modules import list_modules
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.recipes.rules import RecipeProblems
from megtool.quant.statistics.activation_sites import ActivationSite, list_activation_sites
from megtool.quant.statistics.site_statistics import ActivationStatistics
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.quant import algorithm_inputs
from tests.support.quant.fake_inputs import fake_input
from tests.support.threads import kill_threads, refuse_threads


class Model:
    """A tiny model's points and decisions, random weights and inputs."""

    def __init__(self, path: Path, name: str, *, layers: tuple[int, ...] = (1,)) -> None:
        side = open_source(path).view
        assert side.config is not None
        modules = list_modules(side).modules
        self.recipe: Recipe = load_recipe(name)
        found = match_rules(
            self.recipe,
            modules,
            RecipeProblems(name),
            group_size=64 if "4" in name and "nv" not in name else 0,
        )
        self.decisions: Mapping[str, Decision] = {d.module.name: d for d in found.decisions}
        every = list_activation_sites(modules, side.config)
        self.points: tuple[ActivationSite, ...] = tuple(p for p in every if p.layer in layers)
        self.rows = {
            p.name: algorithm_inputs.rows(160, p.width, seed=i) for i, p in enumerate(self.points)
        }
        self.seen = {n: algorithm_inputs.statistics(x) for n, x in self.rows.items()}
        self.held = {
            m: algorithm_inputs.weight(*self.decisions[m].module.shape, seed=i)
            for i, m in enumerate(m for p in self.points for m in p.modules if p.kind == "input")
        }

    def settled(self, **seen: ActivationStatistics | None) -> QParams:
        known = {n: s for n, s in {**self.seen, **seen}.items() if s is not None}
        return solve_qparams(
            self.points,
            known,
            self.decisions,
            self.recipe,
            self.held.__getitem__,
        )

    def error(self, done: QParams, module: str) -> float:
        """How far the output is off, by what engines compute."""
        point = next(p for p in self.points if module in p.modules)
        x, w, treatment = self.rows[point.name], self.held[module], done.weights[module]
        wrong = fake_input(x, treatment) @ fake_weight(w, treatment, as_run=True).T - x @ w.T
        return float(wrong.square().sum() / (x @ w.T).square().sum())


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


def plain(done: QParams) -> dict[str, object]:
    """Comparable whatever the order."""
    return {
        n: {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in fields.items()}
        for n, t in done.weights.items()
        for fields in [{f.name: getattr(t, f.name) for f in dataclasses.fields(t)}]
    }


@pytest.mark.parametrize(
    "name",
    [
        *("int8_sq", "int4_awq", "int4_gptq", "w4a8_awq", "fp8"),
        *("nvfp4_awq", "nvfp4", "nvfp4_gptq", "mxfp4_gptq"),
    ],
)
def test_a_dense_layer(name: str, llama: Path) -> None:
    model = Model(llama, name)
    done = model.settled()
    at = "layers.1"
    linears = {m for p in model.points if p.kind == "input" for m in p.modules}
    assert set(done.weights) == linears
    by = done.weights
    for group in (("attn.q", "attn.k", "attn.v"), ("mlp.gate", "mlp.up")):
        same = [by[f"{at}.{m}"] for m in group]
        assert len({t.input_amax for t in same}) == 1
        assert len({t.global_amax for t in same}) == 1
        assert (
            len({None if t.smoothing_scale is None else t.smoothing_scale.tobytes() for t in same})
            == 1
        )
        assert not any(t.stores_pre_quant_scale for t in same)
    smoothed = by[f"{at}.attn.q"].smoothing_scale is not None
    assert set(done.norm_scales) == ({f"{at}.attn_norm", f"{at}.mlp_norm"} if smoothed else set())
    for module in (f"{at}.attn.o", f"{at}.mlp.down"):
        assert by[module].stores_pre_quant_scale == (by[module].smoothing_scale is not None)
        if by[module].smoothing_scale is not None:
            stored = torch.from_numpy(1 / by[module].smoothing_scale)
            torch.testing.assert_close(stored.bfloat16().float(), stored, rtol=1e-6, atol=0)
    for module, treatment in by.items():
        calibrates = treatment.format.number.calibrates
        assert (treatment.input_amax > 0) == calibrates
        assert model.error(done, module) < (0.03 if "4" in name else 0.003)
    plainly = Model(llama, name)
    plainly.recipe = dataclasses.replace(plainly.recipe, algorithm={"method": "max"})
    worse = plainly.settled()
    for module in by:
        assert model.error(done, module) <= plainly.error(worse, module) * 1.02


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("llama", n) for n in ("nvfp4_awq", "int8_sq", "int4_awq")),
        *(("moe", n) for n in ("int8_sq", "int4_awq")),
        pytest.param("moe", "nvfp4_awq", marks=pytest.mark.slow),
    ],
)
def test_folded_factors_are_stored_nowhere(name: str, kind: str, llama: Path, moe: Path) -> None:
    model = Model(llama if kind == "llama" else moe, name)
    stored = {t.module for t in model.settled().weights.values() if t.stores_pre_quant_scale}
    assert {m.rpartition(".")[2] for m in stored} >= {"o", "down"}
    algorithm = {**model.recipe.algorithm, "fold": True}
    model.recipe = dataclasses.replace(model.recipe, algorithm=algorithm)
    done = model.settled()
    assert not any(t.stores_pre_quant_scale for t in done.weights.values())
    assert all(done.weights[m].smoothing_scale is None for m in stored)
    taken = {m for m, t in done.weights.items() if t.smoothing_scale is not None}
    assert taken == set(done.weights) - stored
    assert set(done.norm_scales) == {
        p.norm for p in model.points if p.norm and not stored.intersection(p.modules)
    }
    assert done.notes.count(FOLD_NOTE) == 1
    for module in stored:
        assert model.error(done, module) < 0.03


def test_a_pinned_scale_of_inputs_is_not_calibrated(llama: Path) -> None:
    model = Model(llama, "nvfp4")
    for name, d in model.decisions.items():
        if d.format is not None:
            pinned = dataclasses.replace(d.format, input_amax=2688.0)
            model.decisions = {**model.decisions, name: dataclasses.replace(d, format=pinned)}
    assert not any(derive_requirements(model.recipe, d).data for d in model.decisions.values())
    seen = model.settled()
    model.seen = {}
    for done in (seen, model.settled()):
        assert {t.input_amax for t in done.weights.values()} == {2688.0}


def test_order_and_threads_do_not_matter(llama: Path) -> None:
    model = Model(llama, "int4_awq")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    one = model.settled()
    torch.set_num_threads(2)
    model.points = model.points[::-1]
    two = model.settled()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert plain(one) == plain(two)


def test_experts_store_factors_and_borrow_scales(moe: Path) -> None:
    model = Model(moe, "int8_sq")
    done = model.settled(**{"layers.1.mlp.experts.2.fc1": None})
    experts = [t for n, t in done.weights.items() if ".experts." in n]
    assert len(experts) == 12
    assert all(t.input_amax > 0 for t in experts)
    assert set(done.norm_scales) == {"layers.1.attn_norm"}
    unseen = done.weights["layers.1.mlp.experts.2.gate"]
    assert unseen.smoothing_scale is None
    assert unseen.amax is None
    others = [model.seen[f"layers.1.mlp.experts.{e}.fc1"].amax.max() for e in (0, 1, 3)]
    assert unseen.input_amax == pytest.approx(float(max(others)))
    assert any("layers.1.mlp.experts.2.fc1" in n for n in done.notes)
    seen = done.weights["layers.1.mlp.experts.1.gate"]
    assert seen.stores_pre_quant_scale


def test_nothing_seen_is_an_error_that_names_the_point(llama: Path) -> None:
    model = Model(llama, "fp8")
    with pytest.raises(CalibrationError, match=r"layers\.1\.attn\.o"):
        model.settled(**{"layers.1.attn.o": None})
    model = Model(llama, "int4_awq")
    bare = dataclasses.replace(model.seen["layers.1.attn.o"], gram=None)
    with pytest.raises(CalibrationError, match="second moments"):
        model.settled(**{"layers.1.attn.o": bare})


def test_what_needs_no_data_is_settled_without(llama: Path) -> None:
    for name in ("int4_weight_only", "w4a16_nvfp4", "mxfp8", "fp8_block128"):
        model = Model(llama, name)
        assert not any(derive_requirements(model.recipe, d).data for d in model.decisions.values())
        model.seen = {}
        done = model.settled()
        assert all(t.amax is None and not t.input_amax for t in done.weights.values())
        q, k = (done.weights[f"layers.1.attn.{m}"] for m in "qk")
        assert q.global_amax == k.global_amax


def test_needs(llama: Path) -> None:
    said = {}
    for name in ("fp8", "int8_sq", "int4_awq", "int4_gptq", "nvfp4_awq", "kv_fp8"):
        model = Model(llama, name)
        q, kv = (
            derive_requirements(model.recipe, model.decisions[f"layers.1.attn.{m}"])
            for m in ("q", "kv")
        )
        said[name] = (q.data, q.gram, q.sample, kv.data)
    assert said["fp8"] == (True, False, False, False)
    assert said["int8_sq"][:3] == (True, False, True)
    assert said["int4_awq"][:3] == (True, True, False)
    assert said["int4_gptq"][:3] == (True, True, False)
    assert said["nvfp4_awq"][:3] == (True, True, True)
    assert said["kv_fp8"] == (False, False, False, True)


def test_caches_know_keys_from_values(llama: Path) -> None:
    model = Model(llama, "kv_fp8")
    done = model.settled()
    amax = model.seen["layers.1.attn.kv"].amax
    half = len(amax) // 2
    cache = done.kv_caches["layers.1.attn.kv"]
    assert (cache.key_amax, cache.value_amax) == (amax[:half].max(), amax[half:].max())
    constant = dataclasses.replace(model.decisions["layers.1.attn.kv"].format, constant=True)  # type: ignore[type-var]
    kept = dataclasses.replace(model.decisions["layers.1.attn.kv"], format=constant)
    model.decisions = {**model.decisions, "layers.1.attn.kv": kept}
    cache = model.settled().kv_caches["layers.1.attn.kv"]
    assert cache.key_amax == cache.value_amax == 448


@pytest.mark.parametrize(("key_width", "expected"), [(96, (3.0, 448.0)), (128, (3.0, 3.0))])
def test_keys_are_wider_than_values_or_both_are_one_latent(
    key_width: int, expected: tuple[float, float], llama: Path
) -> None:
    """The last key is the largest, past the middle; values of zeros alone have the scale 1."""
    model, name = Model(llama, "kv_fp8"), "layers.1.attn.kv"
    model.points = tuple(
        dataclasses.replace(p, width=128, key_width=key_width)
        for p in model.points
        if p.name == name
    )
    amax = np.zeros(128, np.float32)
    amax[:96] = np.linspace(1, 3, 96)
    seen = ActivationStatistics.from_amax(amax, num_tokens=8)
    cache = model.settled(**{name: seen}).kv_caches[name]
    assert (cache.key_amax, cache.value_amax) == expected


def test_different_formats_at_one_input_share_no_factors(llama: Path) -> None:
    model = Model(llama, "int4_awq")
    kept = dataclasses.replace(model.decisions["layers.1.attn.k"], format=None)
    model.decisions = {**model.decisions, "layers.1.attn.k": kept}
    done = model.settled()
    assert done.weights["layers.1.attn.q"].smoothing_scale is None
    assert "layers.1.attn_norm" not in done.norm_scales
    assert any("layers.1.attn.qkv" in n for n in done.notes)


def test_threads_that_die_or_cannot_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, threads = Model(llama, "fp8"), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with monkeypatch.context() as patch:
            kill_threads(patch, {1, 2, 3})
            with pytest.raises(MemoryError):
                model.settled()
        with monkeypatch.context() as patch:
            refuse_threads(patch, after=1)
            with raises(StorageError, "thread", hint="ulimit -u"):
                model.settled()
        assert torch.get_num_threads() == 3
        assert model.settled().weights
    finally:
        torch.set_num_threads(threads)
