"""Build the stages of a model for training, with weights from any open checkpoint."""

from __future__ import annotations

import logging

import torch

from megtool.console import Progress, format_bytes, silent
from megtool.convert.rank_tensors import RankCoordinates
from megtool.dtypes import DType
from megtool.dtypes import dtype as named
from megtool.inference.layer_streaming import units_of
from megtool.inference.load import check_memory, check_names, computable, fill
from megtool.inference.rank_weights import Weights
from megtool.megatron_state.saved_objects import vocab_divisor
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.fully_shard import FullyShard
from megtool.model.stacks.pipeline import build_stages
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.checkpoint import CheckpointSource
from megtool.train.model.packed_base import KeepPacked, PackedBase

_LOG = logging.getLogger(__name__)


def load_for_training(
    source: CheckpointSource,
    groups: ProcessGroups | FullyShard | KeepPacked | None = None,
    *,
    dtype: DType | torch.dtype | str | None = None,
    sequence_parallel: bool = False,
    threads: int | None = None,
    vocab_multiple: int | None = None,
    keeps_mtp: bool = True,
    progress: Progress = silent,
) -> list[Decoder]:
    """Load this rank's virtual chunks in training mode; every rank calls it.

    Weights become `dtype`, by default the dtype of most stored weights (bfloat16 if that is
    quantized), on the device of `groups`. Parameters require gradients. `source` is any
    checkpoint that megtool reads, at any layout; the layout is that of `groups`. The vocabulary is
    padded as the checkpoint's is, or to a multiple of `vocab_multiple * tp`. Layers of multi-token
    prediction are loaded if the caller `keeps_mtp`. A FullyShard shards each layer as soon as it is
    loaded, so that no rank ever has a whole model. With KeepPacked packed weights of linear layers
    stay so, and get no gradients.

    Raises:
        MappingError: the checkpoint is not a whole decoder, or has other tensors than the model; or
            none of its weights can be kept packed.
        LayoutError: the layout does not divide the model; the hint says which sizes do.
        OutOfMemoryError: the weights do not fit into memory; the hint says what would.
        CheckpointError: they cannot be read.
    """
    sharder = groups if isinstance(groups, FullyShard) else None
    keeps_packed = isinstance(groups, KeepPacked)
    if isinstance(groups, FullyShard | KeepPacked):
        groups = groups.groups
    groups = ProcessGroups.alone() if groups is None else groups
    multiple = vocab_multiple or vocab_divisor(source.catalogue)  # as it is saved again
    weights = Weights(
        source,
        parallel=groups.parallel,
        seat=rank_coordinates(groups),
        vocab_multiple=multiple,
        threads=threads,
        keeps_mtp=keeps_mtp,
        progress=progress,
    )
    kind = weights.usual_dtype if dtype is None else named(str(dtype).removeprefix("torch."))
    stages = build_stages(
        weights.config,
        groups,
        dtype=computable(kind),
        sequence_parallel=sequence_parallel,
        vocab_multiple=multiple,
    )
    if sharder is not None and sharder.prepare is not None:
        sharder.prepare(stages)
    trained = {n: p.requires_grad for s in stages for n, p in s.named_parameters()}
    expected = {n: t for stage in stages for n, t in stage.state_dict().items()}
    check_names(weights, expected)
    weights.become({n: named(str(t.dtype).removeprefix("torch.")) for n, t in expected.items()})
    num_shards = 1 if sharder is None else groups.shards.size
    base = PackedBase(source, stages) if keeps_packed else None
    packed = set() if base is None else base.parameters
    check_memory(weights, groups.device, is_trained=True, num_shards=num_shards, absent=packed)
    for stage in stages:
        names_of_stage = [n for n in stage.state_dict() if n not in packed]
        is_whole = groups.device.type == "cpu" and sharder is None
        units = {"": names_of_stage} if is_whole else units_of(names_of_stage)
        for names in units.values():
            tensors = weights.load(names)
            fill(stage, {n: tensors.pop(n).to(groups.device) for n in names})
            for name in names:
                if name in trained:  # the bias that chooses experts is not
                    stage.get_parameter(name).requires_grad_(trained[name])
            if sharder is not None:
                sharder.shard_layers(stage)
        if sharder is not None:
            sharder.shard_rest(stage)
        stage.train()
    if base is not None:
        num_bytes = base.load()
        _LOG.info("%d weights stay packed, in %s", len(packed), format_bytes(num_bytes))
    return stages


def rank_coordinates(groups: ProcessGroups) -> RankCoordinates:
    """The coordinates of a process on the axes that split a model."""
    return RankCoordinates(
        stage=groups.pp.rank, tp=groups.tp.rank, ep=groups.ep.rank, etp=groups.etp.rank
    )
