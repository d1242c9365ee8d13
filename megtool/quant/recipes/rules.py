"""Rules and their conditions on modules, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Protocol

from megtool.errors import RecipeError
from megtool.process.patterns import Pattern, compile_pattern
from megtool.quant.recipes.located_yaml import Node
from megtool.quant.recipes.modules import KINDS, ROLES, SCHEMES, ModuleInfo, suggest

KEEP = "keep"
"""The format name for modules that stay unquantized."""

_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")
_RANGE = re.compile(r"(\d+)-(\d+)")
_NUMBER = re.compile(r"-?\d+")


class Condition(Protocol):
    """A condition of a rule on a module."""

    def matches(self, module: ModuleInfo) -> bool:
        """Whether the module matches."""

    def describe(self) -> str:
        """The condition in words."""


@dataclass(frozen=True, slots=True)
class Glob:
    """Shell patterns against a name; `*` also matches dots, and case matters."""

    patterns: tuple[str, ...]
    scheme: str = "canonical"

    def matches(self, module: ModuleInfo) -> bool:
        """Any of the module's names matches any pattern."""
        names = module.names_in(self.scheme)
        return any(fnmatchcase(n, p) for n in names for p in self.patterns)

    def describe(self) -> str:
        """The condition in words."""
        return "name like " + " or ".join(self.patterns)


@dataclass(frozen=True, slots=True)
class Regex:
    """Regular expressions against a whole name, or its beginning with `prefix`."""

    patterns: tuple[Pattern, ...]
    scheme: str = "canonical"
    prefix: bool = False

    def matches(self, module: ModuleInfo) -> bool:
        """Any of the module's names matches any expression."""
        names = module.names_in(self.scheme)
        if self.prefix:
            return any(p.match(n) for n in names for p in self.patterns)
        return any(p.fullmatch(n) for n in names for p in self.patterns)

    def describe(self) -> str:
        """The condition in words."""
        return "name matches " + " or ".join(p.text for p in self.patterns)


@dataclass(frozen=True, slots=True)
class Exact:
    """Full names."""

    names: tuple[str, ...]
    scheme: str = "canonical"

    def matches(self, module: ModuleInfo) -> bool:
        """The module has one of the names."""
        return any(n in self.names for n in module.names_in(self.scheme))

    def describe(self) -> str:
        """The condition in words."""
        return "name is " + " or ".join(self.names)


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers by number in the whole model; negative numbers count from the end.

    Ranges are half-open pairs as in a slice; None is an open end.
    """

    ranges: tuple[tuple[int | None, int | None], ...]
    text: str

    def matches(self, module: ModuleInfo) -> bool:
        """Whether the module is in one of the layers."""
        if module.layer is None:
            return False
        return any(
            module.layer in range(*slice(*ends).indices(module.num_layers)) for ends in self.ranges
        )

    def out_of_range(self, num_layers: int) -> list[str]:
        """The numbers, ranges and slices that are outside a model with `num_layers` layers."""
        out = []
        for text in (part.strip() for part in self.text.split(",")):
            if match := _SLICE.fullmatch(text):
                ends = slice(_int(match[1]), _int(match[2])).indices(num_layers)
                fits = bool(range(*ends))
            elif match := _RANGE.fullmatch(text):
                fits = int(match[2]) < num_layers
            else:
                fits = not _NUMBER.fullmatch(text) or -num_layers <= int(text) < num_layers
            out += [] if fits else [text]
        return out

    def describe(self) -> str:
        """The condition in words."""
        return f"layers {self.text}"


@dataclass(frozen=True, slots=True)
class Role:
    """Roles of a module; the first layer of an expert is both `expert` and `fc1`."""

    roles: tuple[str, ...]

    def matches(self, module: ModuleInfo) -> bool:
        """The module has any of the roles."""
        return not module.roles.isdisjoint(self.roles)

    def describe(self) -> str:
        """The condition in words."""
        return "role " + " or ".join(self.roles)


@dataclass(frozen=True, slots=True)
class OfKind:
    """Kinds of modules."""

    kinds: tuple[str, ...]

    def matches(self, module: ModuleInfo) -> bool:
        """The module is of any of the kinds."""
        return module.kind in self.kinds

    def describe(self) -> str:
        """The condition in words."""
        return "kind " + " or ".join(self.kinds)


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of several conditions."""

    parts: tuple[Condition, ...]

    def matches(self, module: ModuleInfo) -> bool:
        """Every part holds."""
        return all(p.matches(module) for p in self.parts)

    def describe(self) -> str:
        """The condition in words."""
        return " and ".join(_parenthesize(p) for p in self.parts)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Any of several conditions."""

    parts: tuple[Condition, ...]

    def matches(self, module: ModuleInfo) -> bool:
        """Some part holds."""
        return any(p.matches(module) for p in self.parts)

    def describe(self) -> str:
        """The condition in words."""
        return " or ".join(_parenthesize(p) for p in self.parts)


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of a condition."""

    part: Condition

    def matches(self, module: ModuleInfo) -> bool:
        """The part does not hold."""
        return not self.part.matches(module)

    def describe(self) -> str:
        """The condition in words."""
        return f"not {_parenthesize(self.part)}"


