"""Rules about modules: the format that an engine expects of each, and the tensors it finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megtool.lint.compressed_rules import group_in_engines, ignored_modules
from megtool.lint.config_rules import effective_config
from megtool.lint.context import Check, LinearModule, LintContext
from megtool.lint.engines import EngineTarget, ExcludeList, load_engines, rows_for
from megtool.lint.exclude_matching import MATCHERS, PartlyExcludedError
from megtool.lint.quant_config import MIXED
from megtool.lint.stored_format import STORED_FORMATS
from megtool.quant.recipes.engine_models import is_built_plain
from megtool.quant.recipes.formats import FORMATS
from megtool.report.finding import Finding


@dataclass(frozen=True, slots=True)
class _Exclusions:
    """The list of unquantized modules that an engine reads, and how it matches it."""

    row: ExcludeList
    patterns: tuple[str, ...]

    @classmethod
    def read(cls, context: LintContext, engine: EngineTarget) -> _Exclusions | None:
        """None if the engine reads no list of such a folder."""
        config = effective_config(context, engine)
        if context.form == "modelopt" and config is None:
            return None
        algo = config.algo if config is not None else ""
        rows = [
            row
            for row in rows_for(engine, load_engines().exclude_lists)
            if row.form == context.form and (not row.algos or algo in row.algos)
        ]
        if not rows:
            return None
        newest = [row for row in rows if row.since == rows[-1].since]
        patterns = config.excluded if config is not None else ignored_modules(context.declared)
        return cls(min(newest, key=lambda row: not row.algos), patterns)

    def excludes(self, unit: str) -> bool:
        """Whether the engine leaves a unit unquantized.

        Raises:
            PartlyExcludedError: the list excludes some of its parts.
        """
        return MATCHERS[self.row.matcher](unit, self.patterns)

    def pattern_for(self, unit: str) -> str:
        """The entry that excludes a unit."""
        for pattern in self.patterns:
            try:
                if MATCHERS[self.row.matcher](unit, (pattern,)):
                    return repr(pattern)
            except PartlyExcludedError:
                continue
        return "the list"


def excluded_units(context: LintContext, engine: EngineTarget) -> set[str]:
    """Units that the engine builds without quantization."""
    exclusions = _Exclusions.read(context, engine)
    excluded = set()
    for unit in context.units() if exclusions is not None else ():
        try:
            if exclusions is not None and exclusions.excludes(unit):
                excluded.add(unit)
        except PartlyExcludedError:
            excluded.add(unit)
    return excluded


def expected_algo(context: LintContext, engine: EngineTarget, module: LinearModule) -> str:
    """The format that the engine expects of a module that it does not exclude."""
    config = effective_config(context, engine)
    if context.form == "modelopt" and config is not None:
        is_listed = config.algo == MIXED or config.layers
        return config.algo_of(module.name) if is_listed else config.algo
    if context.form == "compressed-tensors" and not group_in_engines(context.declared, module):
        return ""
    return module.algo or "?"


def _check_exclude(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    exclusions = _Exclusions.read(context, engine)
    if exclusions is None:
        return
    source, hint = exclusions.row.source, f"this engine matches {exclusions.row.description}"
    for unit, modules in context.units().items():
        quantized = [m for m in modules if m.algo and m.last not in exclusions.row.decoded]
        plain = [m for m in modules if not m.algo]
        try:
            is_excluded = exclusions.excludes(unit)
        except PartlyExcludedError:
            yield Finding(
                module=unit,
                message="is fused of several modules, and the list names some of them",
                hint="name all of them, or none",
                source=source,
            )
            continue
        if is_excluded and quantized:
            first, pattern = quantized[0], exclusions.pattern_for(unit)
            text = f"holds codes ({first.algo}), and {pattern} excludes {unit} from quantization"
            yield Finding(module=first.name, message=text, hint=hint, source=source)
        elif not is_excluded and plain and not quantized and _needs_codes(context, engine, plain):
            text = f"holds no codes, and nothing in the list excludes {unit} from quantization"
            yield Finding(module=plain[0].name, message=text, hint=hint, source=source)
    if context.form == "compressed-tensors" and engine.engine in ("vllm", "sglang"):
        yield from _check_towers(context, engine, exclusions)


def _check_towers(
    context: LintContext, engine: EngineTarget, exclusions: _Exclusions
) -> Iterator[Finding]:
    """Plain layers of other parts than the text model, which the engine builds quantized."""
    for tower in load_engines().modules.quantized_towers:
        plain = [
            m
            for m in context.towers.get(tower, ())
            if not _is_excluded(exclusions, m) and expected_algo(context, engine, m)
        ]
        if not plain:
            continue
        others = f" and {len(plain) - 1} other layers of {tower!r}" if plain[1:] else ""
        yield Finding(
            module=plain[0].name,
            message="holds no codes, and nothing in the list excludes it"
            + f"{others} from quantization",
            hint=f"this engine matches {exclusions.row.description}; "
            f"'re:.*{tower}.*' names all of them",
            source=exclusions.row.source,
        )


def _is_excluded(exclusions: _Exclusions, module: LinearModule) -> bool:
    try:
        return exclusions.excludes(module.name)
    except PartlyExcludedError:
        return True


def _needs_codes(context: LintContext, engine: EngineTarget, plain: Sequence[LinearModule]) -> bool:
    """Whether the engine expects codes of a module that no list names."""
    first = plain[0]
    if context.form != "modelopt" and load_engines().modules.is_never_quantized(first.name):
        return False
    return bool(expected_algo(context, engine, first))


def _check_fused(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for unit, modules in context.units().items():
        formats = {(m.algo, _group_size(m, modules)): m for m in modules}
        if len(formats) > 1:
            parts = ", ".join(f"{m.last} {algo or 'plain'}" for (algo, _), m in formats.items())
            text = f"runs as one matrix, and its parts have several formats: {parts}"
            yield Finding(module=unit, message=text)


def _group_size(module: LinearModule, fused: Sequence[LinearModule]) -> int:
    """Columns under one scale; of a row with one scale, those of the other parts' groups."""
    is_one_group = not module.group_size and module.algo
    columns = module.shape[-1]
    return (
        columns
        if is_one_group and any(m.group_size == columns for m in fused)
        else module.group_size
    )


