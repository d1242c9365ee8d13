"""Verify, of a quantised folder: what its config files say, held against its tensors."""

from __future__ import annotations

from collections.abc import Iterator

from megtool.commands.findings import Difference
from megtool.commands.opened import Opened
from megtool.export.lint.all_rules import RULES
from megtool.export.lint.matching import equal_or_regex
from megtool.export.lint.rules import View, apply
from megtool.export.lint.schemes import lists_of, targeted
from megtool.export.lint.subject import Linear, Subject, read_subject
from megtool.quant.proofs.folder import open_folder
from megtool.quant.recipes.targets import Target

_NEUTRAL = frozenset(
    (
        "files",
        "config-agree",
        "format",
        "group-size",
        "experts",
        "scale-missing",
        "type",
        "shape",
        "scale-value",
        "siblings",
        "w1-w3",
        "pre-quant-scale-missing",
        "packed",
        "parts",
        "fp8-scales",
    )
)
"""Rules of lint that are about the folder itself, whatever engine loads it."""

_VIEWS = (View(target=Target(engine="vllm")), View(target=Target(engine="trtllm")))
"""One engine that goes by config.json, and one that goes by hf_quant_config.json."""


def check_words(opened: Opened) -> tuple[list[Difference], list[str]]:
    """Contradictions between the files of a quantised folder and its tensors, and what is odd.

    Nothing for a checkpoint that is no such folder.
    """
    if not opened.catalogue.packed or not (opened.path / "config.json").is_file():
        return [], []
    differences: dict[Difference, None] = {}
    notes: dict[str, None] = {}
    with open_folder(opened.path) as folder:
        subject = read_subject(folder)
        rules = [r for r in RULES if r.id in _NEUTRAL]
        for view in _VIEWS:
            for found in apply(rules, subject, view):
                if found.severity == "error":
                    differences[_difference(found.module, found.message)] = None
                else:
                    notes[f"{found.module} of {opened.path}: {found.message}"] = None
        for module, text in _lists(subject):
            differences[_difference(module, text)] = None
    return list(differences), list(notes)


def _difference(module: str, text: str) -> Difference:
    return Difference(tensor=module, stored=module, kind="metadata", text=text)


def _lists(subject: Subject) -> Iterator[tuple[str, str]]:
    """Modules that are said to be quantised and are not, or the other way round."""
    for one in subject.linear:
        for where, said in _said(subject, one):
            if one.algo and not said:
                yield one.name, f"holds codes, and {where} says that it is not quantised"
            elif said and not one.algo:
                yield one.name, f"holds no codes, and {where} says that it is {said}"


def _said(subject: Subject, one: Linear) -> Iterator[tuple[str, str]]:
    """What each file says of a module."""
    for declared in (subject.inline, subject.beside):
        if declared is not None:
            yield declared.where, declared.algo_of(one.name)
    if subject.form == "compressed-tensors":
        alone = any(equal_or_regex(one.name, p) for p in lists_of(subject.said))
        group = None if alone else targeted(subject.said, one)
        yield "config.json", "quantised" if group is not None else ""
    elif subject.form == "fp8" and one.algo:  # what has no codes need not be listed
        alone = any(p == one.name for p in lists_of(subject.said))
        yield "config.json", "" if alone else "quantised"
