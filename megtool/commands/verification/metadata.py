"""Check everything but tensors: objects, and config files against the tensors they describe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from megtool.commands.reports.verify import Difference
from megtool.convert.families.detection import detect_family
from megtool.errors import MappingError
from megtool.lint.consistency import check_consistency
from megtool.lint.folder_view import open_folder
from megtool.reshard.foreign_objects import find_foreign_objects
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import CONFIG_FIELDS, ModelConfig
from megtool.storage.files import read_file


def check_quant_config(
    source: CheckpointSource, *, is_alone: bool = False
) -> tuple[list[Difference], list[str]]:
    """Contradictions between the files of a quantized folder and its tensors, and what is odd.

    Nothing for a checkpoint that is no such folder. All scales are read of one that `is_alone`;
    beside another checkpoint they are compared with the weights.
    """
    if not source.catalogue.packed or not (source.path / "config.json").is_file():
        return [], []
    differences: dict[Difference, None] = {}
    notes: dict[str, None] = {}
    with open_folder(source.path) as folder:
        for finding in check_consistency(folder, reads_all_scales=is_alone):
            if finding.severity == "error":
                differences[_difference(finding.module, finding.message)] = None
            else:
                notes[f"{finding.module} of {source.path}: {finding.message}"] = None
    return list(differences), list(notes)


def check_objects(source: CheckpointSource) -> Iterator[Difference]:
    """The objects of a checkpoint that would run code if they were loaded."""
    for foreign in find_foreign_objects(source.catalogue):
        yield Difference(
            tensor=foreign.name,
            stored=foreign.file,
            kind="object",
            text=f"{foreign.text}: do not load it",
        )


_UNCOMPARED = frozenset(("extra", "max_positions", "num_mtp_layers", "tied_embeddings"))
"""What says nothing of the outputs of a model's weights, or is seen by which tensors there are."""

_IN_ARGS = ("num_layers", "hidden_size", "rope_base", "norm_eps")
"""What Megatron's args say of every model; of the rest a part has to be supplied."""


def check_configs(a: CheckpointSource, b: CheckpointSource) -> Iterator[Difference]:
    """What the configurations of two checkpoints say otherwise of the model: layers and heads,
    positions, norms. Nothing where one is not known."""
    config_a, config_b = _config(a), _config(b)
    if config_a is None or config_b is None:
        return
    is_complete = all(_config_file(o) is not None for o in (a, b))
    names = tuple(CONFIG_FIELDS) if is_complete else _IN_ARGS
    for name in names:
        value_a, value_b = config_a.get(name), config_b.get(name)
        if value_a == value_b or name in _UNCOMPARED:
            continue
        text = f"{name} is {_plain(value_a)} in {a.path}, and {_plain(value_b)} in {b.path}"
        yield _difference("config.json", text)


def _config_file(source: CheckpointSource) -> Path | None:
    file = source.path / "config.json"
    return file if file.is_file() else None


def _config(source: CheckpointSource) -> ModelConfig | None:
    """By the config.json of a folder, whether or not its tensors fit it."""
    if (file := _config_file(source)) is None:
        return source.model.config if source.model is not None else None
    try:
        values = json.loads(source.edited.get("config.json") or read_file(file))
        return detect_family(values).read_config(values)
    except (MappingError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError):
        return None


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _difference(module: str, text: str) -> Difference:
    return Difference(tensor=module, stored=module, kind="metadata", text=text)
