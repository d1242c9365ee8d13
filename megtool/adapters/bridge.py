"""Adapters of Megatron-Bridge, as its training saves them: a `torch_dist` checkpoint.

A layer's `linear_qkv.adapter.linear_in.weight` is `[rank, in]`, `linear_out` `[out, rank]` with the
rows of the fused weight; layers may be stacked, and experts have a leading dimension. Where it is a
`CanonicalLoRA` there are `adapter_q`, `adapter_k`, `adapter_v`, `adapter_gate` and `adapter_up`,
with the rows of one projection each. Rank and scale are in run_config.yaml. Sources: the files
`peft/utils.py`, `lora.py` and `canonical_lora.py` of Megatron-Bridge 0.3.1 and of August 2026.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megtool.adapters.settings import read_count, read_factor
from megtool.adapters.stacked_layers import is_stacked, unstack
from megtool.adapters.stored_adapter import (
    AdaptedWeight,
    LazyMatrix,
    StoredAdapter,
    foreign_tensors,
    open_matrix,
    resolve_weight,
    unpaired_matrix,
)
from megtool.adapters.weight_slices import DialectWeights, MatrixSlice
from megtool.convert.megatron.names import split_state
from megtool.errors import FormatError, MappingError
from megtool.formats.plain_yaml import read_yaml
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue

CONFIG_FILE = "run_config.yaml"
MARK = ".adapter."

_NAME = re.compile(
    r"(?P<weight>.+)\.adapter\.(?:adapter_(?P<part>q|k|v|gate|up)\.)?"
    r"linear_(?P<side>in|out)\.weight(?:\.(?P<mixer>z|x|B|C|dt))?"
)
_KINDS = {"LoRA", "VLMLoRA", "CanonicalLoRA"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """What run_config.yaml says of an adapter, and of the layout it was saved with."""

    kind: str
    rank: int
    alpha: float
    dropout: float
    normalizes_experts: bool
    tp: int
    etp: int
    content: Mapping[str, Any]

    @classmethod
    def read(cls, catalogue: Catalogue) -> BridgeConfig:
        """The settings beside a checkpoint.

        Raises:
            FormatError: there are none, or they describe no adapter.
            MappingError: the adapter is no LoRA.
        """
        path = catalogue.auxiliary_files.get(CONFIG_FILE)
        if path is None:
            raise FormatError(
                f"the adapter has no {CONFIG_FILE}, which says its scale",
                file=catalogue.root,
                hint="Megatron-Bridge saves it in every iteration's folder: take it from there",
                error_id="missing-shard",
            )
        config = read_yaml(path)
        peft, model = (
            section if isinstance(config, dict) and isinstance(section := config.get(key), dict)
            else {}
            for key in ("peft", "model")
        )  # fmt: skip
        kind = str(peft.get("_target_", "")).rpartition(".")[2]
        if not kind:
            raise FormatError("it has no section 'peft' that describes an adapter", file=path)
        if kind not in _KINDS:
            raise MappingError(
                f"the adapter is a {kind}, which is more than a low-rank update",
                file=path,
                hint="merge it with Megatron-Bridge, and take the merged model",
                error_id="unsupported-adapter",
            )
        tp = read_count(model, "tensor_model_parallel_size", 1, path)
        return cls(
            kind=kind,
            rank=read_count(peft, "dim", 32, path),
            alpha=read_factor(peft, "alpha", 32, path),
            dropout=read_factor(peft, "dropout", 0, path, may_be_zero=True),
            normalizes_experts=bool(peft.get("normalize_moe_lora")),
            tp=tp,
            etp=read_count(model, "expert_tensor_parallel_size", tp, path),
            content=peft,
        )


def is_bridge(catalogue: Catalogue) -> bool:
    """Whether a checkpoint has adapters of Megatron-Bridge."""
    return any(MARK in t.name and ".linear_in." in t.name for t in catalogue.tensors)


def read_bridge(catalogue: Catalogue) -> StoredAdapter:
    """The adapter in a checkpoint, of which the headers are read.

    Optimizer state is left out, and so are weights of the base model.

    Raises:
        FormatError: files are missing or damaged, or ranks contradict the configuration.
        MappingError: the adapter is more than a low-rank update of each weight.
    """
    config = BridgeConfig.read(catalogue)
    files = Files()
    pairs: dict[tuple[str, str | None], dict[str, str]] = {}
    others = []
    for tensor in catalogue.tensors:
        state, _, name = split_state(tensor.name)
        if state or MARK not in name or name.endswith("_extra_state"):
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            others.append(tensor.name)
            continue
        key = match["weight"], match["part"]
        pairs.setdefault(key, {})[match["side"] + (match["mixer"] or "")] = tensor.name
    if others:
        raise foreign_tensors(catalogue, others, "merge it with Megatron-Bridge")
    weights = [
        weight
        for (name, part), names in pairs.items()
        for weight in _adapted(config, catalogue, name, part, names, files)
    ]
    return StoredAdapter(
        form="bridge",
        path=catalogue.root,
        dialect="megatron",
        weights=tuple(weights),
        settings={
            "class": config.kind,
            "rank": config.rank,
            "alpha": config.alpha,
            "dropout": config.dropout,
            "target_modules": config.content.get("target_modules"),
            "base_model": None,
        },
        resolve=partial(_resolve, config),
    )


def _adapted(
    config: BridgeConfig,
    catalogue: Catalogue,
    name: str,
    part: str | None,
    names: Mapping[str, str],
    files: Files,
) -> list[AdaptedWeight]:
    """The weights of a module, one for each layer of a stack and each part of a mixer."""
    ups = {key.removeprefix("out"): n for key, n in names.items() if key != "in"}
    if "in" not in names or not ups:
        raise unpaired_matrix(catalogue, names)
    out = []
    for mixer, up_name in ups.items():
        down = open_matrix(catalogue, names["in"], files)
        up = open_matrix(catalogue, up_name, files)
        num_dims = {len(m.shape) - is_stacked(name) for m in (down, up)}
        if not num_dims <= {2, 3} or down.shape[-2] != up.shape[-1]:
            raise FormatError(
                f"the matrices have shapes {list(down.shape)} and {list(up.shape)}",
                file=catalogue.root,
                tensor=names["in"],
            )
        rank = down.shape[-2]
        if rank != config.rank and not (config.normalizes_experts and ".experts." in name):
            raise FormatError(
                f"the matrices are of rank {rank}, and {CONFIG_FILE} says {config.rank}",
                file=catalogue.root,
                tensor=names["in"],
                hint=f"{CONFIG_FILE} belongs to another adapter",
            )
        weight = AdaptedWeight(
            name=f"{name}.weight",
            down=down,
            up=up,
            scale=config.alpha / rank,
            tensor=names["in"],
            part=f"in_{mixer}" if mixer else part,
            row_pieces=_count_pieces(catalogue, up_name, len(up.shape) - 2),
        )
        out += unstack(weight)
    return out


def _count_pieces(catalogue: Catalogue, name: str, dim: int) -> int:
    """Into how many pieces a checkpoint cuts a tensor along a dimension."""
    shards = catalogue.shards.of(catalogue.index[name])
    return len(np.unique(catalogue.shards.boxes.lo[shards, dim]))


def _resolve(
    config: BridgeConfig, weight: AdaptedWeight, weights: DialectWeights
) -> tuple[AdaptedWeight, list[MatrixSlice]] | None:
    """A weight with its rows in order, and the canonical weights in them.

    Raises:
        MappingError: the order of its rows cannot be known.
    """
    name = weight.name.replace(".mlp.experts.linear_", ".mlp.experts.experts.linear_")
    resolved = resolve_weight(replace(weight, name=name), weights)
    if resolved is None:
        return None
    _, slices = resolved
    if ".self_attention.in_proj." in name and weight.row_pieces > 1:
        raise MappingError(
            "the rows of the adapter of a projection of several parts are in the order of ranks",
            tensor=weight.tensor,
            hint="load and save it with Megatron-Bridge at tp 1",
            error_id="unsupported-adapter",
        )
    if weight.part is not None:
        slices = [
            replace(s, rows=torch.arange(len(s.rows)), num_rows=len(s.rows))
            for s in slices
            if s.canonical.endswith(f".{weight.part}.weight")
        ]
    has_one_part = len({s.canonical.split(".")[-2] for s in slices}) == 1
    if slices and has_one_part and ".linear_fc1." in weight.name:
        tp = config.etp if ".experts." in name else config.tp
        weight = replace(weight, up=_in_order(weight, tp))
    return weight, slices


def _in_order(weight: AdaptedWeight, tp: int) -> LazyMatrix:
    """The rows of a matrix of one projection, which Megatron-Bridge stores in the wrong order.

    It cuts every rank's rows of `linear_fc1` in halves, as gate and up, and stores the first halves
    of all ranks before the second ones, even where a rank's rows are of one projection.

    Raises:
        MappingError: the pieces that are stored are not those of the layout in run_config.yaml.
    """
    rows = weight.up.shape[-2]
    if weight.row_pieces == tp and (tp == 1 or weight.part is None):
        return weight.up  # releases that look whether the layer has a gate, where it has none
    if weight.row_pieces != 2 * tp or rows % (2 * tp):
        raise MappingError(
            f"the rows of the adapter are stored in {weight.row_pieces} pieces, and "
            f"{CONFIG_FILE} says tp {tp}: their order is not known",
            tensor=weight.tensor,
            hint="take the checkpoint as Megatron-Bridge saved it",
            error_id="unsupported-adapter",
        )
    order = torch.arange(rows).view(2, tp, -1).transpose(0, 1).flatten()
    return weight.up.derive(
        lambda tensor: tensor.index_select(tensor.dim() - 2, order), weight.up.shape
    )
