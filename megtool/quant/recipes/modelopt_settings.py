"""ModelOpt quantizer settings and algorithms: known keys and supported values.

All keys of ModelOpt 0.47 are known. Values without effect are ignored, unsupported values are
problems where they would take effect, and unknown keys are problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megtool.quant.recipes.algorithm import AlgorithmOption
from megtool.quant.recipes.formats import BlockScales
from megtool.quant.recipes.learned_scales import SIDES, check_tied, list_sides
from megtool.quant.recipes.located_yaml import Node, as_key
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.rules import RecipeProblems

_FLOATS = {"e4m3": (4, 3), "e2m1": (2, 1), "e8m0": (8, 0), "e5m2": (5, 2), "e3m2": (3, 2)}
CONSTANT_AMAX = 448.0
"""The amax that `use_constant_amax` implies."""

# Supported keys, and keys that do not affect stored tensors.
_SUPPORTED = (
    "num_bits",
    "axis",
    "type",
    "block_sizes",
    "effective_bits",
    "pass_through_bwd",
    "trt_high_precision_dtype",
    "use_constant_amax",
    "constant_amax",
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "enable": (True, None),
    "fake_quant": (True, None),
    "unsigned": (False, None),
    "narrow_range": (False, None),
    "learn_amax": (False, None),
    "calibrator": ("max", None),
    "rotate": (False, None, {}, {"enable": False}),
    "bias": (False, None, {}, {"enable": False}),
    "backend": (None,),
    "backend_extra_args": (None, {}),
}
UNWRITTEN: Mapping[str, tuple[str, str]] = {
    "rotate": (
        "ModelOpt's own export writes weights without the rotation, under the scales of rotated "
        "ones, and its config does not say so",
        "a recipe of megtool's with `rotation`, which is multiplied into weights; or leave it out",
    ),
    "bias": (
        "ModelOpt's own export writes it as `k_bias`, and its config calls the cache plain "
        "without it",
        "leave it out: the cache has scales alone",
    ),
    "MXFP6": ("ModelOpt's own export refuses it", "MXFP8 or MXFP4"),
    "MXINT8": ("ModelOpt's own export fails at it", "MXFP8, or INT8 with a scale for each row"),
}
"""Settings and numbers that no folder stores, not even ModelOpt's unified export (modelopt 0.47,
torch/export/quant_utils.py): what that does with them, and the way out."""
_MX = {((3, 2), (8, 0)): "MXFP6", (8, (8, 0)): "MXINT8"}
_BLOCKS = ("type", "scale_bits", "scale_block_sizes", "four_over_six")
_BLOCK_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "scale_block_sizes": (None, {}),
    "four_over_six": (False, None),
}
_DYNAMIC = ("nvfp4", "mxfp8", "mxfp4")


def check_settings(node: Node, problems: RecipeProblems) -> None:
    """Check that ModelOpt knows every key of a quantizer's settings, or of a list of them."""
    for settings in node.value if isinstance(node.value, list) else [node]:
        if not isinstance(settings.value, dict):
            if settings.value is not None:
                problems.add(
                    settings.line, f"cfg is {settings.plain()!r}", "a mapping, such as num_bits: 8"
                )
            continue
        for key in settings.value:
            line = (settings.keys or {}).get(key, settings.line)
            if key not in _SUPPORTED and key not in _NEUTRAL:
                hint = suggest(key, [*_SUPPORTED, *_NEUTRAL])
                problems.add(line, f"unknown attribute {key!r} of a quantizer", hint)
        kind = settings.get("type")
        if kind is not None and kind.value not in ("static", "dynamic", None):
            problems.add(kind.line, f"type is {kind.plain()!r}", "static or dynamic")
        blocks = settings.get("block_sizes")
        for key in blocks.value if blocks is not None and isinstance(blocks.value, dict) else ():
            if key not in _BLOCKS and not key.removeprefix("-").isdigit():
                line = ((blocks.keys if blocks else None) or {}).get(key, settings.line)
                hint = suggest(key, _BLOCKS) + ", or a dimension"
                problems.add(line, f"unknown key {key!r} of block_sizes", hint)