def _parenthesize(part: Condition) -> str:
    return f"({part.describe()})" if isinstance(part, AllOf | AnyOf) else part.describe()


def find_unmatched(condition: Condition, modules: Sequence[ModuleInfo]) -> list[tuple[str, str]]:
    """Find the names, patterns and layers of a condition that match nothing in a model, with
    hints."""
    if isinstance(condition, AllOf | AnyOf):
        return [
            unmatched for part in condition.parts for unmatched in find_unmatched(part, modules)
        ]
    if isinstance(condition, Not):
        return find_unmatched(condition.part, modules)
    if isinstance(condition, Layers):
        depth = modules[0].num_layers if modules else 0
        hint = f"the model has layers 0 to {depth - 1}"
        return [(f"layers {text}", hint) for text in condition.out_of_range(depth)]
    out = []
    if isinstance(condition, Exact):
        names = [n for m in modules for n in m.names_in(condition.scheme)]
        known_names = set(names)
        out = [
            (f"the name {n}", suggest(n, names)) for n in condition.names if n not in known_names
        ]
    elif isinstance(condition, Glob | Regex):
        single: list[Condition]
        if isinstance(condition, Glob):
            single = [replace(condition, patterns=(p,)) for p in condition.patterns]
        else:
            single = [replace(condition, patterns=(r,)) for r in condition.patterns]
        for condition_ in single:
            if not any(condition_.matches(m) for m in modules):
                out.append((condition_.describe(), "`explain` with recipe fp8 lists the names"))
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRule:
    """A condition and the name of the format it gives; `KEEP` leaves the module as it is.

    `optional` rules may decide nothing. `label` is the name in reports, `reason` the author's.
    """

    condition: Condition
    format: str
    label: str
    line: int = 0
    optional: bool = False
    reason: str = ""


@dataclass(slots=True)
class RecipeProblems:
    """Problems of a recipe, collected so that all are reported at once."""

    file: str
    problems: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, line: int, text: str, hint: str = "") -> None:
        """Add a problem at a line (0: the whole file)."""
        if (line, text, hint) not in self.problems:
            self.problems.append((line, text, hint))

    def raise_all(self) -> None:
        """Raise if there are any problems.

        Raises:
            RecipeError: with every problem, ordered by line.
        """
        if not self.problems:
            return
        problems = sorted(self.problems, key=lambda p: p[0])
        messages = [f"line {line}: {text}" if line else text for line, text, _ in problems]
        if len(problems) == 1:
            raise RecipeError(messages[0], file=self.file, hint=problems[0][2] or None)
        lines = [
            f"{t} ({hint})" if hint else t
            for t, (_, _, hint) in zip(messages, problems, strict=True)
        ]
        raise RecipeError(
            f"there are {len(lines)} problems in the recipe {self.file}:\n  " + "\n  ".join(lines)
        )


_LEAVES = ("glob", "regex", "exact", "layers", "role", "kind")
_GROUPS = ("all", "any", "not")


