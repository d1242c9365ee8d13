"""The table of what engines demand (`engines.yaml`), read once a folder is linted."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal, Protocol, TypeVar

from megtool.quant.recipes.engine_support import EngineVersion
from megtool.report.finding import Severity

ENGINES = ("vllm", "sglang", "trtllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTarget:
    """An engine at a version, and the number of tensor-parallel ranks it will run on."""

    target: EngineVersion
    tp: int = 1

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self.target.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedForm:
    """A form of folders that an engine loads in some way from a version on."""

    engine: str
    since: str
    form: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantMethod(LoadedForm):
    """A `quant_method` that an engine loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimit:
    """What each rank's part of a matrix must be a multiple of; 0 stands for the group size."""

    engine: str
    form: str
    algos: tuple[str, ...]
    dim: Literal["rows", "columns"]
    multiple_of: int
    when: Literal["always", "split", "joined"] = "always"
    hint: str = ""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """The group sizes that an engine has kernels for."""

    engine: str
    algos: tuple[str, ...]
    sizes: tuple[int, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredKeys:
    """Keys that an engine requires in one of the two config files."""

    engine: str
    algos: tuple[str, ...] = ()
    file: Literal["config.json", "hf_quant_config.json"]
    keys: tuple[str, ...]
    non_empty: bool = False
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedScheme:
    """One kind of compressed-tensors group that an engine loads from a version on."""

    engine: str
    since: str
    formats: tuple[str, ...]
    type: str
    bits: tuple[int, ...]
    strategies: tuple[str, ...]
    inputs: tuple[str, ...]
    group_sizes: tuple[int, ...] = ()
    experts: bool = True
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineTransforms(LoadedForm):
    """The locations of `transform_config` at which an engine computes rotations."""

    locations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludeList(LoadedForm):
    """How an engine matches its list of modules that are not quantized; without
    `algos` for all of them. `decoded` are modules (the last part of a name) that it excludes, and
    whose codes it decodes when it loads them."""

    algos: tuple[str, ...] = ()
    matcher: str
    description: str
    decoded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpCopies:
    """Copies that an engine before a release needs in each layer of multi-token prediction."""

    engine: str
    before: str
    model_types: tuple[str, ...]
    quantized: bool
    tensors: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleText:
    """What `engines.yaml` says of a rule; `sources` are by engine, and the rule holds for these."""

    severity: Severity = "error"
    forms: tuple[str, ...] = ()
    engine_independent: bool = False
    sources: Mapping[str, str]
    effect: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """What engines make of modules, by the last part of their names."""

    fused: Mapping[str, tuple[str, ...]]
    expert_pairs: tuple[tuple[str, str], ...]
    split_rows: tuple[str, ...]
    split_columns: tuple[str, ...]
    embeddings: tuple[str, ...]
    routers: tuple[str, ...]
    never_quantized: tuple[str, ...]
    never_quantized_within: tuple[str, ...]
    unquantized_towers: tuple[str, ...]
    quantized_towers: tuple[str, ...]

    def is_never_quantized(self, module: str) -> bool:
        """Whether every engine builds a module without a quantization method."""
        *parents, last = module.split(".")
        is_within = not set(parents).isdisjoint(self.never_quantized_within)
        return last in self.never_quantized or is_within

    def split_dim(self, name: str) -> str | None:
        """The dim that tensor parallelism splits: `rows`, `columns` or None."""
        if name in self.split_rows:
            return "rows"
        return "columns" if name in self.split_columns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """The whole of `engines.yaml`."""

    modules: ModuleNames
    quant_methods: tuple[QuantMethod, ...]
    modelopt_spellings: Mapping[str, tuple[str, ...]]
    size_limits: tuple[SizeLimit, ...]
    group_sizes: tuple[GroupSizes, ...]
    required_keys: tuple[RequiredKeys, ...]
    compressed_schemes: tuple[CompressedScheme, ...]
    per_group_formats: Mapping[str, str]
    transforms: tuple[OnlineTransforms, ...]
    exclude_lists: tuple[ExcludeList, ...]
    mtp_copies: tuple[MtpCopies, ...]
    rules: Mapping[str, RuleText]


class _Dated(Protocol):
    @property
    def engine(self) -> str: ...

    @property
    def since(self) -> str: ...


_Row = TypeVar("_Row", bound=_Dated)


def rows_for(engine: EngineTarget, rows: Iterable[_Row]) -> list[_Row]:
    """The rows that hold for an engine at its version."""
    return [x for x in rows if x.engine == engine.engine and engine.target.has(x.since)]


def is_unknown_form(form: str) -> bool:
    """Whether a folder declares a method of which no engine has rules here, such as GPTQ's.

    Engines may load it: that there are no rules says nothing against a folder.
    """
    if not form or form.startswith("modelopt"):  # engines list ModelOpt's spellings
        return False
    return all(m.form != form for m in load_engines().quant_methods)


@lru_cache(maxsize=1)
def load_engines() -> EngineTable:
    """Read `engines.yaml`."""
    yaml: Any = importlib.import_module("yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    raw = yaml.load((files("megtool.lint") / "engines.yaml").read_text("utf-8"), Loader=loader)
    sources: dict[str, str] = raw.pop("sources")
    types = {
        "quant_methods": QuantMethod,
        "size_limits": SizeLimit,
        "group_sizes": GroupSizes,
        "required_keys": RequiredKeys,
        "compressed_schemes": CompressedScheme,
        "transforms": OnlineTransforms,
        "exclude_lists": ExcludeList,
        "mtp_copies": MtpCopies,
    }
    tables: dict[str, Any] = {
        name: tuple(
            row_type(**_freeze({**row, "source": sources[row["source"]]})) for row in raw[name]
        )
        for name, row_type in types.items()
    }
    for name, rule in raw["rules"].items():
        rule["sources"] = {engine: sources[key] for engine, key in rule["sources"].items()}
        raw["rules"][name] = RuleText(**_freeze(rule))
    tables["modules"] = ModuleNames(**_freeze(raw["modules"]))
    tables |= {f.name: _freeze(raw[f.name]) for f in fields(EngineTable) if f.name not in tables}
    return EngineTable(**tables)


def _freeze(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    return tuple(_freeze(item) for item in value) if isinstance(value, list) else value