def unsupported_features(cfg: Any, part: str) -> Iterator[str]:
    """Yield the unsupported features of an enabled quantizer.

    `part` is the quantizer's name in its module, such as `weight_quantizer`.
    """
    for settings in cfg if isinstance(cfg, list) else [cfg]:
        if not isinstance(settings, Mapping):
            continue
        for key, values in _NEUTRAL.items():
            if key in settings and settings[key] not in values:
                yield f"{key} {_shorten(settings[key])}"
        blocks = settings.get("block_sizes")
        sizes = blocks if isinstance(blocks, Mapping) else {}
        word = classify_quantizer(settings, [])[0]
        chooses = part == "weight_quantizer" and word == "nvfp4" and sizes.get("type") != "dynamic"
        for key, values in _BLOCK_NEUTRAL.items():
            allowed = (*values, True) if key == "four_over_six" and chooses else values
            if key in sizes and sizes[key] not in allowed:
                yield f"{key} {_shorten(sizes[key])}"
        if part == "weight_quantizer":
            for key in ("constant_amax", "use_constant_amax"):
                if settings.get(key):
                    yield f"{key} {_shorten(settings[key])} of a weight"
        elif word in _DYNAMIC and sizes.get("type") != "dynamic":
            yield "static block scales of inputs"
        elif word in ("fp8", "int8") and settings.get("type") == "dynamic":
            yield "a dynamic per-tensor scale (type dynamic)"
        if part.endswith("bmm_quantizer") and settings.get("constant_amax"):
            yield f"constant_amax {_shorten(settings['constant_amax'])} of a KV cache"


def _shorten(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)[:60]


def read_block_scales(cfg: Any) -> BlockScales:
    """Whether the scales of blocks of NVFP4 weights may be chosen; empty for other settings."""
    if classify_quantizer(cfg, [])[0] != "nvfp4" or cfg["block_sizes"].get("type") == "dynamic":
        return ""
    return "four_over_six" if cfg["block_sizes"].get("four_over_six") else "static"


def read_constant_amax(cfg: Any) -> float:
    """The constant amax of inputs (0: calibrated)."""
    if not isinstance(cfg, Mapping):
        return 0.0
    value = cfg.get("constant_amax")
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    return CONSTANT_AMAX if cfg.get("use_constant_amax") else 0.0


def classify_quantizer(cfg: Any, groups: list[int]) -> tuple[str, str]:
    """Classify quantizer settings as a word, or describe them; adds group sizes to `groups`."""
    if isinstance(cfg, list):
        inner = [classify_quantizer(c, groups)[0] for c in cfg]
        return "+".join(inner), str(cfg)
    if not isinstance(cfg, Mapping):
        return "", "INT8 by default"
    bits = _bits(cfg.get("num_bits", 8))
    blocks = cfg.get("block_sizes") or {}
    sizes = {str(k): as_key(v) for k, v in blocks.items()} if isinstance(blocks, Mapping) else {}
    scale = _bits(sizes.get("scale_bits"))
    size, axis = sizes.get("-1"), cfg.get("axis")
    description = (
        f"num_bits {cfg.get('num_bits', 8)}, block_sizes {dict(sizes) or 'none'}, axis {axis}"
    )
    word = ""
    if not sizes:
        by = {None: {(4, 3): "fp8", 8: "int8"}, 0: {(4, 3): "fp8_channel", 8: "int8_channel"}}
        word = by.get(axis, {}).get(bits, "") if isinstance(axis, int | None) else ""
    elif set(sizes) >= {"-1", "-2"}:
        word = "fp8_block" if (bits, size, sizes["-2"]) == ((4, 3), 128, 128) else ""
        size = 128
    elif "-1" in sizes and size is None:
        word = "fp8_token" if (bits, cfg.get("type")) == ((4, 3), "dynamic") else ""
    elif isinstance(size, int):
        word = {
            (4, None): "int4",
            ((4, 3), (8, 0)): "mxfp8" if size == 32 else "",
            ((2, 1), (8, 0)): "mxfp4" if size == 32 else "",
            ((2, 1), (4, 3)): "nvfp4",
        }.get((bits, scale), "")
    if not word and (bits, scale) in _MX:
        description = f"{_MX[bits, scale]} ({description})"
    if isinstance(size, int) and sizes and not isinstance(size, bool):
        groups.append(size)
    return word, "" if word else description


