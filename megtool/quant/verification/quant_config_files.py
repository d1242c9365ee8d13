"""Declared: what the two config files of a quantized folder say, in one vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megtool.quant.recipes.formats import UNSMOOTHED
from megtool.quant.verification.stored_folder import Folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One file's word. `algo` is in capitals (`MIXED_PRECISION`: `layers` say it, by module);
    None stands for what is not said. `exclude` are names and globs of modules."""

    where: str
    algo: str
    group_size: int | None = None
    kv_algo: str = ""
    exclude: tuple[str, ...] = ()
    layers: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    pre_quant_scale: bool | None = None

    def excludes(self, module: str) -> bool:
        """Whether engines leave a module (by its stored name) alone.

        A pattern is a name, one that the name begins with, or a glob; with a text tower of its own
        a name may begin with `model.language_model`.
        """
        return any(
            module == e or module.startswith(e + ".") or fnmatchcase(module, e)
            for e in self.exclude
        )

    def algo_of(self, module: str) -> str:
        """The format of a module, empty where it has none."""
        if self.algo == "MIXED_PRECISION" or self.layers:
            return self._listed(module)[0]
        return "" if self.excludes(module) else self.algo

    def group_of(self, module: str) -> int | None:
        """The group size said of a module."""
        if self.layers:
            return self._listed(module)[1]
        return self.group_size

    def _listed(self, module: str) -> tuple[str, int | None]:
        """Experts are listed one by one, or by the name of what holds them."""
        while module:
            if module in self.layers:
                return self.layers[module]
            if ".experts" not in module:
                break
            module = module.rpartition(".")[0]
        return "", None


def in_quant_file(folder: Folder) -> Declared | None:
    """What hf_quant_config.json says."""
    if folder.quant is None or not isinstance(said := folder.quant.get("quantization"), dict):
        return None
    return _declared("hf_quant_config.json", said, said.get("exclude_modules"))


def in_config(folder: Folder) -> Declared | None:
    """What config.json says, in ModelOpt's form."""
    said = folder.quantization
    if said is None or not str(said.get("quant_method", "")).startswith("modelopt"):
        return None
    exclude = said.get("ignore", said.get("exclude_modules"))
    return _declared("config.json", said, exclude)


def _declared(where: str, said: Mapping[str, Any], exclude: Any) -> Declared:
    layers: dict[str, tuple[str, int | None]] = {}
    listed = said.get("quantized_layers")
    for name, one in listed.items() if isinstance(listed, dict) else ():
        if isinstance(one, dict):
            layers[str(name)] = (_algo(one.get("quant_algo")), _size(one.get("group_size")))
    group = _size(said.get("group_size"))
    if group is None:
        group = _size_in_groups(said.get("config_groups"))
    entries = [said]
    if isinstance(listed, dict):
        entries += [e for e in listed.values() if isinstance(e, dict)]
    smooths = [e["pre_quant_scale"] for e in entries if isinstance(e.get("pre_quant_scale"), bool)]
    return Declared(
        where=where,
        algo=_algo(said.get("quant_algo")),
        group_size=group,
        kv_algo=_kv(said),
        exclude=tuple(str(e) for e in exclude) if isinstance(exclude, list) else (),
        layers=layers,
        pre_quant_scale=any(smooths) if smooths else None,
    )


def _algo(value: Any) -> str:
    """In capitals; names that only add that columns are scaled are those of the plain formats."""
    name = value.upper() if isinstance(value, str) else ""
    return UNSMOOTHED.get(name, name)


def _size(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _size_in_groups(groups: Any) -> int | None:
    """The one group size of `config_groups`; None where there are several."""
    found: set[int] = set()
    for one in groups.values() if isinstance(groups, dict) else ():
        weights = one.get("weights") if isinstance(one, dict) else None
        size = _size(weights.get("group_size")) if isinstance(weights, dict) else None
        if size is not None:
            found.add(size)
    return found.pop() if len(found) == 1 else None


def _kv(said: Mapping[str, Any]) -> str:
    """`kv_cache_quant_algo`, or the scheme that stands for it."""
    if isinstance(algo := said.get("kv_cache_quant_algo"), str):
        return algo.upper()
    scheme = said.get("kv_cache_scheme")
    if isinstance(scheme, str):
        return scheme.upper()
    if isinstance(scheme, dict):
        return {8: "FP8", 4: "NVFP4"}.get(scheme.get("num_bits", 0), "")
    return ""
