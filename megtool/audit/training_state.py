"""Reads iteration, scheduler, param groups, loss scale and random state of a save."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megtool.audit.save_facts import TrainingFacts
from megtool.formats.save_folder import LEARNED_SCALES
from megtool.megatron_state.param_groups import scalar_value
from megtool.megatron_state.random_state import is_rng_object
from megtool.megatron_state.saved_objects import saved_args
from megtool.pickles.reader import dict_items
from megtool.run_state.state_dict_groups import read_any_groups
from megtool.storage.files import Files, opened
from megtool.tensors.catalogue import Catalogue

_SCHEDULER = "opt_param_scheduler"
_DROPOUTS = ("hidden_dropout", "attention_dropout", "ffn_dropout", "lora_dropout")
_TRAINER_STATE = "trainer_state.json"
_MAX_STATE_BYTES = 64 << 20


def read_training_facts(catalogue: Catalogue) -> TrainingFacts:
    """The training state of a save; fields that it does not have are None.

    Raises:
        FormatError: an object that holds it is damaged or hostile.
    """
    args = saved_args(catalogue)
    common = catalogue.metadata.get("common")
    common = common if isinstance(common, dict) else {}
    groups = list(_param_groups(catalogue))
    trees = list(_rank_trees(catalogue))
    scheduler = next((t[_SCHEDULER] for t in (common, *trees) if _SCHEDULER in t), None)
    iteration = _whole(catalogue.metadata.get("iteration"))
    if iteration is None:
        iteration = _trainer_step(catalogue)
    betas = next((b for g in groups if (b := _betas(g)) is not None), None)
    steps = [n for g in groups if (n := scalar_value(g.get("step"))) is not None]
    rates = [n for g in groups if (n := scalar_value(g.get("lr"))) is not None]
    decays = [n for g in groups if (n := scalar_value(g.get("weight_decay"))) is not None]
    return TrainingFacts(
        iteration=iteration,
        consumed_samples=_whole(args.get("consumed_train_samples")),
        scheduler_steps=_whole(scalar_value(_entry(scheduler, "num_steps"))),
        optimizer_step=max(steps, default=None),
        learning_rate=max(rates, default=None),
        betas=betas,
        weight_decay=max(decays, default=None),
        loss_scale=_loss_scale(catalogue, common, trees),
        rng=dict(_random_states(catalogue, trees)),
        has_dropout=any(isinstance(args.get(k), float) and args[k] > 0 for k in _DROPOUTS),
        is_low_precision=any(
            args.get(k) for k in ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param")
        )
        or (catalogue.root / LEARNED_SCALES).exists(),
    )


def _param_groups(catalogue: Catalogue) -> Iterator[Mapping[str, Any]]:
    groups = read_any_groups(catalogue)
    for part in groups.chain if groups else ():
        optimizer = part.get("optimizer")
        listed = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
        if isinstance(listed, Sequence):
            yield from (g for g in listed if isinstance(g, Mapping))


def _rank_trees(catalogue: Catalogue) -> Iterator[Mapping[str, Any]]:
    for tree in (catalogue.metadata.get("rank_trees") or {}).values():
        if isinstance(tree, Mapping):
            yield tree


def _loss_scale(
    catalogue: Catalogue, common: Mapping[str, Any], trees: Sequence[Mapping[str, Any]]
) -> float | None:
    groups = read_any_groups(catalogue)
    scalers = [part.get("grad_scaler") for part in (groups.chain if groups else ())]
    for tree in (common, *trees):
        optimizer = _entry(tree, "optimizer")
        scalers.append(_entry(optimizer, "grad_scaler"))
    for scaler in scalers:
        value = scalar_value(_entry(scaler, "scale"))
        if value is not None:
            return value
    return None


def _random_states(
    catalogue: Catalogue, trees: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int]]:
    """Checksums of random state: of the bytes of objects, or of what a rank's file holds."""
    for name, stored in catalogue.objects.items():
        if is_rng_object(name) and stored.extent is not None:
            file, offset, length = stored.extent
            data = bytearray(length)
            with opened(catalogue.path(file)) as fd:
                Files().pread_into(fd, memoryview(data), offset)
            yield name, zlib.crc32(data)
        elif is_rng_object(name) and stored.value is not None:
            yield name, zlib.crc32(repr(stored.value).encode())
    for number, tree in enumerate(trees):
        if "rng_state" in tree:
            yield f"rank {number}", zlib.crc32(repr(tree["rng_state"]).encode())


def _entry(tree: Any, name: str) -> Any:
    if isinstance(tree, Mapping):
        return tree.get(name)
    return next((value for key, value in dict_items(tree) or () if key == name), None)


def _betas(group: Mapping[str, Any]) -> tuple[float, float] | None:
    value = group.get("betas")
    if isinstance(value, Sequence) and len(value) == 2:
        first, second = (scalar_value(v) for v in value)
        if first is not None and second is not None:
            return first, second
    return None


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if float(value).is_integer() else None  # NaN and Inf are not


def _trainer_step(catalogue: Catalogue) -> int | None:
    """The step that transformers' Trainer writes beside a checkpoint."""
    path = catalogue.root / _TRAINER_STATE
    files = Files()
    status = files.stat(path) if catalogue.root.is_dir() else None
    if status is None or status.st_size > _MAX_STATE_BYTES:
        return None
    try:
        value = json.loads(files.read_whole(path) or b"")
    except (ValueError, RecursionError):
        return None
    return _whole(value.get("global_step")) if isinstance(value, dict) else None