def _bits(value: Any) -> Any:
    """Normalize `num_bits`: an integer, or exponent and mantissa bits."""
    if isinstance(value, str):
        return _FLOATS.get(value, value)
    return as_key(value)


_MULTIPLIERS = ("step_size", "start_multiplier", "stop_multiplier", "fp8_scale_sweep")
_SEARCH_OPTIONS = (*_MULTIPLIERS, "min_clip_ratio", "shrink_step", "max_tokens_per_batch")
"""Options of ModelOpt searches, which have fixed steps here."""
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "moe_calib_experts_ratio": (None,),
    "shared_states": (None, {}),
    "distributed_sync": (True, None),
    "sync_expert_weight_amax": (False, None),
}
_PERCENTILES = ("anchor_percentile", "upper_percentile")
_RANGES = {
    "anchor_percentile": AlgorithmOption(float, maximum=100.0, excludes_minimum=True),
    "upper_percentile": AlgorithmOption(float, maximum=100.0, excludes_minimum=True),
    "rho": AlgorithmOption(float, maximum=28671.0, excludes_minimum=True),
    "alpha": AlgorithmOption(float),
    "alpha_step": AlgorithmOption(float, minimum=0.001),
    "perc_damp": AlgorithmOption(float, excludes_minimum=True),
    "lowrank": AlgorithmOption(int, minimum=1, maximum=4096),
    "block_size": AlgorithmOption(int, minimum=1, maximum=1 << 20),
    "max_co_batch_size": AlgorithmOption(int, minimum=1, maximum=1 << 20),
    "max_tokens_per_batch": AlgorithmOption(int, minimum=1, maximum=1 << 20),
}
_SCALES = ("shared_states", "distributed_sync")
_CLIPS = ("max_co_batch_size", "max_tokens_per_batch", "min_clip_ratio", "shrink_step", "debug")
_ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "max": (*_SCALES, "sync_expert_weight_amax", "skip_forward_without_activation_calib"),
    "mse": (*_SCALES, *_MULTIPLIERS),
    "local_hessian": (*_SCALES, *_MULTIPLIERS, "block_size", "debug"),
    "smoothquant": ("alpha",),
    "awq_lite": ("alpha_step", "debug"),
    "awq_clip": _CLIPS,
    "awq_full": ("alpha_step", *_CLIPS),
    "awq": ("alpha_step", *_CLIPS),
    "svdquant": ("lowrank", "skip_layers"),
    "gptq": ("perc_damp", "block_size", "fused"),
    "nvfp4_act_headroom": (*_PERCENTILES, "rho", "weight_scale_algorithm"),
    "lsq": ("scale_algorithm", "learnable_amax", "tied_amax", "quantize_pre_scale"),
    "none": (),
}
_WEIGHT_SCALES = ("max", "mse", "local_hessian")
"""Algorithms that `weight_scale_algorithm` and `scale_algorithm` can name."""
_ANY = ("method", "moe_calib_experts_ratio", "layerwise")
_SHOWN = "get_qdq_activations_from_prev_layer"
_LAYERWISE = (
    "enable",
    _SHOWN,
    "checkpoint_dir",
    "save_every",
    "calib_mutates_weights",
)


