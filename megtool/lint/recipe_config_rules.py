"""Config files of a folder, compared with the decisions of its recipe and the unquantized model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megtool.formats.safetensors.quantization_config import QUANT_FILE, QUANT_KEYS, TRANSFORMS_KEY
from megtool.formats.safetensors.reader import INDEX
from megtool.lint.expected import ExpectedModel
from megtool.lint.folder_view import CONFIG_FILE, FolderView
from megtool.lint.quant_config import MIXED, QuantConfig, iterate_layers
from megtool.quant.recipes.formats import FORMATS, INPUT_PACKINGS, PLAIN_ALGOS, SMOOTHED_ALGOS
from megtool.quant.recipes.match import Decision
from megtool.report.finding import Finding, error
from megtool.storage.files import Files

_ABSENT = object()


def check_declarations(
    folder: FolderView,
    configs: Sequence[QuantConfig],
    linears: Sequence[Decision],
    expected: ExpectedModel,
) -> Iterator[Finding]:
    """Producer, zero points, names with smoothing, group sizes, schemes and `config_groups`."""
    stored = {expected.stored_name(d): d for d in linears if d.format is not None}
    smoothed = {m for m in stored if "pre_quant_scale" in folder.modules.get(m, {})}
    yield from _check_producer(folder)
    sections = {
        QUANT_FILE: (folder.hf_quant_config or {}).get("quantization"),
        CONFIG_FILE: folder.quantization,
    }
    for config in configs:
        section = sections[config.file]
        if not isinstance(section, dict):
            continue
        yield from _check_zero_points(config.file, section)
        yield from _check_smoothed_names(config.file, section, set(stored), smoothed)
        if smoothed and not config.pre_quant_scale:
            yield error(
                "pre-quant-scale",
                min(smoothed),
                f"has a pre_quant_scale (and {len(smoothed) - 1} more), and {config.file} does not "
                "declare it",
                "engines that follow the file ignore the factors, and outputs are wrong",
            )
        for name, d in stored.items():
            if d.format is None or not d.format.algo:
                continue
            has_sizes = len(FORMATS[d.format.algo].groups) > 1
            if has_sizes and config.group_size_of(name) is None:
                text = f"has groups of {d.format.group_size}, and {config.file} gives no group size"
                effect = "engines use their own default (TensorRT-LLM: 128)"
                yield error("group-size", d.module.name, text, effect)
        if config.file == CONFIG_FILE:
            yield from _check_kv_cache_scheme(config, section)
            yield from _check_config_groups(section)


def _check_producer(folder: FolderView) -> Iterator[Finding]:
    if folder.hf_quant_config is None:
        return
    producer = folder.hf_quant_config.get("producer")
    name = producer.get("name") if isinstance(producer, dict) else None
    if name != "modelopt":
        text = f"names {name!r} as its producer, not 'modelopt'"
        effect = "TensorRT-LLM and SGLang do not recognize the file as ModelOpt's"
        yield error("config", QUANT_FILE, text, effect)


def _entries(section: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The section itself ("") and its entries for single modules."""
    yield "", section
    yield from iterate_layers(section)


def _check_zero_points(file: str, section: Mapping[str, Any]) -> Iterator[Finding]:
    for name, entry in _entries(section):
        if entry.get("has_zero_point"):
            text = f"{file} declares zero points, and no format here has them"
            effect = "engines expect them, or shift codes by uninitialized memory"
            yield error("config", name or file, text, effect)


def _check_smoothed_names(
    file: str, section: Mapping[str, Any], quantized: set[str], smoothed: set[str]
) -> Iterator[Finding]:
    """A format has its name for `pre_quant_scale` if and only if there is one."""
    for name, entry in _entries(section):
        algo = entry.get("quant_algo")
        algo = algo.upper() if isinstance(algo, str) else ""
        if algo not in SMOOTHED_ALGOS and algo not in PLAIN_ALGOS:
            continue
        modules = {m for m in quantized if not name or m == name or m.startswith(f"{name}.")}
        with_scale = modules & smoothed
        plain = PLAIN_ALGOS.get(algo, algo)
        due = SMOOTHED_ALGOS[plain] if with_scale else plain
        if algo != due:
            fact = f"{min(with_scale)} has a" if with_scale else "there is no"
            text = f"{file} declares {algo}, and {fact} pre_quant_scale: that is {due}"
            effect = "engines ignore the factors, or expect factors that do not exist"
            yield error("algo", name or file, text, effect)


