"""Adapters of ModelOpt's own LoRA for Megatron: `lora_a_NAME` and `lora_b_NAME` in a layer.

`NAME` is the adapter's. The scale is in ModelOpt's state beside the checkpoint's data, by patterns
of module names. Source: ModelOpt 0.47, `torch/peft/lora/layer.py`, `lora/plugins/megatron.py` and
`conversion.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megtool.adapters.stacked_layers import unstack
from megtool.adapters.stored_adapter import (
    AdaptedWeight,
    StoredAdapter,
    open_matrix,
    unpaired_matrix,
)
from megtool.convert.megatron.names import split_state
from megtool.errors import FormatError, MappingError, listed
from megtool.pickles.zip_reader import load_object_bytes
from megtool.storage.files import Files, read_file
from megtool.tensors.catalogue import Catalogue

STATE_FILE = "modelopt_state/common.pt"

_NAME = re.compile(r"(?P<weight>.+)\.lora_(?P<side>[ab])_(?P<adapter>[^.]+)\.weight")


def is_modelopt(catalogue: Catalogue) -> bool:
    """Whether a checkpoint has adapters of ModelOpt."""
    return any(_NAME.fullmatch(t.name) for t in catalogue.tensors)


def read_modelopt(catalogue: Catalogue) -> StoredAdapter:
    """The adapter in a checkpoint, of which the headers are read.

    Raises:
        FormatError: a matrix or ModelOpt's state is missing, or is damaged.
        MappingError: there are several adapters, or one is disabled.
    """
    pairs: dict[str, dict[str, str]] = {}
    adapters = set()
    for tensor in catalogue.tensors:
        state, _, name = split_state(tensor.name)
        match = None if state else _NAME.fullmatch(name)
        if match is not None:
            adapters.add(match["adapter"])
            pairs.setdefault(match["weight"], {})[match["side"]] = tensor.name
    if len(adapters) != 1:
        raise MappingError(
            f"the checkpoint has several adapters: {listed(sorted(adapters))}",
            file=catalogue.root,
            hint="save a model with one of them",
            error_id="unsupported-adapter",
        )
    (adapter,) = adapters
    path = catalogue.auxiliary_files.get(STATE_FILE)
    patterns = _read_patterns(path, adapter, catalogue.root)
    files = Files()
    weights: list[AdaptedWeight] = []
    for name, names in pairs.items():
        if len(names) != 2:
            raise unpaired_matrix(catalogue, names)
        a, b = (open_matrix(catalogue, names[side], files) for side in "ab")
        if len(a.shape) != len(b.shape) or a.shape[-2] != b.shape[-1]:
            raise FormatError(
                f"the matrices have shapes {list(a.shape)} and {list(b.shape)}",
                file=catalogue.root,
                tensor=names["a"],
            )
        weight = AdaptedWeight(name=f"{name}.weight", down=a, up=b, scale=1.0, tensor=names["a"])
        for single in unstack(weight):
            scale = _scale(patterns, single.name.removesuffix(".weight"), single.rank, path)
            weights.append(replace(single, scale=scale))
    return StoredAdapter(
        form="modelopt",
        path=catalogue.root,
        dialect="megatron",
        weights=tuple(weights),
        settings={"adapter": adapter, "dropout": 0.0, "base_model": None},
    )


_Patterns = Mapping[str, Mapping[str, Any]]


def _read_patterns(path: Path | None, adapter: str, root: Path) -> _Patterns:
    """The settings of an adapter by patterns of module names, of which later ones win."""
    if path is None:
        raise FormatError(
            f"the adapter has no {STATE_FILE}, which says its scale",
            file=root,
            hint="ModelOpt saves it beside the data: save_sharded_modelopt_state",
            error_id="missing-shard",
        )
    state = load_object_bytes(read_file(path), file=path)
    modes = state.get("modelopt_state_dict") if isinstance(state, dict) else None
    for entry in modes if isinstance(modes, list) else []:
        if isinstance(entry, tuple | list) and len(entry) == 2 and entry[0] == "peft":
            config = entry[1].get("config") if isinstance(entry[1], dict) else None
            if isinstance(config, dict) and config.get("adapter_name") == adapter:
                patterns = config.get("adapter_cfg")
                if isinstance(patterns, dict):
                    return patterns
    raise FormatError(f"it does not describe the adapter {adapter!r}", file=path)


def _scale(patterns: _Patterns, module: str, rank: int, path: Path | None) -> float:
    settings: dict[str, Any] = {}
    for pattern, values in patterns.items():
        if isinstance(values, dict) and fnmatchcase(module, str(pattern)):
            settings |= values
    scale = settings.get("scale", 1.0)
    if (
        settings.get("rank", 64) != rank
        or isinstance(scale, bool)
        or (not isinstance(scale, int | float))
    ):
        raise FormatError(
            f"ModelOpt's state gives {module} {settings!r:.100}, and its matrices have rank {rank}",
            file=path,
        )
    return float(scale)
