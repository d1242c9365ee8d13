"""Module rules: what engines take each module for, and what they find in its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megtool.lint import citations as at
from megtool.lint.compressed_schemes import lists_of, targeted
from megtool.lint.config_rules import read_first
from megtool.lint.context import Linear, Subject
from megtool.lint.exclude_matching import MATCHERS, Matcher, MixedError
from megtool.lint.rules import Fault, Rule, View, lines_for
from megtool.lint.tables import GROUPS
from megtool.quant.recipes.formats import FORMATS
from megtool.quant.verification.metadata_checks import STORED


@dataclass(frozen=True, slots=True)
class _Lists:
    """What an engine leaves alone: its way of matching, and the list it reads."""

    matcher: Matcher
    patterns: tuple[str, ...]

    @classmethod
    def of(cls, subject: Subject, view: View) -> _Lists | None:
        declared = read_first(subject, view)
        if subject.form == "modelopt" and declared is None:
            return None
        algo = declared.algo if declared is not None else ""
        lines = [
            m
            for m in lines_for(view, MATCHERS)
            if m.form == subject.form and (not m.algos or algo in m.algos)
        ]
        if not lines:
            return None
        newest = [m for m in lines if m.since == lines[-1].since]
        patterns = declared.exclude if declared is not None else lists_of(subject.said)
        return cls(min(newest, key=lambda m: not m.algos), patterns)

    def why(self, unit: str) -> str:
        """The entry that excludes a module."""
        for p in self.patterns:
            try:
                if self.matcher.excludes(unit, (p,)):
                    return repr(p)
            except MixedError:
                continue
        return "the list"


def left_alone(subject: Subject, view: View) -> set[str]:
    """Units that the engine builds without quantization."""
    lists = _Lists.of(subject, view)
    out = set()
    for unit in subject.units() if lists is not None else ():
        try:
            if lists is not None and lists.matcher.excludes(unit, lists.patterns):
                out.add(unit)
        except MixedError:
            out.add(unit)
    return out


def algo_said(subject: Subject, view: View, one: Linear) -> str:
    """The format that the engine expects of a module that it does not leave alone."""
    declared = read_first(subject, view)
    if subject.form == "modelopt" and declared is not None:
        listed = declared.algo == "MIXED_PRECISION" or declared.layers
        return declared.algo_of(one.name) if listed else declared.algo
    if subject.form == "compressed-tensors" and not targeted(subject.said, one):
        return ""
    return one.algo or "?"


def _exclude(subject: Subject, view: View) -> Iterator[Fault]:
    lists = _Lists.of(subject, view)
    if lists is None:
        return
    source, words = lists.matcher.source, lists.matcher.words
    for unit, modules in subject.units().items():
        coded = [m for m in modules if m.algo]
        plain = [m for m in modules if not m.algo]
        try:
            excluded = lists.matcher.excludes(unit, lists.patterns)
        except MixedError:
            yield Fault(
                module=unit,
                text="is built of several modules, and the list names some of them",
                hint="name all of them, or none",
                source=source,
            )
            continue
        if excluded and coded:
            yield Fault(
                module=coded[0].name,
                text=f"holds codes ({coded[0].algo}), and {lists.why(unit)} has {unit} left alone",
                hint=f"this engine takes the list for {words}",
                source=source,
            )
        elif not excluded and plain and not coded and _expected(subject, view, plain):
            yield Fault(
                module=plain[0].name,
                text=f"holds no codes, and nothing in the list has {unit} left alone",
                hint=f"this engine takes the list for {words}",
                source=source,
            )


def _expected(subject: Subject, view: View, plain: Sequence[Linear]) -> bool:
    """Whether the engine waits for codes of a module that no list names."""
    first = plain[0]
    if subject.form != "modelopt" and (first.is_router or first.last == "lm_head"):
        return False  # engines build these without quantization in any case
    return bool(algo_said(subject, view, first))


def _fused(subject: Subject, view: View) -> Iterator[Fault]:
    for unit, modules in subject.units().items():
        kinds = {(m.algo, m.group): m for m in modules}
        if len(kinds) > 1:
            told = ", ".join(f"{m.last} {a or 'plain'}" for (a, _), m in kinds.items())
            yield Fault(module=unit, text=f"is run as one, and its parts differ: {told}")


def _format(subject: Subject, view: View) -> Iterator[Fault]:
    """The format said is the one that tensors have."""
    skipped = left_alone(subject, view)
    for one in subject.coded():
        if one.unit in skipped:
            continue
        said = algo_said(subject, view, one)
        if not said:
            yield Fault(
                module=one.name, text=f"holds codes ({one.algo}), and no file says so of it"
            )
        elif said in STORED and one.algo not in ("?", said) and _differ(said, one.algo):
            yield Fault(module=one.name, text=f"is {one.algo} by its tensors, and {said} is said")


def _differ(said: str, found: str) -> bool:
    """Whether two formats are stored in other ways; how inputs are rounded cannot be seen."""
    a, b = STORED[said], STORED[found]
    same = (a.codes, a.scale, a.columns, a.rows) == (b.codes, b.scale, b.columns, b.rows)
    return not same or FORMATS[said].scaling != FORMATS[found].scaling


def _groups(subject: Subject, view: View) -> Iterator[Fault]:
    skipped = left_alone(subject, view)
    declared = read_first(subject, view)
    for one in subject.coded():
        if not one.group or one.unit in skipped:
            continue
        for line in GROUPS:
            mine = line.engine == view.engine and one.algo in line.algos
            if mine and one.group not in line.sizes:
                known = " or ".join(map(str, line.sizes))
                yield Fault(
                    module=one.name,
                    text=f"has groups of {one.group}",
                    hint=f"quantize in groups of {known}",
                    source=line.source,
                )
        said = declared.group_of(one.name) if declared is not None else None
        if said is not None and said != one.group:
            yield Fault(module=one.name, text=f"has groups of {one.group}, and {said} is said")


def _embeddings(subject: Subject, view: View) -> Iterator[Fault]:
    for name in subject.embeddings:
        yield Fault(module=name, text="an embedding holds codes")


def _experts(subject: Subject, view: View) -> Iterator[Fault]:
    """Every expert is there, with the same tensors."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((v for k in keys if isinstance(v := subject.config.get(k), int)), None)
    for unit, modules in subject.units().items():
        by_expert: dict[int, dict[str, frozenset[str]]] = {}
        for m in modules:
            if m.expert is not None:
                by_expert.setdefault(m.expert, {})[m.last] = frozenset(m.tensors)
        if not by_expert:
            continue
        wanted = range(count if count else max(by_expert) + 1)
        if lacks := [n for n in wanted if n not in by_expert]:
            yield Fault(module=unit, text=f"expert {lacks[0]} of {len(wanted)} is not there")
        full: dict[str, frozenset[str]] = {}
        for held in by_expert.values():
            for last, names in held.items():
                full[last] = full.get(last, frozenset()) | names
        for number, held in by_expert.items():
            for last, names in full.items():
                if odd := sorted(names - held.get(last, frozenset())):
                    text = f"lacks {', '.join(odd)}, which other experts have"
                    yield Fault(module=f"{unit}.{number}.{last}", text=text)


