"""Transformer Engine's recipes out of settings, by its own classes, and what it is refused for.

Its recipes are plain classes, which load without its libraries and without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from megtool.errors import MissingPackageError, UsageError
from megtool.kernels.dispatch import use
from megtool.kernels.transformer_engine.library import INSTALL
from megtool.kernels.transformer_engine.linear import check_sides
from megtool.optim.fp8.config import Fp8Config, Recipe
from megtool.optim.fp8.transformer_engine import make_te_recipe, required_multiple
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.features.fp8 import Fp8Feature, check_te_shapes
from megtool.train.features.module_precision import uniform_precisions
from tests.support.worlds.optimizer_layouts import MODELS, whole

CLASSES: tuple[tuple[Recipe, str], ...] = (
    ("delayed", "DelayedScaling"),
    ("tensorwise", "Float8CurrentScaling"),
    ("blockwise", "Float8BlockScaling"),
    ("mxfp8", "MXFP8BlockScaling"),
)


@pytest.fixture(scope="module")
def recipes() -> Iterator[Any]:
    """`transformer_engine.common.recipe`, without the package around it."""
    package = find_spec("transformer_engine")
    if package is None or not package.submodule_search_locations:
        pytest.skip("Transformer Engine is not installed")
    name = "transformer_engine_recipes_alone"
    file = Path(package.submodule_search_locations[0]) / "common" / "recipe" / "__init__.py"
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)  # pydantic looks its annotations up there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


@pytest.mark.parametrize(("recipe", "name"), CLASSES)
def test_every_recipe_is_one_of_transformer_engines(
    recipe: Recipe, name: str, recipes: Any
) -> None:
    for kind in ("hybrid", "e4m3"):
        made = make_te_recipe(Fp8Config(fp8_recipe=recipe, fp8_format=kind), recipes)
        assert type(made) is getattr(recipes, name)
        assert made.fp8_format is recipes.Format[kind.upper()]
        largest = Fp8Config(fp8_recipe=recipe, fp8_format=kind).largest
        assert (made.fp8_format.value.max_fwd, made.fp8_format.value.max_bwd) == largest


def test_delayed_scaling_takes_every_setting(recipes: Any) -> None:
    settings = Fp8Config(
        fp8_amax_history_len=7,
        fp8_amax_compute_algo="most_recent",
        fp8_margin=2,
        fp8_recipe="delayed",
    )
    for shared in (True, False):
        made = make_te_recipe(settings, recipes, reduce_amax=shared)
        assert (made.amax_history_len, made.amax_compute_algo) == (7, "most_recent")
        assert (made.margin, made.reduce_amax) == (2, shared)
    usual = make_te_recipe(Fp8Config(fp8_recipe="delayed"), recipes)
    assert usual == recipes.DelayedScaling()


def test_blocks_have_the_sizes_of_our_own(recipes: Any) -> None:
    made = make_te_recipe(Fp8Config(fp8_recipe="blockwise"), recipes)
    sizes = made.x_block_scaling_dim, made.w_block_scaling_dim, made.grad_block_scaling_dim
    assert sizes == (1, 2, 1)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="it is installed")
def test_a_missing_package_is_named_before_anything_is_changed() -> None:
    stage = whole("tied")
    with pytest.raises(MissingPackageError, match="not installed") as caught, use("te"):
        Fp8Feature([stage], Fp8Config(fp8_recipe="delayed"), ProcessGroups.alone())
    assert caught.value.hint == INSTALL
    assert all(getattr(m, "product", None) is None for m in stage.modules())
    assert "run" not in vars(stage)


def test_sizes_that_it_cannot_multiply_are_refused_by_their_layer() -> None:
    check_sides((64, 32), 32)
    with pytest.raises(UsageError, match="48 x 32"):
        check_sides((48, 32), 32)
    config = MODELS["tied"]
    settings = Fp8Config(fp8_recipe="mxfp8", num_layers_at_start_in_bf16=1)
    assert required_multiple("mxfp8") == 32
    with pytest.raises(UsageError, match="multiples of 32") as caught:
        check_te_shapes(uniform_precisions(settings, config.num_layers), config, 1)
    assert "decoder.layers.1.self_attention.linear_qkv" in str(caught.value)
