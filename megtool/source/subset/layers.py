"""Select some layers of an open checkpoint as a smaller model, with their state."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megtool.convert.config.hybrid import layers_of_branches
from megtool.convert.layer_subset import of_layers, renumbered
from megtool.formats.auxiliary_files import MODELOPT_FOLDER
from megtool.source.checkpoint import CheckpointSource, require_model
from megtool.source.edited_identity import changed_args, edit_identity, edit_metadata
from megtool.tensors.catalogue import Catalogue, IgnoredTensor, StoredObject

_LIST = r"((?:module\.)*(?:decoder|encoder)\.layers\.)"
_STACKED = re.compile(_LIST + r"(?!\d)(.*/shard_)(\d+)((?:\.\d+)*)_(\d+)((?:\.\d+)*)")
_MTP = re.compile(r"mtp\.(\d+)\.")
_PER_LAYER = re.compile(_LIST + r"(\d+)(\..*)")


def keep_layers(source: CheckpointSource, layers: Sequence[int]) -> CheckpointSource:
    """The checkpoint as if it had only these layers, in their order.

    Weights, optimizer state, objects of single layers and the number of layers in all metadata are
    adjusted; a layer that is listed twice is written twice. Only small files are read.

    Raises:
        MappingError: the model is not known, or cannot be described without the other layers.
    """
    model, _ = require_model(source, "choosing layers")
    config = of_layers(model.config, layers)
    side = source.view
    new = renumbered(side.canonical, layers)
    first_name: dict[str, str] = {}
    for name, old in new.items():
        first_name.setdefault(old, name)
    removed = {p.stored for p in side.placements.values()}
    removed -= {side.placements[old].stored for old in first_name}
    catalogue = source.catalogue.select(lambda name: name not in removed)
    numbers, num_layers = layers, model.config.num_layers
    if side.is_hybrid:
        numbers, num_layers = layers_of_branches(model.config, layers)
    catalogue.objects = _renumber_objects(source.catalogue.objects, numbers, num_layers)
    if len(layers) != model.config.num_layers or list(layers) != sorted(set(layers)):
        set_modelopt_aside(catalogue)
    changed = changed_args(model.config, config)
    catalogue.metadata = edit_metadata(source.catalogue, changed)
    sidecar = source.sidecar
    if sidecar is not None and sidecar.names == "canonical":
        digests = sidecar.tensors
        sidecar = replace(sidecar, tensors={n: digests[o] for n, o in new.items() if o in digests})
    model, edited = edit_identity(source, model, model.config, config, changed)
    return replace(
        source,
        catalogue=catalogue,
        model=model,
        view=replace(
            side,
            tensors=tuple(catalogue.tensors),
            placements={n: replace(side.placements[o], canonical=n) for n, o in new.items()},
            canonical={n: replace(side.canonical[o], name=n) for n, o in new.items()},
            padding={n: rows for n, rows in side.padding.items() if n not in removed},
            config=config,
        ),
        sidecar=sidecar,
        edited=edited,
        repeats={n: first_name[o] for n, o in new.items() if first_name[o] != n},
        left_out=source.left_out + len(source.catalogue.tensors) - len(catalogue.tensors),
    )


def without_excluded_mtp(source: CheckpointSource) -> CheckpointSource:
    """The checkpoint with as many layers of multi-token prediction as are selected of it.

    `config.json`, the args of Megatron and Bridge's files count them, and loaders look for all that
    they count. Layers that were selected in part, or without those before them, stay counted.
    """
    model, side = source.model, source.view
    if model is None or not source.is_canonical or all(":" in name for name in side.canonical):
        return source  # of optimizer state alone nothing is left out of the model
    counted = model.config.mtp.num_mtp_layers  # 0 already, if the tensors say so
    if model.hf_config is not None and model.family is not None:
        counted = max(counted, model.family.read_config(model.hf_config).mtp.num_mtp_layers)
    numbers = {int(m[1]) for name in side.canonical if (m := _MTP.match(name))}
    count = len(numbers)
    if count >= counted or numbers != set(range(count)):
        return source
    model = replace(model, config=model.config.with_fields(num_mtp_layers=counted))
    config = model.config.with_fields(num_mtp_layers=count)
    changed = changed_args(model.config, config)
    catalogue = source.catalogue.select(lambda name: True)
    catalogue.metadata = edit_metadata(source.catalogue, changed)
    model, edited = edit_identity(source, model, model.config, config, changed)
    bound = side.config and side.config.with_fields(num_mtp_layers=count)
    return replace(
        source,
        catalogue=catalogue,
        model=model,
        edited=edited,
        view=replace(side, config=bound),
    )


def set_modelopt_aside(catalogue: Catalogue) -> None:
    """Leave ModelOpt's own checkpoint out: it numbers all layers, and is not parsed."""
    names = [n for n in catalogue.auxiliary_files if n.startswith(f"{MODELOPT_FOLDER}/")]
    reason = "ModelOpt's state of all layers"
    catalogue.ignored = catalogue.ignored + [
        IgnoredTensor(name=n, reason=reason, num_bytes=catalogue.auxiliary_files[n].stat().st_size)
        for n in names
    ]
    catalogue.auxiliary_files = {
        n: p for n, p in catalogue.auxiliary_files.items() if n not in names
    }


def _renumber_objects(
    objects: Mapping[str, StoredObject], layers: Sequence[int], num_layers: int
) -> dict[str, StoredObject]:
    """Objects under the new numbers of their layers."""
    out: dict[str, StoredObject] = {}
    for name, stored in objects.items():
        names = [name]
        if match := _PER_LAYER.fullmatch(name):
            new_layers = [new for new, old in enumerate(layers) if old == int(match[2])]
            names = [f"{match[1]}{new}{match[3]}" for new in new_layers]
        elif (match := _STACKED.fullmatch(name)) and int(match[5]) == num_layers:
            new_layers = [new for new, old in enumerate(layers) if old == int(match[3])]
            size = f"_{len(layers)}{match[6]}"
            names = [f"{match[1]}{match[2]}{new}{match[4]}{size}" for new in new_layers]
        out |= {n: replace(stored, name=n) for n in names}
    return out
