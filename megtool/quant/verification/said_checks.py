"""Said checks: what config files say besides formats: names, groups, schemes, who wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megtool.quant.packed_tensors.hf_config import MIXED
from megtool.quant.qparams import INPUTS
from megtool.quant.recipes.formats import FORMATS, SMOOTHED, UNSMOOTHED
from megtool.quant.recipes.match import Decision
from megtool.quant.verification.findings import Finding, error
from megtool.quant.verification.quant_config_files import Declared
from megtool.quant.verification.stored_folder import Folder

_BESIDE, _INLINE = "hf_quant_config.json", "config.json"


def check_said(
    folder: Folder,
    said: Sequence[Declared],
    linear: Sequence[Decision],
    names: Mapping[str, str],
) -> Iterator[Finding]:
    """What is said, or not said, in words that no other check reads.

    `said` are the config files as understood, `names` the stored names of modules by their
    canonical ones.
    """
    stored = {names.get(d.module.name, d.module.name): d for d in linear if d.format is not None}
    smoothed = {m for m in stored if "pre_quant_scale" in folder.modules.get(m, {})}
    yield from _producer(folder)
    raw = {_BESIDE: (folder.quant or {}).get("quantization"), _INLINE: folder.quantization}
    for declared in said:
        value = raw[declared.where]
        if not isinstance(value, dict):
            continue
        yield from _zero_points(declared.where, value)
        yield from _names(declared.where, value, set(stored), smoothed)
        if smoothed and not declared.pre_quant_scale:
            yield error(
                "pre-quant-scale",
                min(smoothed),
                f"has a pre_quant_scale (so do {len(smoothed) - 1} more), and {declared.where} "
                "does not say so",
                "engines that follow the file leave the factors out, and outputs are wrong",
            )
        for name, d in stored.items():
            algo = d.format.algo if d.format is not None else ""
            if algo and len(FORMATS[algo].groups) > 1 and declared.group_of(name) is None:
                yield error(
                    "group-size",
                    d.module.name,
                    f"has groups of {d.format.group_size if d.format else 0}, and "
                    f"{declared.where} does not say so",
                    "engines take their own default (TensorRT-LLM: 128)",
                )
        if declared.where == _INLINE:
            yield from _scheme(declared, value)
            yield from _groups(value)


def _producer(folder: Folder) -> Iterator[Finding]:
    if folder.quant is None:
        return
    producer = folder.quant.get("producer")
    name = producer.get("name") if isinstance(producer, dict) else None
    if name != "modelopt":
        yield error(
            "config",
            _BESIDE,
            f"names {name!r} as its producer, not 'modelopt'",
            "TensorRT-LLM and SGLang do not know the file for ModelOpt's",
        )


def _entries(value: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What is said of the whole ("") and of single modules."""
    yield "", value
    listed = value.get("quantized_layers")
    for name, one in listed.items() if isinstance(listed, dict) else ():
        if isinstance(one, dict):
            yield str(name), one


def _zero_points(where: str, value: Mapping[str, Any]) -> Iterator[Finding]:
    for name, one in _entries(value):
        if one.get("has_zero_point"):
            yield error(
                "config",
                name or where,
                f"{where} says that it has zero points, and no format here has",
                "engines wait for them, or shift codes by what they find in memory",
            )


def _names(
    where: str, value: Mapping[str, Any], quantized: set[str], smoothed: set[str]
) -> Iterator[Finding]:
    """Formats that have another name with `pre_quant_scale` have it if and only if one is there."""
    for name, one in _entries(value):
        algo = one.get("quant_algo")
        algo = algo.upper() if isinstance(algo, str) else ""
        if algo not in SMOOTHED and algo not in UNSMOOTHED:
            continue
        inside = {m for m in quantized if not name or m == name or m.startswith(f"{name}.")}
        held = inside & smoothed
        plain = UNSMOOTHED.get(algo, algo)
        due = SMOOTHED[plain] if held else plain
        if algo != due:
            yield error(
                "algo",
                name or where,
                f"{where} says {algo}, and "
                + (f"{min(held)} has a pre_quant_scale" if held else "there is no pre_quant_scale")
                + f": that is {due}",
                "engines leave the factors out, or wait for some that never come",
            )


def _scheme(declared: Declared, value: Mapping[str, Any]) -> Iterator[Finding]:
    """`kv_cache_scheme` stands beside an FP8 cache, and beside no other."""
    scheme = value.get("kv_cache_scheme")
    is_fp8 = declared.kv_algo == "FP8"
    if not is_fp8 and scheme is None:
        return
    right = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (
        8,
        "float",
    )
    if not (is_fp8 and right):
        text = f"kv_cache_scheme is {scheme}, and the cache is {declared.kv_algo or 'kept'}"
        yield error("kv", declared.where, text, "vLLM follows it, and keeps another cache")


def _groups(value: Mapping[str, Any]) -> Iterator[Finding]:
    """`config_groups` say of each format what it is."""
    groups = value.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        told = _contradiction(value, group)
        if told:
            yield error(
                "config-groups",
                str(name),
                f"of config_groups says {told}",
                "engines that follow compressed-tensors' words take the codes for something else",
            )


def _contradiction(value: Mapping[str, Any], group: Any) -> str:
    """What a group says that its format is not; empty if nothing."""
    targets = group.get("targets") if isinstance(group, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(targets, list) or not isinstance(weights, dict):
        return "nothing that can be understood"
    layers = dict(_entries(value))
    mixed = value.get("quant_algo") == MIXED
    for target in targets:
        one = layers.get(str(target)) if mixed else value
        if one is None:
            return f"{target}, which is not in quantized_layers"
        algo = str(one.get("quant_algo")).upper()
        algo = UNSMOOTHED.get(algo, algo)
        if algo not in FORMATS:
            continue  # told where formats are held against tensors
        form = FORMATS[algo]
        kind = "int" if form.weights.startswith("INT") else "float"
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if (bits, weights.get("type")) != (form.bits, kind):
            return f"weights of {bits} bits ({weights.get('type')}), and {algo} has {form.bits}"
        due = one.get("group_size") if form.scaling == "group" else None
        if size is not None and size != due:
            return f"groups of {size}, and {algo} here has {due or 'none'}"
        inputs = group.get("input_activations")
        wanted = 4 if INPUTS.get(algo, "").startswith(("nvfp4", "mxfp4")) else 8
        if inputs is None and algo in ("FP8", "NVFP4"):
            return f"nothing of inputs, and {algo} rounds them"
        if inputs is not None and algo not in INPUTS:
            return f"that inputs are rounded, and {algo} does not"
        if isinstance(inputs, dict) and inputs.get("num_bits") != wanted:
            return f"inputs of {inputs.get('num_bits')} bits, and {algo} has {wanted}"
    return ""
