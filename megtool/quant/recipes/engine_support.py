"""Formats that each engine version can load, as a table with sources."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megtool.errors import UsageError
from megtool.quant.recipes.engine_models import check_family, permutes_rotary_rows, rotary_conflict
from megtool.quant.recipes.formats import FORMATS, SMOOTHED_ALGOS, SMOOTHING_METHODS, RecipeFormat
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import find_fused_name, is_in_expert_blocks
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.recipes.rules import RecipeProblems

_NEWEST = (9999,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """One table line: formats that an engine loads from a version on.

    `since` is the first known version; `main` is the source of 2026-08 without a release number.
    `part` is `linear`, `kv`, `mixed` (several formats in one model), or `blocks` (all experts of a
    layer in one tensor, as in gpt-oss). `dense` lines do not cover experts.
    """

    engine: str
    since: str
    part: str
    algos: tuple[str, ...]
    source: str
    dense: bool = False


_BLOCKS = "config.json of openai/gpt-oss-20b: quant_method mxfp4"
_VLLM = "docs.vllm.ai/en/v{}/api/vllm/model_executor/layers/quantization/modelopt"
_MODELOPT_PY = "vllm modelopt.py at 00155cde"
_TRTLLM = "nvidia.github.io/TensorRT-LLM/{}/features/quantization.html"
_SGLANG = "sglang srt/layers/quantization/modelopt_quant.py; sgl-project/sglang issue 18261"

TABLE: tuple[Support, ...] = (
    Support(
        engine="vllm",
        since="0.9.0",
        part="linear",
        algos=("FP8", "NVFP4"),
        source=_VLLM.format("0.9.0"),
    ),
    Support(engine="vllm", since="0.9.0", part="kv", algos=("FP8",), source=_VLLM.format("0.9.0")),
    Support(
        engine="vllm",
        since="0.15.0",
        part="linear",
        algos=("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
        source=_VLLM.format("0.15.0") + ", vllm-project/vllm pull request 30957",
    ),
    Support(
        engine="vllm",
        since="0.16.0",
        part="linear",
        algos=("MXFP8",),
        source=_VLLM.format("0.16.0") + ", vllm-project/vllm pull request 33786 (no experts yet)",
        dense=True,
    ),
    Support(
        engine="vllm",
        since="main",
        part="linear",
        algos=("MXFP8", "W4A16_NVFP4"),
        source=_MODELOPT_PY,
    ),
    Support(engine="vllm", since="main", part="kv", algos=("NVFP4",), source=_MODELOPT_PY),
    Support(
        engine="vllm",
        since="0.11.0",
        part="blocks",
        algos=("MXFP4",),
        source=f"vllm mxfp4.py and models/gpt_oss.py; {_BLOCKS}",
    ),
    Support(
        engine="vllm",
        since="main",
        part="mixed",
        algos=("FP8", "NVFP4", "W4A16_NVFP4"),
        source=_MODELOPT_PY + ", vllm-project/vllm pull request 35047",
    ),
    Support(
        engine="trtllm",
        since="1.0.0",
        part="linear",
        algos=(
            "FP8",
            "FP8_PB_WO",
            "FP8_PER_CHANNEL_PER_TOKEN",
            "NVFP4",
            "W4A16_AWQ",
            "W4A8_AWQ",
        ),
        source=_TRTLLM.format("1.0.0"),
    ),
    Support(
        engine="trtllm", since="1.0.0", part="kv", algos=("FP8",), source=_TRTLLM.format("1.0.0")
    ),
    Support(
        engine="trtllm",
        since="1.3.0",
        part="kv",
        algos=("NVFP4",),
        source=_TRTLLM.format("1.3.0rc27"),
    ),
    Support(
        engine="trtllm",
        since="main",
        part="mixed",
        algos=("FP8", "FP8_PB_WO", "NVFP4", "W4A16_AWQ", "W4A8_AWQ"),
        source="TensorRT-LLM quantization/modelopt_config.py at 2edf354d",
    ),
    Support(
        engine="trtllm",
        since="main",
        part="blocks",
        algos=("MXFP4",),
        source=f"TensorRT-LLM _torch/model_config.py; {_BLOCKS}",
    ),
    Support(engine="sglang", since="0.5", part="linear", algos=("FP8", "NVFP4"), source=_SGLANG),
    Support(engine="sglang", since="0.5", part="kv", algos=("FP8",), source=_SGLANG),
    Support(
        engine="sglang",
        since="0.5",
        part="blocks",
        algos=("MXFP4",),
        source=f"sglang srt/layers/quantization/mxfp4.py; {_BLOCKS}",
    ),
)

ENGINES = tuple(dict.fromkeys(s.engine for s in TABLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVersion:
    """An engine with a version; without one, the newest source in the table."""

    engine: str
    version: str = ""

    @property
    def name(self) -> str:
        """The engine with its version."""
        return f"{self.engine} {self.version}" if self.version else self.engine

    def has(self, since: str) -> bool:
        """Whether this is version `since` or later; True without a version."""
        return _order(since) <= (_order(self.version) if self.version else _NEWEST)

    @property
    def unknown(self) -> str:
        """A note if the release is newer than all in the table, else ""."""
        newest = _newest(self.engine)
        if not self.version or _order(self.version) == _NEWEST:
            return ""
        if _order(self.version)[:2] <= _order(newest)[:2]:
            return ""
        return (
            f"{self.name} is newer than {newest}, the last known release, whose rules are applied"
        )

    @property
    def newest_source(self) -> str:
        """The source of the last release in the table."""
        newest = _newest(self.engine)
        return next(s.source for s in TABLE if (s.engine, s.since) == (self.engine, newest))

    def supported(self, part: str) -> list[Support]:
        """The table lines that apply to this version."""
        return [
            s for s in TABLE if s.engine == self.engine and s.part == part and self.has(s.since)
        ]


def parse_engine(text: str) -> EngineVersion:
    """`vllm`, or `vllm@0.16.0`.

    Raises:
        UsageError: unknown engine or version.
    """
    engine, _, version = text.partition("@")
    if engine not in ENGINES:
        raise UsageError(f"the engine {engine!r} is unknown", hint="known: " + ", ".join(ENGINES))
    if "@" in text and version != "main" and not re.fullmatch(_VERSION, version):
        raise UsageError(
            f"{version!r} is not a version of {engine}", hint="such as 0.16.0, or main"
        )
    first = min((s.since for s in TABLE if s.engine == engine), key=_order)
    if version and _order(version) < _order(first):
        raise UsageError(
            f"nothing is known about {engine} {version}", hint=f"{first} is the first version"
        )
    newest = _newest(engine)
    if version and version != "main" and _order(version)[0] > _order(newest)[0]:
        raise UsageError(
            f"nothing is known about {engine} {version}",
            hint=f"{newest} is the last version that is known; {engine}@main is newest",
        )
    return EngineVersion(engine=engine, version=version)


_VERSION = r"\d+(\.\d+)*((a|b|rc|\.?post|\.?dev)\d+)?(\+[\w.]+)?"


def _newest(engine: str) -> str:
    return max((s.since for s in TABLE if s.engine == engine and s.since != "main"), key=_order)


def _order(version: str) -> tuple[int, ...]:
    if version == "main":
        return _NEWEST
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(n) for n in match[0].split(".")] if match else [0]
    return tuple([*numbers, 0, 0, 0][:3])


def adapt_to_engine(engine: EngineVersion, recipe: Recipe, decisions: Sequence[Decision]) -> Recipe:
    """Adapt the recipe to an engine, with a note about changes.

    Formats with a `pre_quant_scale` have another name (NVFP4_AWQ), and some engines load only the
    plain format: then smoothing scales are used only where a norm can absorb them.
    """
    if recipe.folds_scales:
        return recipe
    loads = {a for s in engine.supported("linear") for a in s.algos}
    for d in decisions:
        for method, algo in _methods(d, recipe) if d.format else ():
            smoothed = SMOOTHED_ALGOS.get(algo, algo)
            if method in SMOOTHING_METHODS and algo in loads and smoothed not in loads:
                note = (
                    f"{engine.name} loads {algo} and not {smoothed}: smoothing scales are used "
                    "only where the preceding norm can absorb them (`fold: true`)"
                )
                algorithm = {**recipe.algorithm, "fold": True}
                return replace(recipe, algorithm=algorithm, notes=(*recipe.notes, note))
    return recipe


def _methods(decision: Decision, recipe: Recipe) -> list[tuple[str, str]]:
    """The algorithm and format of a module, or all candidates of a choice."""
    format = decision.format
    if format is None or format.kv_algo:
        return []
    listed = [recipe.formats[c] for c in format.choose if c in recipe.formats] or [format]
    return [(f.method or recipe.method, f.algo) for f in listed if f.algo]


def check_engine(
    engine: EngineVersion,
    recipe: Recipe,
    decisions: Sequence[Decision],
    problems: RecipeProblems,
    *,
    architecture: str = "",
) -> None:
    """Add problems for everything that the engine cannot run.

    `architecture` is the model class in config.json, or "" if unknown.
    """
    used: dict[str, list[Decision]] = defaultdict(list)
    caches: dict[str, list[Decision]] = defaultdict(list)
    for d in decisions:
        if d.module.kind == "kv_cache":
            if "mtp" not in d.module.roles:  # MTP layers have their own cache
                caches[d.format.kv_algo if d.format else ""].append(d)
        elif d.format is not None:
            algos = _algos(d.format, recipe.formats)
            permutes_rows = permutes_rotary_rows(engine, architecture)
            if d.format.choose and any(
                list_permitted_sets(engine, (), algos, rotary=permutes_rows)
            ):
                continue  # unsupported candidates are not chosen
            for algo in algos:
                used[algo].append(d)
    for algo, group in used.items():
        part = "blocks" if all(is_in_expert_blocks(d.module) for d in group) else "linear"
        lines = [s for s in engine.supported(part) if algo in s.algos]
        if not lines:
            problems.add(
                _line(group), f"{engine.name} does not load {algo}", _support_hint(engine, algo)
            )
        elif all(s.dense for s in lines) and any("expert" in d.module.roles for d in group):
            problems.add(
                _line(group), f"{engine.name} has no {algo} for experts", f"see {lines[0].source}"
            )
    if len(used) > 1:
        mixed = {a for s in engine.supported("mixed") for a in s.algos}
        for algo in used:
            if algo not in mixed:
                message = f"{engine.name} does not load {algo} with {_other_algos(used, algo)}"
                hint = f"it mixes {', '.join(sorted(mixed))}" if mixed else "it mixes no formats"
                problems.add(_line(used[algo]), message, hint)
    for algo in caches:
        if algo and not any(algo in s.algos for s in engine.supported("kv")):
            algos_ = sorted({a for s in engine.supported("kv") for a in s.algos})
            problems.add(
                _line(caches[algo]),
                f"{engine.name} has no KV cache in {algo}",
                f"known: {', '.join(algos_)}",
            )
    if len(caches) > 1:
        message = " and ".join(a or "as it is" for a in caches)
        problems.add(
            0,
            f"{engine.name} needs the same KV cache format in all layers",
            f"here it is {message}",
        )
    check_family(engine, architecture, decisions, used, problems)
    _check_cut_blocks(engine, used, problems)
    _check_siblings(engine, decisions, problems)


def list_permitted_sets(
    engine: EngineVersion,
    fixed: Collection[str],
    algos: Collection[str],
    *,
    experts: bool = False,
    rotary: bool = False,
) -> list[frozenset[str]]:
    """List the maximal subsets of `algos` that a model may use together with the `fixed` ones.

    `experts`: experts would use them too; `rotary`: so would queries and keys of a model whose rows
    the engine permutes. Returns at least one set, which is empty if the engine loads none of them.
    """
    loads = {a for s in engine.supported("linear") if not (s.dense and experts) for a in s.algos}
    loads -= {a for a in loads if rotary and rotary_conflict(engine, a)}
    mixes = {a for s in engine.supported("mixed") for a in s.algos}
    sets = [{a} for a in algos if a in loads and set(fixed) <= {a}]
    if set(fixed) <= mixes:
        sets.append({a for a in algos if a in loads and a in mixes})
    maximal = [s for i, s in enumerate(sets) if not any(s < o for o in sets) and s not in sets[:i]]
    return [frozenset(s) for s in maximal] or [frozenset()]


def _check_cut_blocks(
    engine: EngineVersion, used: Mapping[str, Sequence[Decision]], problems: RecipeProblems
) -> None:
    """Check for blocks that are cut at the end of a weight: vLLM needs another form for them."""
    if engine.engine != "vllm":
        return
    for d in used.get("FP8_PB_WO", ()):
        size = d.format.group_size if d.format else 0
        if d.format and size and not d.format.choose and any(n % size for n in d.module.shape):
            shape = " x ".join(map(str, d.module.shape))
            problems.add(
                _line([d]),
                f"{engine.name} loads blocks of {size} that are cut at the end of a weight only as "
                f"compressed-tensors, and {d.module.name} is {shape}",
                "quantize without --target, then megtool export --to compressed-tensors",
            )
            return


def _check_siblings(
    engine: EngineVersion, decisions: Sequence[Decision], problems: RecipeProblems
) -> None:
    """Check that fused modules share a format: q, k and v, gate and up, experts of a layer."""
    groups: dict[str, list[Decision]] = defaultdict(list)
    for d in decisions:
        if d.module.kind == "linear":
            name = find_fused_name(d.module)
            if "expert" in d.module.roles:
                name = name.partition(".experts.")[0] + ".experts"
            groups[name].append(d)
    wrong = [(n, ds) for n, ds in groups.items() if len({_format_key(d) for d in ds}) > 1]
    if not wrong:
        return
    name, siblings = wrong[0]
    formats = ", ".join(
        f"{d.module.name.rpartition('.')[2]} {d.label}" for d in _distinct_formats(siblings)
    )
    more = f"; so do {len(wrong) - 1} more" if len(wrong) > 1 else ""
    problems.add(
        _line([d for d in siblings if d.format] or siblings),
        f"{engine.name} fuses {name}, and its parts have different formats: {formats}{more}",
        "give them one format",
    )


def _distinct_formats(decisions: Sequence[Decision]) -> list[Decision]:
    return list({_format_key(d): d for d in decisions}.values())


def _format_key(d: Decision) -> Any:
    return (d.label, d.format.group_size if d.format else 0)


def _algos(format: RecipeFormat, formats: Mapping[str, RecipeFormat]) -> tuple[str, ...]:
    """The format of a module, or all candidates of a choice."""
    if not format.choose:
        return (format.algo,)
    named = (formats[c].algo if c in formats else c for c in format.choose)
    return tuple(algo for algo in named if algo in FORMATS)


def _line(decisions: Sequence[Decision]) -> int:
    format = decisions[0].format
    return format.line if format else 0


def _other_algos(used: dict[str, list[Decision]], algo: str) -> str:
    return ", ".join(a for a in used if a != algo)


def _support_hint(engine: EngineVersion, algo: str) -> str:
    later = [s for s in TABLE if s.engine == engine.engine and algo in s.algos]
    if later and later[0].part == "linear":
        return f"{later[0].since} does, by {later[0].source}"
    algos = dict.fromkeys(a for s in engine.supported("linear") for a in s.algos)
    return "known: " + ", ".join(algos)
