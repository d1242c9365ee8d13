"""Layers: some layers of an opened checkpoint as a model of its own, state and all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megtool.checkpoint.catalogue import Catalogue, SetAside, StoredObject
from megtool.checkpoint.containers.pickle_reader import Inert
from megtool.checkpoint.containers.pickle_writer import namespace
from megtool.checkpoint.formats.auxiliary_files import MODELOPT_FOLDER
from megtool.config import ModelConfig
from megtool.convert.layer_subset import edited_config, of_layers, parse_layers, renumbered
from megtool.convert.megatron_args import args_from_config
from megtool.errors import MappingError
from megtool.reshard.megatron.bridge_files import with_model
from megtool.reshard.megatron.nemo_config import BRIDGE_FILE
from megtool.reshard.open_source import CheckpointSource, Model

_LIST = r"((?:module\.)*(?:decoder|encoder)\.layers\.)"
_STACKED = re.compile(_LIST + r"(?!\d)(.*/shard_)(\d+)((?:\.\d+)*)_(\d+)((?:\.\d+)*)")
_PER_LAYER = re.compile(_LIST + r"(\d+)(\..*)")


def select_layers(opened: CheckpointSource, text: str) -> CheckpointSource:
    """The checkpoint as if it had only the layers that `text` names (`0-15`, `0-3,8`).

    Weights, optimizer state, objects kept layer by layer and everything that says how many layers
    there are come along; a layer named twice is written twice. Nothing is read but small files.

    Raises:
        UsageError: no such layers.
        MappingError: the model is not known, or cannot be described without the other layers.
    """
    model = opened.model
    if model is None or not opened.is_canonical:
        raise opened.reason or MappingError(
            "choosing layers needs the model's family and configuration",
            file=opened.path,
            hint="--family NAME and --like HF_FOLDER supply them",
        )
    layers = parse_layers(text, model.config.num_layers)
    config = of_layers(model.config, layers)
    side = opened.side
    new = renumbered(side.canonical, layers)
    first: dict[str, str] = {}
    for name, old in new.items():
        first.setdefault(old, name)
    removed = {p.stored for p in side.placements.values()}
    removed -= {side.placements[old].stored for old in first}
    catalogue = opened.catalogue.select(lambda name: name not in removed)
    catalogue.objects = _objects(opened.catalogue.objects, layers, model.config.num_layers)
    if len(layers) != model.config.num_layers or list(layers) != sorted(set(layers)):
        _leave_modelopt(catalogue)
    changed = _changed(model.config, config)
    catalogue.metadata = _with_args(opened.catalogue, changed)
    sidecar = opened.sidecar
    if sidecar is not None and sidecar.names == "canonical":
        known = sidecar.tensors
        sidecar = replace(sidecar, tensors={n: known[o] for n, o in new.items() if o in known})
    model, edited = _described(opened, model, config, changed)
    return replace(
        opened,
        catalogue=catalogue,
        model=model,
        side=replace(
            side,
            tensors=tuple(catalogue.tensors),
            placements={n: replace(side.placements[o], canonical=n) for n, o in new.items()},
            canonical={n: replace(side.canonical[o], name=n) for n, o in new.items()},
            padding={n: rows for n, rows in side.padding.items() if n not in removed},
            config=config,
        ),
        sidecar=sidecar,
        edited=edited,
        repeats={n: first[o] for n, o in new.items() if first[o] != n},
        left_out=opened.left_out + len(opened.catalogue.tensors) - len(catalogue.tensors),
    )


def _leave_modelopt(catalogue: Catalogue) -> None:
    """Set ModelOpt's own checkpoint aside: it numbers all layers, and is not looked into."""
    left = [n for n in catalogue.attachments if n.startswith(f"{MODELOPT_FOLDER}/")]
    reason = "ModelOpt's state of all layers"
    catalogue.set_aside = catalogue.set_aside + [
        SetAside(name=n, reason=reason, num_bytes=catalogue.attachments[n].stat().st_size)
        for n in left
    ]
    catalogue.attachments = {n: p for n, p in catalogue.attachments.items() if n not in left}


def _described(
    opened: CheckpointSource, model: Model, config: ModelConfig, changed: dict[str, Any]
) -> tuple[Model, dict[str, bytes]]:
    """The model with its new configuration, and the small files that describe it anew."""
    edited = dict(opened.edited)
    hf_config = model.hf_config
    if hf_config is not None and model.family is not None:
        hf_config = edited_config(hf_config, model.family, model.config, config)
        text = json.dumps(hf_config, indent=2, ensure_ascii=False) + "\n"
        edited["config.json"] = text.encode()
    bridge = opened.catalogue.attachments.get(BRIDGE_FILE)
    if bridge is not None:
        edited[BRIDGE_FILE] = with_model(bridge.read_bytes(), changed)
    return replace(model, config=config, hf_config=hf_config), edited


def _changed(old: ModelConfig, new: ModelConfig) -> dict[str, Any]:
    """The args that two configurations spell differently."""
    before, after = args_from_config(old), args_from_config(new)
    return {name: value for name, value in after.items() if before.get(name) != value}


def _with_args(catalogue: Catalogue, changed: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a catalogue with other args, where it has args."""
    metadata = dict(catalogue.metadata)
    if isinstance(args := metadata.get("args"), dict):
        metadata["args"] = args | changed
    common = metadata.get("common")
    if isinstance(common, dict):
        held = common.get("args")
        if isinstance(held, Inert) and isinstance(held.state, dict):
            metadata["common"] = {**common, "args": namespace(held.state | changed)}
    return metadata


def _objects(
    objects: Mapping[str, StoredObject], layers: Sequence[int], num_layers: int
) -> dict[str, StoredObject]:
    """Objects by the numbers that their layers have now."""
    out: dict[str, StoredObject] = {}
    for name, held in objects.items():
        names = [name]
        if found := _PER_LAYER.fullmatch(name):
            at = [new for new, old in enumerate(layers) if old == int(found[2])]
            names = [f"{found[1]}{new}{found[3]}" for new in at]
        elif (found := _STACKED.fullmatch(name)) and int(found[5]) == num_layers:
            at = [new for new, old in enumerate(layers) if old == int(found[3])]
            size = f"_{len(layers)}{found[6]}"
            names = [f"{found[1]}{found[2]}{new}{found[4]}{size}" for new in at]
        out |= {n: replace(held, name=n) for n in names}
    return out