def read_condition(node: Node, problems: RecipeProblems) -> Condition:
    """Read the condition of a `match:`; all keys must match, and any value of a list.

    Problems are added to `problems`; an invalid part never matches.
    """
    if not isinstance(node.value, dict) or not node.value:
        problems.add(node.line, "match needs at least one condition", f"one of {', '.join(_KEYS)}")
        return AnyOf(())
    parts: list[Condition] = []
    scheme = _scheme(node.value.get("names"), problems)
    for key, value in node.value.items():
        line = (node.keys or {}).get(key, node.line)
        if key == "names":
            continue
        if key not in _KEYS:
            problems.add(line, f"unknown condition {key!r}", suggest(key, _KEYS))
        elif key in ("all", "any"):
            listed = value.value if isinstance(value.value, list) else None
            if not listed:
                problems.add(line, f"{key!r} needs a list of conditions")
                continue
            inner = tuple(read_condition(n, problems) for n in listed)
            parts.append(AllOf(inner) if key == "all" else AnyOf(inner))
        elif key == "not":
            parts.append(Not(read_condition(value, problems)))
        else:
            parts.append(_read_leaf(key, value, scheme, problems))
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))


_KEYS = (*_LEAVES, *_GROUPS, "names")


def _scheme(node: Node | None, problems: RecipeProblems) -> str:
    if node is None:
        return "canonical"
    if node.text not in SCHEMES:
        problems.add(node.line, f"unknown names {node.plain()!r}", suggest(node.text, SCHEMES))
        return "canonical"
    return node.text


def read_texts(node: Node, key: str, problems: RecipeProblems) -> tuple[str, ...]:
    """Read a string or a list of strings."""
    listed = node.value if isinstance(node.value, list) else [node]
    out = []
    for item in listed:
        if isinstance(item.value, str) and item.value:
            out.append(item.value)
        elif isinstance(item.value, int) and not isinstance(item.value, bool):
            out.append(str(item.value))
        else:
            problems.add(item.line, f"{key} is {item.plain()!r}", "a string, or a list of strings")
    return tuple(out)


def _read_leaf(key: str, node: Node, scheme: str, problems: RecipeProblems) -> Condition:
    values = read_texts(node, key, problems)
    if key == "glob":
        return Glob(values, scheme)
    if key == "exact":
        return Exact(values, scheme)
    if key == "regex":
        return Regex(compile_patterns(values, node.line, problems), scheme)
    if key == "layers":
        return read_layers(values, node.line, problems)
    choices: Sequence[str] = ROLES if key == "role" else KINDS
    for word in values:
        if word not in choices:
            problems.add(node.line, f"unknown {key} {word!r}", suggest(word, choices))
    return Role(values) if key == "role" else OfKind(values)


def compile_patterns(
    patterns: Sequence[str], line: int, problems: RecipeProblems
) -> tuple[Pattern, ...]:
    """Compile regular expressions."""
    out = []
    for text in patterns:
        try:
            out.append(compile_pattern(text))
        except re.error as e:
            problems.add(line, f"invalid regex {text!r}: {e}")
    return tuple(out)


def read_layers(values: Sequence[str], line: int, problems: RecipeProblems) -> Layers:
    """Read layer numbers: `5`, `-1`, `0-3` (inclusive), `-2:` and `:4` (as Python slices)."""
    ranges: list[tuple[int | None, int | None]] = []
    for text in (part.strip() for value in values for part in value.split(",")):
        if match := _SLICE.fullmatch(text):
            ranges.append((_int(match[1]), _int(match[2])))
        elif (match := _RANGE.fullmatch(text)) and int(match[1]) <= int(match[2]):
            ranges.append((int(match[1]), int(match[2]) + 1))
        elif _NUMBER.fullmatch(text):
            first = int(text)
            ranges.append((first, None if first == -1 else first + 1))
        else:
            problems.add(line, f"layers {text!r}", "such as 5, -1, 0-3, -2: or :4")
    return Layers(tuple(ranges), ", ".join(values))


def _int(text: str | None) -> int | None:
    return None if text is None else int(text)
