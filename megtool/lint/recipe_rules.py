"""A folder, compared with the decisions of the recipe that it was quantized by.

`megtool quantize` applies these rules before it commits a folder. They need neither the weights of
the source nor an engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from megtool.lint.expected import ExpectedModel
from megtool.lint.folder_view import (
    COMPANIONS,
    CONFIG_FILE,
    KV_CACHE_SCALES,
    FolderView,
    StoredTensor,
)
from megtool.lint.mxfp4_rules import check_expected_blocks, has_blocks
from megtool.lint.quant_config import (
    MIXED,
    QuantConfig,
    check_agreement,
    find_missing_layers,
    parse_hf_quant_config,
    parse_quantization_config,
)
from megtool.lint.recipe_config_rules import check_auxiliary_files, check_declarations
from megtool.lint.scale_sanity import check_scales, describe_difference
from megtool.lint.stored_format import (
    STORED_FORMATS,
    check_scale_names,
    check_shapes,
    check_types,
)
from megtool.quant.packed_tensors.pack import TRANSPOSABLE_ALGOS
from megtool.quant.recipes.formats import FORMATS
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import find_fused_name
from megtool.report.finding import Finding, error, warning

_NOT_LOADED = "no engine loads it"
_UNKNOWN_NAME = "vLLM refuses names that it does not know"
_GLOBAL_SCALES = frozenset(algo for algo, stored in STORED_FORMATS.items() if stored.has_second)
_SHARED_SCALES = ("weight_scale_2", "input_scale", "pre_quant_scale")


def check_recipe(folder: FolderView, expected: ExpectedModel) -> Iterator[Finding]:
    """All contradictions among the config files, the tensors, their values and the decisions."""
    yield from _check_tokenizer(folder, expected)
    if has_blocks(expected.decisions):
        yield from check_expected_blocks(folder, expected)
    else:
        yield from _check_modelopt_form(folder, expected)
    yield from check_auxiliary_files(folder, expected.auxiliary_files)
    canonical = {stored: name for name, stored in expected.stored_names.items()}
    yield from check_scales(folder, canonical)
    yield from _check_siblings(folder, expected)


def _check_tokenizer(folder: FolderView, expected: ExpectedModel) -> Iterator[Finding]:
    if not folder.has_tokenizer:
        make = error if expected.needs_tokenizer else warning
        yield make("tokenizer", folder.path.name, "has no tokenizer", "engines cannot start")


def _check_modelopt_form(folder: FolderView, expected: ExpectedModel) -> Iterator[Finding]:
    for name, text in folder.problems:
        yield error("config", name, text, _NOT_LOADED)
    file = parse_hf_quant_config(folder.hf_quant_config)
    inline = parse_quantization_config(folder.quantization)
    if file is not None and inline is not None:
        yield from check_agreement(file, inline)
    configs = [c for c in (file, inline) if c is not None]
    linears = [d for d in expected.decisions if d.module.kind in ("linear", "embedding")]
    if inline is None and any(d.format is not None for d in linears):
        text = "has no quantization_config of ModelOpt"
        yield error("config", CONFIG_FILE, text, "vLLM and SGLang read codes as weights")
    for config in configs:
        yield from _check_layers(folder, config)
    rows: Counter[str] = Counter()  # of stored modules, which may hold several
    for d in linears:
        rows[expected.stored_name(d)] += d.module.shape[0]
    for d in linears:
        yield from _check_module(folder, configs, d, expected.stored_name(d), rows)
    yield from check_declarations(folder, configs, linears, expected)
    if not folder.modules_with("pre_quant_scale"):
        for config in configs:
            if config.pre_quant_scale:
                text = "declares pre_quant_scale, and there is none"
                effect = "TensorRT-LLM waits for it, or multiplies by uninitialized memory"
                yield error("pre-quant-scale", config.file, text, effect)
    yield from _check_kv_caches(folder, configs, expected)
    yield from _check_unexpected_scales(folder, linears, expected)


def _check_layers(folder: FolderView, config: QuantConfig) -> Iterator[Finding]:
    """`quantized_layers` lists exactly what is quantized."""
    if config.algo == MIXED and not config.layers:
        effect = "engines build every module without quantization and read codes as weights"
        yield error("layers", config.file, f"{MIXED} without quantized_layers", effect)
    for name in find_missing_layers(config, folder):
        text = f"is in quantized_layers of {config.file}, and in no file"
        yield error("layers", name, text, "vLLM expects scales that do not exist")


def _check_module(
    folder: FolderView,
    configs: Sequence[QuantConfig],
    d: Decision,
    stored: str,
    rows: Mapping[str, int],
) -> Iterator[Finding]:
    """One module is declared as decided, and stored as declared."""
    name = d.module.name
    tensors = folder.modules.get(stored)
    if tensors is None or "weight" not in tensors:
        return  # the comparison with the source reports it
    algo = d.format.algo if d.format is not None else ""
    for config in configs:
        declared = config.algo_of(stored)
        if declared == algo or (not algo and d.module.kind == "embedding"):
            continue  # engines never quantize embeddings
        if algo and not declared:
            is_mixed = config.algo == MIXED
            reason = "does not list it" if is_mixed else "excludes it"
            text = f"is quantized to {algo}, and {config.file} {reason}"
            effect = "engines read its codes as weights, or refuse its scales"
            yield error("layers" if is_mixed else "excluded", name, text, effect)
        elif declared and not algo:
            text = f"is not quantized, and {config.file} declares {declared}"
            yield error("not-excluded", name, text, "engines look for scales that do not exist")
        else:
            text = f"is {algo}, and {config.file} declares {declared}"
            effect = "engines that follow the file read these bytes as another format"
            yield error("algo", name, text, effect)
    if algo:
        yield from _check_tensors(d, tensors, algo, rows[stored])
        yield from _check_group_size(d, configs, stored)
    elif scales := [s for s in COMPANIONS if s in tensors]:
        text = f"is not quantized, and has {', '.join(scales)}"
        yield error("scale-extra", name, text, _UNKNOWN_NAME)


def _check_tensors(
    d: Decision, tensors: Mapping[str, StoredTensor], algo: str, rows: int
) -> Iterator[Finding]:
    """Names, types and shapes of the tensors of a quantized module, which has so many rows."""
    name, stored = d.module.name, STORED_FORMATS[algo]
    columns = d.module.shape[1]
    shape = (rows // stored.rows, ceil(columns / stored.columns))
    weight = tensors["weight"]
    shapes = (shape, shape[::-1]) if algo in TRANSPOSABLE_ALGOS else (shape,)
    if weight.dtype == stored.codes and weight.shape not in shapes:
        text = f"weight is {list(weight.shape)}, {algo} has {list(shape)}"
        yield error("shape", name, text, _NOT_LOADED)
    size = d.format.group_size if d.format else 0
    yield from check_types(name, tensors, algo, is_strict=True)
    yield from check_scale_names(name, tensors, algo)
    yield from check_shapes(name, tensors, algo, (rows, columns), size, is_strict=True)
    smoothing = tensors.get("pre_quant_scale")
    if smoothing is not None and smoothing.shape != (columns,):
        text = f"pre_quant_scale is {list(smoothing.shape)}, for {columns} columns"
        yield error("shape", name, text, _NOT_LOADED)


def _check_group_size(
    d: Decision, configs: Sequence[QuantConfig], stored: str
) -> Iterator[Finding]:
    """Each file that gives a group size gives the right one."""
    if d.format is None or FORMATS[d.format.algo].scaling != "group":
        return
    size = d.format.group_size or FORMATS[d.format.algo].groups[0]
    for config in configs:
        declared = config.group_size_of(stored)
        if declared is not None and declared != size:
            text = f"has groups of {size}, and {config.file} declares {declared}"
            effect = "engines scale the wrong columns, or refuse the shapes"
            yield error("group-size", d.module.name, text, effect)


def _check_kv_caches(
    folder: FolderView, configs: Sequence[QuantConfig], expected: ExpectedModel
) -> Iterator[Finding]:
    """Scales of the KV cache exist if and only if they are declared and decided."""
    names = expected.stored_names
    for d in expected.decisions:
        if d.module.kind != "kv_cache" or "mtp" in d.module.roles:
            continue
        algo = d.format.kv_algo if d.format is not None else ""
        parent = d.module.name.rpartition(".")[0]
        value = names.get(f"{parent}.v", names.get(f"{parent}.kv_down", parent))
        attention = value.rpartition(".")[0]
        scales = {last for last in KV_CACHE_SCALES if _has_cache_scale(folder, attention, last)}
        for config in configs:
            if config.kv_algo != algo:
                text = (
                    f"is {algo or 'not quantized'}, and {config.file} declares "
                    f"{config.kv_algo or 'nothing'}"
                )
                effect = "engines store keys and values in another type than was calibrated"
                yield error("kv", d.module.name, text, effect)
        is_constant = d.format is not None and d.format.constant
        is_latent = f"{parent}.v" not in names
        if algo and not is_constant and not is_latent and len(scales) < len(KV_CACHE_SCALES):
            missing = ", ".join(s for s in KV_CACHE_SCALES if s not in scales)
            effect = "vLLM, TensorRT-LLM and SGLang use 1 instead: large values are clipped"
            yield error("kv-scale", d.module.name, f"{missing} is missing", effect)
        if scales and not algo:
            text = f"has {', '.join(sorted(scales))}, and the cache is not quantized"
            effect = "vLLM refuses names that it does not know, others ignore them"
            yield error("kv-scale", d.module.name, text, effect)


def _has_cache_scale(folder: FolderView, attention: str, last: str) -> bool:
    """Whether a scale is stored with its projection or with the attention."""
    modules = (f"{attention}.{last[0]}_proj", attention, f"{attention}.attn")
    return any(last in folder.modules.get(m, {}) for m in modules)


def _check_unexpected_scales(
    folder: FolderView, linears: Sequence[Decision], expected: ExpectedModel
) -> Iterator[Finding]:
    """Scales of modules that the recipe decided nothing about."""
    decided = {expected.stored_name(d) for d in linears}
    for module, tensors in folder.modules.items():
        scales = [s for s in COMPANIONS[:3] if s in tensors]
        if scales and module not in decided:
            text = f"has {', '.join(scales)}, and is no quantizable module of this model"
            yield error("scale-extra", module, text, _UNKNOWN_NAME)


def _check_siblings(folder: FolderView, expected: ExpectedModel) -> Iterator[Finding]:
    """Modules that engines fuse (q, k, v; gate and up) share global, input and smoothing scales."""
    groups: dict[str, list[Decision]] = defaultdict(list)
    for d in expected.decisions:
        if d.module.kind == "linear" and d.format is not None and d.format.algo:
            groups[find_fused_name(d.module)].append(d)
    for group in groups.values():
        if len(group) < 2 or len({d.label for d in group}) > 1:
            continue
        for last in _SHARED_SCALES:
            yield from _check_shared_scale(folder, group, expected.stored_names, last)


def _check_shared_scale(
    folder: FolderView, group: Sequence[Decision], names: Mapping[str, str], last: str
) -> Iterator[Finding]:
    tensors = {
        d.module.name: t
        for d in group
        if (t := folder.modules.get(names.get(d.module.name, ""), {}).get(last)) is not None
    }
    parts = [(name.rpartition(".")[2], t) for name, t in tensors.items()]
    if not (text := describe_difference(folder, parts)):
        return
    is_error = last != "input_scale" or group[0].label in _GLOBAL_SCALES
    make = error if is_error else warning
    first, *others = tensors
    values = folder.read_values(tensors[first]).tobytes()
    module = next(n for n in others if folder.read_values(tensors[n]).tobytes() != values)
    yield make(
        "siblings",
        module,
        f"{last} differs from that of {first} ({text})",
        "vLLM, TensorRT-LLM and SGLang fuse them and keep a single value: "
        + ("the others are wrong" if is_error else "the largest, so that some lose precision"),
    )