def _check_format(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """The declared format is that of the tensors."""
    excluded = excluded_units(context, engine)
    for module in context.quantized():
        if module.unit in excluded:
            continue
        algo = expected_algo(context, engine, module)
        if not algo:
            text = f"holds codes ({module.algo}), and no file declares it quantized"
            yield Finding(module=module.name, message=text)
        elif algo in STORED_FORMATS and _differ(algo, module.algo):
            text = f"is stored as {module.algo}, and declared as {algo}"
            yield Finding(module=module.name, message=text)


def _differ(declared: str, inferred: str) -> bool:
    """Whether two formats are stored differently; how inputs are quantized cannot be seen."""
    if inferred in ("?", declared):
        return False
    a, b = STORED_FORMATS[declared], STORED_FORMATS[inferred]
    stored = ((f.codes, f.scale, f.columns, f.rows, f.has_branch) for f in (a, b))
    return len(set(stored)) > 1 or FORMATS[declared].scaling != FORMATS[inferred].scaling


def _check_group_size(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    excluded = excluded_units(context, engine)
    config = effective_config(context, engine)
    for module in context.quantized():
        if not module.group_size or module.unit in excluded:
            continue
        text = f"has groups of {module.group_size}"
        for row in load_engines().group_sizes if context.has_engine_limits else ():
            is_relevant = row.engine == engine.engine and module.algo in row.algos
            if is_relevant and module.group_size not in row.sizes:
                yield Finding(
                    module=module.name,
                    message=text,
                    hint=f"quantize in groups of {' or '.join(map(str, row.sizes))}",
                    source=row.source,
                )
        declared = config.group_size_of(module.name) if config is not None else None
        if declared is not None and declared != module.group_size:
            yield Finding(module=module.name, message=f"{text}, and {declared} is declared")


def _check_embedding(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for name in context.embeddings:
        yield Finding(module=name, message="is an embedding, and holds codes")


def _check_plain(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Routers and the like, which engines build without a quantization method."""
    architecture = (context.architectures or [""])[0]
    for module in context.quantized():
        if is_built_plain(engine.target, architecture, module.name):
            text = f"holds codes ({module.algo}), and {engine.engine} builds it unquantized"
            yield Finding(module=module.name, message=text)


def _check_experts(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Every expert is there, with the same tensors."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    config = context.model_config
    count = next((v for k in keys if isinstance(v := config.get(k), int)), None)
    for unit, modules in context.units().items():
        experts: dict[int, dict[str, frozenset[str]]] = {}
        for m in modules:
            if m.expert is not None:
                experts.setdefault(m.expert, {})[m.last] = frozenset(m.tensors)
        if not experts:
            continue
        total = count if count else max(experts) + 1
        if absent := [n for n in range(total) if n not in experts]:
            yield Finding(module=unit, message=f"expert {absent[0]} of {total} is missing")
        complete: dict[str, frozenset[str]] = {}
        for tensors in experts.values():
            for last, names in tensors.items():
                complete[last] = complete.get(last, frozenset()) | names
        for number, tensors in experts.items():
            for last, names in complete.items():
                if missing := sorted(names - tensors.get(last, frozenset())):
                    text = f"lacks {', '.join(missing)}, which other experts have"
                    yield Finding(module=f"{unit}.{number}.{last}", message=text)


def _check_stacked(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    if not context.form or context.form == "mxfp4":
        return
    # The models of these families store experts this way in any case.
    is_usual = (context.architectures or [""])[0].startswith(("Llama4", "GptOss"))
    for t in context.stacked:
        yield Finding(
            module=t.name,
            message=f"holds all experts in one tensor {list(t.shape)}",
            severity="warning" if is_usual else None,
        )


CHECKS: Mapping[str, Check] = {
    "exclude": _check_exclude,
    "fused": _check_fused,
    "format": _check_format,
    "group-size": _check_group_size,
    "embedding": _check_embedding,
    "plain-modules": _check_plain,
    "experts": _check_experts,
    "stacked-experts": _check_stacked,
}