def _stacked(subject: Subject, view: View) -> Iterator[Fault]:
    if not subject.form or subject.form == "mxfp4":
        return
    said = (subject.folder.config or {}).get("architectures") or [""]
    own = str(said[0]).startswith(("Llama4", "GptOss"))  # whose experts are stored so in any case
    for t in subject.stacked:
        yield Fault(
            module=t.name,
            text=f"holds all experts in one tensor {list(t.shape)}",
            severity="warning" if own else None,
        )


_READERS = {"vllm": at.VLLM_MODELOPT, "sglang": at.SGLANG_MODELOPT, "trtllm": at.TRTLLM_LINEAR}

RULES = (
    Rule(
        id="exclude",
        forms=("modelopt", "compressed-tensors", "fp8"),
        sources={
            "vllm": at.VLLM_SKIPPED,
            "sglang": at.SGLANG_SKIPPED,
            "trtllm": at.TRTLLM_EXCLUDED,
        },
        meaning="codes are taken for weights, or the engine waits for scales that never come",
        hint="list the modules that are not quantized, and no others",
        check=_exclude,
    ),
    Rule(
        id="fused",
        sources={
            "vllm": at.VLLM_SKIPPED,
            "sglang": at.SGLANG_SKIPPED,
            "trtllm": at.TRTLLM_EXCLUDED,
        },
        meaning="engines run them as one matrix of one format, and stop or misread the others",
        hint="give all parts one format",
        check=_fused,
    ),
    Rule(
        id="format",
        forms=("modelopt", "compressed-tensors"),
        sources=_READERS,
        meaning="the engine takes these bytes for something else",
        hint="the config files must say what the tensors are",
        check=_format,
    ),
    Rule(
        id="group-size",
        forms=("modelopt",),
        sources=_READERS,
        meaning="there is no kernel for it, or columns get the scales of others",
        hint="the config files must say the size that the tensors have",
        check=_groups,
    ),
    Rule(
        id="embedding",
        forms=("modelopt", "compressed-tensors", "fp8"),
        sources={
            "vllm": at.VLLM_LOADING,
            "sglang": at.SGLANG_LOADING,
            "trtllm": at.TRTLLM_LINEAR,
        },
        meaning="engines look tokens up in plain weights",
        hint="leave embeddings as they are",
        check=_embeddings,
    ),
    Rule(
        id="experts",
        sources=_READERS,
        meaning="what no file fills is used as it is found in memory",
        hint="every expert needs all tensors of the others",
        check=_experts,
    ),
    Rule(
        id="stacked-experts",
        sources={"vllm": at.VLLM_MODELOPT, "sglang": at.SGLANG_MODELOPT},
        meaning="loaders of quantized experts take one tensor an expert",
        hint="export it with a tensor for every expert",
        check=_stacked,
    ),
)
