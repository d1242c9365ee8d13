"""ModelOpt's configuration of a recipe's decisions: settings of quantizers with exact names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megtool.errors import RecipeError, UsageError
from megtool.quant.modelopt.unit_modules import ROUNDING
from megtool.quant.recipes.algorithm import SENSITIVITY_METHODS
from megtool.quant.recipes.formats import INPUT_PACKINGS, RecipeFormat, packing_of
from megtool.quant.recipes.learned_scales import first_scales
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe

_FP8: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
_METHODS: Mapping[str, str] = {
    "none": "max",
    "max": "max",
    "mse": "mse",
    "smoothquant": "smoothquant",
    "awq": "awq_lite",
    "awq_lite": "awq_lite",
    "awq_full": "awq_full",
    "awq_clip": "awq_clip",
    "svdquant": "svdquant",
    "gptq": "gptq",
    "local_hessian": "local_hessian",
    "nvfp4_act_headroom": "nvfp4_act_headroom",
    "lsq": "lsq",
}
"""Our algorithms and ModelOpt's, by ModelOpt's names."""

_STATIC = ("mse", "local_hessian", "gptq", "lsq")
"""Algorithms that choose, or keep, the scales of NVFP4's blocks. In megtool's own recipes they have
ModelOpt's `static` ones; recipes of ModelOpt say what they have."""

MULTIPLYING = ("awq_lite", "awq_full", "awq_clip", "svdquant")
"""Algorithms that compare products, which modules then have to compute."""

_OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "alpha": {"alpha": ("smoothquant",)},
    "alpha_step": {"alpha_step": ("awq_lite", "awq_full")},
    "damping": {"perc_damp": ("gptq",)},
    "rank": {"lowrank": ("svdquant",)},
}
"""Our options: ModelOpt's name, and the algorithms that have it."""

_FOUR_OVER_SIX = {"start_multiplier": 1.0, "stop_multiplier": 1.5, "step_size": 0.5}
"""Options of ModelOpt's mse that make the largest element of a block 6 or 4."""

_OURS = ("four_over_six", "scale_search", "cast")
"""Options that choose other scales than ModelOpt does, which would be another algorithm."""


def name_modules(decisions: Sequence[Decision]) -> dict[str, str]:
    """The names that modules have for ModelOpt: those of transformers, which its patterns of fused
    siblings match; canonical ones for KV caches and for rows of one module."""
    linear = [d for d in decisions if d.module.kind != "kv_cache"]
    names = {d.module.name: next(iter(d.module.names_in("hf")), "") for d in linear}
    counts = Counter(names.values())
    return {
        d.module.name: (
            hf_name
            if (hf_name := names.get(d.module.name, "")) and counts[hf_name] == 1
            else d.module.name
        )
        for d in decisions
    }


def algorithm_for(
    recipe: Recipe, decisions: Sequence[Decision], names: Mapping[str, str]
) -> dict[str, Any]:
    """ModelOpt's algorithm of a recipe, with its options; `names` are the modules' names for it.

    Raises:
        RecipeError: an algorithm that ModelOpt does not have, or not for a format, or several at
            once.
    """
    quantized = [d for d in decisions if d.format is not None]
    overall = "max" if recipe.method in SENSITIVITY_METHODS else recipe.method
    methods = dict.fromkeys((d.format.method if d.format else "") or overall for d in quantized)
    skips = methods.keys() == {"svdquant", "max"}  # ModelOpt takes max for those it skips
    if len(methods) > 1 and not skips:
        raise RecipeError(
            f"recipe {recipe.name} asks for {' and '.join(methods)}, and ModelOpt runs one "
            "algorithm for the whole model",
            hint="--backend megtool supports several",
        )
    out = _algorithm(recipe, "svdquant" if skips else next(iter(methods), "none"))
    if skips:
        plain = [d for d in quantized if d.format and (d.format.method or recipe.method) == "max"]
        out["skip_layers"] = [names[d.module.name] for d in plain]
    return out


def unused_options(recipe: Recipe, algorithm: Mapping[str, Any]) -> tuple[str, ...]:
    """The options of a recipe's algorithm that ModelOpt's does not have."""
    if recipe.dialect == "modelopt":
        return ()
    used = {ours for ours, names in _OPTIONS.items() if algorithm.keys() & names.keys()}
    used |= algorithm.keys() if algorithm["method"] == "lsq" else set()
    used |= {"method", *(("clip",) if algorithm["method"] == "awq_full" else ())}
    used |= {"four_over_six"} if algorithm.keys() >= _FOUR_OVER_SIX.keys() else set()
    return tuple(o for o, value in recipe.algorithm.items() if o not in used and value)