def read_method(node: Node | None, problems: RecipeProblems, notes: list[str]) -> dict[str, Any]:
    """Read the `algorithm` of a recipe: a name, nothing, or a mapping with options.

    Options that only set search steps are listed in `notes`: ModelOpt alone takes them.
    """
    if node is not None and isinstance(node.value, list) and len(node.value) == 1:
        node = node.value[0]
    if node is None or node.value is None:
        return {"method": "none"}
    if isinstance(node.value, list):
        names = ", ".join(_name(item) for item in node.value)
        problems.add(node.line, f"a list of algorithms is not supported: {names}", "take one")
        return {"method": "none"}
    method = _name(node)
    name_node = node.get("method") or node
    if method not in _ALGORITHMS:
        hint = suggest(method, _ALGORITHMS)
        problems.add(name_node.line, f"algorithm {method!r} is not supported", hint)
        return {"method": "none"}
    if not isinstance(node.value, dict):
        return {"method": method}
    searched = []
    keys = (*_ANY, *_ALGORITHMS[method])
    for key, value in node.value.items():
        line, plain = (node.keys or {}).get(key, value.line), value.plain()
        if key not in keys:
            problems.add(line, f"unknown option {key!r} of {method}", suggest(key, keys))
        elif key == "layerwise":
            _check_layerwise(value, method, problems)
        elif key in _RANGES and plain is not None and not _RANGES[key].accepts(plain):
            problems.add(line, f"{key} is {plain!r}", _RANGES[key].describe())
        elif key == "skip_layers" and not _is_patterns(plain):
            problems.add(line, f"{key} is {plain!r}", "a list of patterns of module names")
        elif key == "scale_algorithm" and plain is None:
            continue
        elif key == "learnable_amax" and not _is_sides(plain):
            problems.add(line, f"{key} is {plain!r}", "pre, post, or a list of them")
        elif key in ("tied_amax", "quantize_pre_scale") and not isinstance(plain, bool):
            problems.add(line, f"{key} is {plain!r}", "true or false")
        elif key in ("weight_scale_algorithm", "scale_algorithm"):
            if _name(value) not in _WEIGHT_SCALES:
                message = f"{key} is {value.plain()!r}"
                problems.add(line, message, "a mapping with method " + ", ".join(_WEIGHT_SCALES))
            else:
                read_method(value, problems, notes)
        elif key in _VALUES and plain not in _VALUES[key]:
            problems.add(line, f"{key} {_shorten(plain)} is not supported", "leave it out")
        elif key in _SEARCH_OPTIONS or (key == "block_size" and method == "local_hessian"):
            searched.append(key)
    options = dict(node.plain()) | {"method": method}
    if method == "lsq":
        check_tied(options, (node.keys or {}).get("tied_amax", node.line), problems)
        notes.append(
            "lsq learns scales while a model trains: finetune --qat does; quantize alone gives "
            "those of its scale_algorithm"
        )
    if searched:
        notes.append(
            f"--backend modelopt takes {', '.join(searched)}; megtool's own {method} has fixed "
            "search steps"
        )
    return options


def _is_sides(value: Any) -> bool:
    if not isinstance(value, str | list):
        return False
    return all(isinstance(x, str) and x in SIDES for x in list_sides(value))


def _is_patterns(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(x, str) for x in value))


def _name(node: Node) -> str:
    named = node.get("method") if isinstance(node.value, dict) else node
    return "none" if named is None or named.value is None else named.text


def _check_layerwise(node: Node, method: str, problems: RecipeProblems) -> None:
    """Check `layerwise`, which has no effect except for passing quantized outputs to the next
    layer: only GPTQ does so."""
    if not isinstance(node.value, dict):
        if node.value not in (None, True, False):
            problems.add(node.line, f"layerwise is {node.plain()!r}", "a mapping")
        return
    for key, value in node.value.items():
        line = (node.keys or {}).get(key, value.line)
        if key not in _LAYERWISE:
            hint = suggest(key, _LAYERWISE)
            problems.add(line, f"unknown option {key!r} of layerwise", hint)
        elif key == _SHOWN and value.value not in (None, method == "gptq"):
            always = "always" if method == "gptq" else "never"
            message = f"{key} {_shorten(value.plain())}: with {method} it is {always} so"
            problems.add(line, message, "leave it out")