def _check_kv_cache_scheme(config: QuantConfig, section: Mapping[str, Any]) -> Iterator[Finding]:
    """There is a `kv_cache_scheme` for an FP8 cache, and for no other."""
    scheme = section.get("kv_cache_scheme")
    is_fp8 = config.kv_algo == "FP8"
    if not is_fp8 and scheme is None:
        return
    kind = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type"))
    if not is_fp8 or kind != (8, "float"):
        cache = config.kv_algo or "not quantized"
        text = f"kv_cache_scheme is {scheme}, and the cache is {cache}"
        yield error("kv", config.file, text, "vLLM follows it, and uses another cache type")


def _check_config_groups(section: Mapping[str, Any]) -> Iterator[Finding]:
    """`config_groups` describe the format of their targets."""
    groups = section.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        if text := _contradiction(section, group):
            effect = "engines that follow compressed-tensors' keys read the codes as another format"
            yield error("config-groups", str(name), f"of config_groups declares {text}", effect)


def _contradiction(section: Mapping[str, Any], group: Any) -> str:
    """What a group declares that its format is not; empty if nothing."""
    targets = group.get("targets") if isinstance(group, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(targets, list) or not isinstance(weights, dict):
        return "no targets or no weights"
    layers = dict(_entries(section))
    is_mixed = section.get("quant_algo") == MIXED
    inputs = group.get("input_activations")
    for target in targets:
        entry = layers.get(str(target)) if is_mixed else section
        if entry is None:
            return f"{target}, which is not in quantized_layers"
        algo = str(entry.get("quant_algo")).upper()
        algo = PLAIN_ALGOS.get(algo, algo)
        if algo not in FORMATS:
            continue  # reported when formats are compared with tensors
        number_format = FORMATS[algo]
        kind = "int" if number_format.weights.startswith("INT") else "float"
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if (bits, weights.get("type")) != (number_format.bits, kind):
            stored = f"{algo} has {number_format.bits}"
            return f"weights of {bits} bits ({weights.get('type')}), and {stored}"
        due = entry.get("group_size") if number_format.scaling == "group" else None
        if size is not None and size != due:
            return f"groups of {size}, and {algo} here has {due or 'none'}"
        input_bits = 4 if INPUT_PACKINGS.get(algo, "").startswith(("nvfp4", "mxfp4")) else 8
        if inputs is None and algo in ("FP8", "NVFP4", "NVFP4_SVD"):
            return f"no input_activations, and {algo} quantizes inputs"
        if inputs is not None and algo not in INPUT_PACKINGS:
            return f"quantized inputs, and {algo} has none"
        if isinstance(inputs, dict) and inputs.get("num_bits") != input_bits:
            return f"inputs of {inputs.get('num_bits')} bits, and {algo} has {input_bits}"
    return ""


def check_auxiliary_files(folder: FolderView, files: Mapping[str, bytes]) -> Iterator[Finding]:
    """Files that differ from those of the unquantized model: config.json by its keys other than
    those of the quantization, others byte for byte."""
    for name, content in files.items():
        if name in (INDEX, QUANT_FILE):
            continue  # compared with the tensors
        if name == CONFIG_FILE:
            yield from _check_model_config(folder, content)
            continue
        effect = "engines compute or stop differently than with the source"
        if "token" in name or name in ("vocab.json", "merges.txt", "chat_template.jinja"):
            effect = "texts become other tokens, or engines cannot start"
        stored = Files().read_whole(folder.path / name)
        if stored is None:
            yield error("file", name, "is missing, and the source has it", effect)
            continue
        if stored != content:
            text = f"differs from the source's: {len(stored):,} bytes instead of {len(content):,}"
            yield error("file", name, text, effect)


def _check_model_config(folder: FolderView, content: bytes) -> Iterator[Finding]:
    if folder.config is None:
        return  # reported as a problem of the folder
    expected, stored = _model_keys(json.loads(content)), _model_keys(folder.config)
    for key in sorted(expected.keys() | stored.keys()):
        a, b = stored.get(key, _ABSENT), expected.get(key, _ABSENT)
        if a != b or type(a) is not type(b):
            text = f"{key} is {_format_value(a)}, in the source {_format_value(b)}"
            effect = "engines compute another model, or load it in another type"
            yield error("config", CONFIG_FILE, text, effect)


def _model_keys(value: Any) -> dict[str, Any]:
    """The keys of a config.json that describe the model itself."""
    if not isinstance(value, dict):
        return {}
    return {k: v for k, v in value.items() if k not in (*QUANT_KEYS, TRANSFORMS_KEY)}


def _format_value(value: object) -> str:
    return "missing" if value is _ABSENT else json.dumps(value)[:80]