def build_modelopt_config(
    recipe: Recipe,
    decisions: Sequence[Decision],
    *,
    device: str = "cpu",
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build ModelOpt's configuration: everything disabled, then each module by name.

    `names` are the modules' names for ModelOpt (None: those of `name_modules`).

    Raises:
        RecipeError: an algorithm that ModelOpt does not have, or not for a format, or several at
            once.
        UsageError: something that ModelOpt can only calibrate on a GPU.
    """
    quantized = [d for d in decisions if d.format is not None]
    if undecided := [d for d in quantized if d.format and d.format.choose]:
        raise RecipeError(
            f"the format of {undecided[0].module.name} is not chosen yet",
            hint="choose formats before calibrating",
        )
    names = name_modules(decisions) if names is None else names
    algorithm = algorithm_for(recipe, quantized, names)
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for d in quantized:
        if d.format is not None:
            form = _with_block_scales(d.format, recipe, algorithm["method"])
            _check_format(form, algorithm, device)
            entries += _entries(form, names[d.module.name], on_cpu=device == "cpu")
    return {"quant_cfg": entries, "algorithm": algorithm}


def build_format_config(recipe: Recipe, format: RecipeFormat, *, device: str) -> dict[str, Any]:
    """ModelOpt's configuration of one format, for matrices of any name.

    Raises:
        RecipeError: its algorithm changes weights, which other formats then would be scored on.
        UsageError: something that ModelOpt can only calibrate on a GPU.
    """
    ours = format.method or "max"
    method = _METHODS.get(ours, "")
    if method not in ("max", "mse", "awq_lite"):
        raise RecipeError(
            f"ModelOpt does not score {format.algo} with algorithm {ours}",
            hint="max, mse or awq; or leave out `modelopt: true`",
        )
    algorithm = {"method": method} | _search_of(method, [format])
    form = _with_block_scales(format, recipe, method)
    _check_format(form, algorithm, device)
    entries = [{"quantizer_name": "*", "enable": False}]
    entries += _linear_entries(form, "*", on_cpu=device == "cpu")
    return {"quant_cfg": entries, "algorithm": algorithm}


def _with_block_scales(format: RecipeFormat, recipe: Recipe, method: str) -> RecipeFormat:
    """A format with static block scales, if a recipe of megtool's own has an algorithm for them."""
    if not format.algo or recipe.dialect == "modelopt" or method not in _STATIC:
        return format
    if not packing_of(format).startswith("nvfp4"):
        return format
    has_option = _has_four_over_six(recipe, recipe.method)
    return replace(format, block_scales="four_over_six" if has_option else "static")


def _has_four_over_six(recipe: Recipe, method: str) -> bool:
    """A recipe of megtool's own asks for the option, with an algorithm that ModelOpt has it for."""
    return method in ("none", "max", "mse") and recipe.algorithm.get("four_over_six") is True


def _weight_formats(recipe: Recipe) -> list[RecipeFormat]:
    return [f for f in recipe.formats.values() if f.algo]


def _search_of(method: str, formats: Sequence[RecipeFormat]) -> dict[str, Any]:
    """ModelOpt's search among all scales of NVFP4, which leaves out weights in other formats."""
    searches = method == "mse" and all(packing_of(f).startswith("nvfp4") for f in formats)
    return {"fp8_scale_sweep": True} if searches else {}


def _check_format(format: RecipeFormat, algorithm: Mapping[str, Any], device: str) -> None:
    """Reject formats that an algorithm has no meaning for, or only on a GPU."""
    if not format.algo:
        return
    packing, method = packing_of(format), algorithm["method"]
    if method == "gptq" and packing.startswith("nvfp4") and not format.block_scales:
        raise RecipeError(
            f"ModelOpt's gptq chooses {format.algo} codes of blocks whose scales it does not keep",
            hint="`type: static` in block_sizes of the weights; or --backend megtool",
        )
    if method == "gptq" and not packing.startswith(("int", "nvfp4")):
        raise RecipeError(
            f"ModelOpt's gptq chooses {format.algo} codes, which are not stored as it chose them",
            hint="gptq with INT4, INT8 or NVFP4 weights, or --backend megtool",
        )
    if method == "gptq" and algorithm.get("fused") and device == "cpu":
        raise UsageError(
            "`fused: true` of ModelOpt's gptq runs only on a GPU",
            hint="leave it out: `fused: false`",
        )
    if device == "cpu" and packing.startswith("mxfp") and method != "max":
        raise UsageError(
            f"ModelOpt runs {method} for {format.algo} only on a GPU",
            hint="--backend megtool supports any device",
        )


def _algorithm(recipe: Recipe, method: str) -> dict[str, Any]:
    options = dict(recipe.algorithm) if recipe.method == method else {}
    if method not in _METHODS:
        names = ", ".join(m for m in _METHODS if m != "none")
        raise RecipeError(
            f"the ModelOpt backend does not support {method!r}",
            hint=f"use --backend megtool, or one of {names}",
        )
    if recipe.folds_scales:
        raise RecipeError(
            f"recipe {recipe.name} has `fold: true`, and ModelOpt stores pre_quant_scale",
            hint="use --backend megtool, or `fold: false`",
        )
    for option in _OURS:
        if options.get(option) and not (
            option == "four_over_six" and _has_four_over_six(recipe, method)
        ):
            raise RecipeError(
                f"recipe {recipe.name} has `{option}: true`, and the ModelOpt backend takes the "
                "scales of the largest elements",
                hint=f"use --backend megtool, or `{option}: false`",
            )
    out: dict[str, Any] = {"method": _METHODS[method]}
    if recipe.dialect == "modelopt":  # in ModelOpt's words, but units are solved one by one
        own = {k: v for k, v in options.items() if k not in ("method", "layerwise")}
        return own | out
    if _has_four_over_six(recipe, method):
        return _FOUR_OVER_SIX | {"method": "mse"}
    if method == "lsq":
        scales = first_scales(options)["method"]
        scales_by = {"method": scales} | _search_of(scales, _weight_formats(recipe))
        return options | {"method": "lsq", "scale_algorithm": scales_by}
    out |= _search_of(method, _weight_formats(recipe))
    if method == "awq" and options.get("clip"):
        out["method"] = "awq_full"
    for option, value in options.items():
        for modelopt_name, methods in _OPTIONS.get(option, {}).items():
            if out["method"] in methods:
                out[modelopt_name] = value if option == "rank" else float(value)
    return out


def _entries(format: RecipeFormat, name: str, *, on_cpu: bool) -> Iterator[dict[str, Any]]:
    if format.kv_algo:
        cfg = _FP8 if format.kv_algo == "FP8" else _block_config((2, 1), 16, (4, 3))
        cfg = {**cfg, "use_constant_amax": True} if format.constant else cfg
        yield {"quantizer_name": f"{name}.[kv]_bmm_quantizer", "cfg": cfg}
        return
    yield from _linear_entries(format, f"{name}.", on_cpu=on_cpu)


def _linear_entries(format: RecipeFormat, prefix: str, *, on_cpu: bool) -> Iterator[dict[str, Any]]:
    """The settings of the quantizers of a matrix, whose names follow `prefix`."""
    weights: Any = _quantizer_config(packing_of(format), on_cpu=on_cpu)
    if format.block_scales:  # these are rounded on any device
        sizes = weights.pop("block_sizes") | {"type": "static"}
        sizes |= {"four_over_six": True} if format.block_scales == "four_over_six" else {}
        weights = {"num_bits": weights["num_bits"], "block_sizes": sizes}
    if format.algo == "W4A8_AWQ":
        weights = [weights, dict(_FP8)]
    yield {"quantizer_name": f"{prefix}weight_quantizer", "cfg": weights}
    if format.algo in INPUT_PACKINGS:
        yield {
            "quantizer_name": f"{prefix}input_quantizer",
            "cfg": _quantizer_config(INPUT_PACKINGS[format.algo], on_cpu=on_cpu),
        }


def _block_config(bits: tuple[int, int], size: int, scale: tuple[int, int]) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "block_sizes": {-1: size, "type": "dynamic", "scale_bits": scale},
    }


def _quantizer_config(packing: str, *, on_cpu: bool) -> dict[str, Any]:
    """The quantizer settings for a packing such as `fp8:tensor` or `int4rows:128`."""
    name, _, granularity = packing.partition(":")
    if name == "nvfp4":  # ModelOpt's own rounding needs a GPU
        rounding = {"backend": ROUNDING} if on_cpu else {}
        return _block_config((2, 1), int(granularity), (4, 3)) | rounding
    if name in ("mxfp4", "mxfp8"):
        return _block_config((2, 1) if name == "mxfp4" else (4, 3), int(granularity), (8, 0))
    bits: Any = {"fp8": (4, 3), "int8": 8, "int4rows": 4}[name]
    if granularity == "token":
        return {"num_bits": bits, "type": "dynamic", "block_sizes": {-1: None}}
    if granularity in ("tensor", "channel"):
        return {"num_bits": bits, "axis": 0 if granularity == "channel" else None}
    sizes = [int(n) for n in granularity.split("x")]
    if len(sizes) == 2:
        return {"num_bits": bits, "block_sizes": {-1: sizes[1], -2: sizes[0]}}
    return {"num_bits": bits, "block_sizes": {-1: sizes[0], "type": "static"}}
