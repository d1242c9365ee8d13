"""What the two config files of a ModelOpt folder say of its quantization, in one vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megtool.formats.safetensors.quantization_config import QUANT_FILE
from megtool.lint.folder_view import CONFIG_FILE, FolderView
from megtool.quant.recipes.formats import PLAIN_ALGOS
from megtool.report.finding import Finding, error

MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """The quantization that one `file` declares.

    `algo` is in capitals; if it is `MIXED_PRECISION`, `layers` give the algorithm and group size of
    each module. None stands for what the file does not say. `excluded` are names and globs of
    modules.
    """

    file: str
    algo: str
    group_size: int | None = None
    kv_algo: str = ""
    excluded: tuple[str, ...] = ()
    layers: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    pre_quant_scale: bool | None = None

    def excludes(self, module: str) -> bool:
        """Whether engines leave a module (by its stored name) unquantized.

        A pattern is a name, one that the name begins with, or a glob; with a text tower of its own
        a name may begin with `model.language_model`.
        """
        return any(
            module == e or module.startswith(e + ".") or fnmatchcase(module, e)
            for e in self.excluded
        )

    def algo_of(self, module: str) -> str:
        """The algorithm of a module, empty if it has none."""
        if self.algo == MIXED or self.layers:
            return self._layer(module)[0]
        return "" if self.excludes(module) else self.algo

    def group_size_of(self, module: str) -> int | None:
        """The group size declared for a module."""
        return self._layer(module)[1] if self.layers else self.group_size

    def _layer(self, module: str) -> tuple[str, int | None]:
        """Experts are listed one by one, or by the name of their parent."""
        while module:
            if module in self.layers:
                return self.layers[module]
            if ".experts" not in module:
                break
            module = module.rpartition(".")[0]
        return "", None


def parse_hf_quant_config(value: Mapping[str, Any] | None) -> QuantConfig | None:
    """What hf_quant_config.json declares."""
    section = (value or {}).get("quantization")
    if not isinstance(section, dict):
        return None
    return _parse(QUANT_FILE, section, section.get("exclude_modules"))


def parse_quantization_config(value: Mapping[str, Any] | None) -> QuantConfig | None:
    """What the `quantization_config` of config.json declares, if it is ModelOpt's."""
    if value is None or not str(value.get("quant_method", "")).startswith("modelopt"):
        return None
    return _parse(CONFIG_FILE, value, value.get("ignore", value.get("exclude_modules")))


def check_agreement(first: QuantConfig, second: QuantConfig) -> Iterator[Finding]:
    """Where the two config files contradict each other."""
    for key, a, b in (
        ("quant_algo", first.algo, second.algo),
        ("kv_cache_quant_algo", first.kv_algo, second.kv_algo),
        ("excluded modules", sorted(first.excluded), sorted(second.excluded)),
        ("quantized_layers", dict(first.layers), dict(second.layers)),
        ("group_size", first.group_size, second.group_size),
        ("pre_quant_scale", first.pre_quant_scale, second.pre_quant_scale),
    ):
        if a == b or (key in _OPTIONAL and None in (a, b)):
            continue
        if isinstance(a, list) and isinstance(b, list):
            text = ", ".join(sorted(set(a) ^ set(b))[:3]) + " in only one of them"
        elif isinstance(a, dict) and isinstance(b, dict):
            keys = {k for k in a.keys() | b.keys() if a.get(k) != b.get(k)}
            text = f"{len(keys)} differ, such as {min(keys)}"
        else:
            text = f"{a or 'nothing'} in {first.file}, {b or 'nothing'} in {second.file}"
        yield error(
            "config-differ",
            first.file,
            f"{key}: {text}",
            "TensorRT-LLM follows hf_quant_config.json, vLLM and SGLang follow either",
        )


_OPTIONAL = ("group_size", "pre_quant_scale")


def find_missing_layers(config: QuantConfig, folder: FolderView) -> list[str]:
    """Entries of `quantized_layers` that name no module of the folder."""
    return [
        name
        for name in config.layers
        if name not in folder.modules and not any(m.startswith(f"{name}.") for m in folder.modules)
    ]


def _parse(file: str, section: Mapping[str, Any], excluded: Any) -> QuantConfig:
    layers: dict[str, tuple[str, int | None]] = {}
    entries = [section]
    for name, entry in iterate_layers(section):
        layers[name] = (_algo(entry.get("quant_algo")), _size(entry.get("group_size")))
        entries.append(entry)
    group_size = _size(section.get("group_size"))
    if group_size is None:
        group_size = _group_size_of_groups(section.get("config_groups"))
    smooths = [e["pre_quant_scale"] for e in entries if isinstance(e.get("pre_quant_scale"), bool)]
    return QuantConfig(
        file=file,
        algo=_algo(section.get("quant_algo")),
        group_size=group_size,
        kv_algo=_kv_algo(section),
        excluded=tuple(str(e) for e in excluded) if isinstance(excluded, list) else (),
        layers=layers,
        pre_quant_scale=any(smooths) if smooths else None,
    )


def iterate_layers(section: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The entries of `quantized_layers`."""
    layers = section.get("quantized_layers")
    for name, entry in layers.items() if isinstance(layers, dict) else ():
        if isinstance(entry, dict):
            yield str(name), entry


def _algo(value: Any) -> str:
    """In capitals; names that only add smoothing are those of the plain formats."""
    name = value.upper() if isinstance(value, str) else ""
    return PLAIN_ALGOS.get(name, name)


def _size(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _group_size_of_groups(groups: Any) -> int | None:
    """The only group size of `config_groups`; None if there are several."""
    sizes: set[int] = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        size = _size(weights.get("group_size")) if isinstance(weights, dict) else None
        if size is not None:
            sizes.add(size)
    return sizes.pop() if len(sizes) == 1 else None


def _kv_algo(section: Mapping[str, Any]) -> str:
    """`kv_cache_quant_algo`, or the scheme that stands for it."""
    if isinstance(algo := section.get("kv_cache_quant_algo"), str):
        return algo.upper()
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, str):
        return scheme.upper()
    if isinstance(scheme, dict):
        return {8: "FP8", 4: "NVFP4"}.get(scheme.get("num_bits", 0), "")
    return ""
