"""Verify, of a quantized folder: what its config files say, held against its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from megtool.commands.verify_report import Difference
from megtool.config import ModelConfig
from megtool.convert.families import detect_family
from megtool.errors import MappingError
from megtool.lint.compressed_schemes import group_of, lists_of
from megtool.lint.context import Linear, Subject, read_subject
from megtool.lint.registry import RULES
from megtool.lint.rules import View, apply
from megtool.quant.recipes.compressed_targets import means
from megtool.quant.recipes.engine_support import Target
from megtool.quant.verification.stored_folder import open_folder
from megtool.reshard.open_source import CheckpointSource

_NEUTRAL = frozenset(
    (
        "files",
        "config-agree",
        "format",
        "group-size",
        "experts",
        "scale-missing",
        "scale-extra",
        "type",
        "shape",
        "scale-value",
        "scale-range",
        "scale-outlier",
        "siblings",
        "w1-w3",
        "pre-quant-scale-missing",
        "packed",
        "parts",
        "layout",
        "mixed-names",
        "kv-scales",
        "kv-scales-half",
        "kv-scale-shape",
        "fp8-scales",
    )
)
"""Rules of lint that are about the folder itself, whatever engine loads it."""

_FIRM = frozenset(("kv-scales-half",))
"""Of these, what engines differ about, and is a contradiction all the same."""

_OWN = frozenset(("siblings", "w1-w3"))
"""Of these, what compressed-tensors by itself writes: every module has a scale of scales of its
own, which is sound, though engines that join modules keep one of them."""

_VIEWS = (View(target=Target(engine="vllm")), View(target=Target(engine="trtllm")))
"""One engine that goes by config.json, and one that goes by hf_quant_config.json."""


def check_words(opened: CheckpointSource) -> tuple[list[Difference], list[str]]:
    """Contradictions between the files of a quantized folder and its tensors, and what is odd.

    Nothing for a checkpoint that is no such folder.
    """
    if not opened.catalogue.packed or not (opened.path / "config.json").is_file():
        return [], []
    differences: dict[Difference, None] = {}
    notes: dict[str, None] = {}
    with open_folder(opened.path) as folder:
        subject = read_subject(folder)
        rules = [r for r in RULES if r.id in _NEUTRAL]
        heads = _linear_heads(subject)
        for view in _VIEWS:
            for found in apply(rules, subject, view):
                if found.rule == "format" and found.module in heads:
                    continue
                alone = found.rule in _OWN and subject.form == "compressed-tensors"
                if (found.severity == "error" and not alone) or found.rule in _FIRM:
                    differences[_difference(found.module, found.message)] = None
                else:
                    notes[f"{found.module} of {opened.path}: {found.message}"] = None
        for module, text in _lists(subject):
            differences[_difference(module, text)] = None
    return list(differences), list(notes)


_UNCOMPARED = frozenset(("extra", "max_positions", "num_mtp_layers", "tied_embeddings"))
"""What says nothing of the outputs of a model's weights, or is seen by which tensors there are."""

_IN_ARGS = ("num_layers", "hidden_size", "rope_base", "norm_eps")
"""What Megatron's args say of every model; of the rest a part has to be supplied."""


def check_configs(a: CheckpointSource, b: CheckpointSource) -> Iterator[Difference]:
    """What the configurations of two checkpoints say otherwise of the model: layers and heads,
    positions, norms. Nothing where one is not known."""
    mine, theirs = _config(a), _config(b)
    if mine is None or theirs is None:
        return
    whole = all(_config_file(o) is not None for o in (a, b))
    names = [f.name for f in fields(ModelConfig)] if whole else _IN_ARGS
    for name in names:
        one, other = getattr(mine, name), getattr(theirs, name)
        if one == other or name in _UNCOMPARED:
            continue
        text = f"{name} is {_plain(one)} in {a.path}, and {_plain(other)} in {b.path}"
        yield _difference("config.json", text)


def _config_file(opened: CheckpointSource) -> Path | None:
    found = opened.path / "config.json"
    return found if found.is_file() else None


def _config(opened: CheckpointSource) -> ModelConfig | None:
    """By the config.json of a folder, whether or not its tensors fit it."""
    if (file := _config_file(opened)) is None:
        return opened.model.config if opened.model is not None else None
    try:
        said = json.loads(file.read_bytes())
        return detect_family(said).read_config(said)
    except (MappingError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _difference(module: str, text: str) -> Difference:
    return Difference(tensor=module, stored=module, kind="metadata", text=text)


def _lists(subject: Subject) -> Iterator[tuple[str, str]]:
    """Modules that are said to be quantized and are not, or the other way round."""
    for one in subject.linear:
        for where, said in _said(subject, one):
            if one.algo and not said:
                yield one.name, f"holds codes, and {where} says that it is not quantized"
            elif said and not one.algo:
                yield one.name, f"holds no codes, and {where} says that it is {said}"


def _linear_heads(subject: Subject) -> set[str]:
    """Output layers that compressed-tensors' targets mean by their class, though engines do not."""
    return {
        one.name
        for one in subject.coded()
        if one.last == "lm_head"
        and subject.form == "compressed-tensors"
        and group_of(subject.said, one.name) is not None
    }


def _said(subject: Subject, one: Linear) -> Iterator[tuple[str, str]]:
    """What each file says of a module."""
    for declared in (subject.inline, subject.beside):
        if declared is not None:
            yield declared.where, declared.algo_of(one.name)
    if subject.form == "compressed-tensors":
        alone = any(means(p, one.name) for p in lists_of(subject.said))
        group = (
            None
            if alone
            else group_of(subject.said, one.name, classes=bool(one.algo) or one.last != "lm_head")
        )
        yield "config.json", "quantized" if group is not None else ""
    elif subject.form == "fp8" and one.algo:  # what has no codes need not be listed
        alone = any(p == one.name for p in lists_of(subject.said))
        yield "config.json", "" if alone else "quantized"
