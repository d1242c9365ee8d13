"""Loads a decoder's weights from any open checkpoint: whole, sharded, or streamed by layer.

The decoder's parameters carry Megatron's names and splits, so a checkpoint is loaded by its
catalogue: the plan that reshards fills this rank's memory, and no second mapping exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from megtool.console import Progress, format_bytes, silent
from megtool.convert.megatron.sharding import check_layout
from megtool.convert.rank_tensors import RankCoordinates
from megtool.dtypes import DType
from megtool.dtypes import dtype as named
from megtool.errors import LayoutError, MappingError, OutOfMemoryError, UsageError
from megtool.inference.layer_streaming import LayerStreamer, find_streamer, replaced, units_of
from megtool.inference.rank_weights import Weights
from megtool.model.stacks.decoder import VOCAB_MULTIPLE, Decoder
from megtool.model.stacks.pipeline import build_stages
from megtool.options.layout import ParallelConfig
from megtool.parallel.pipeline_split import divisors
from megtool.parallel.process_groups import ProcessGroups
from megtool.plan.memory import free_memory
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import ModelConfig

_SCAN_ELEMENTS = 1 << 22  # elements checked at once, so that temporaries stay small


def load(
    source: CheckpointSource,
    *,
    groups: ProcessGroups | None = None,
    dtype: DType | torch.dtype | str | None = None,
    stream_layers: bool = False,
    sequence_parallel: bool = False,
    keeps_mtp: bool = False,
    threads: int | None = None,
    progress: Progress = silent,
) -> Decoder:
    """The decoder of a checkpoint with this rank's weights in it, for inference.

    Weights become `dtype`; by default the type that most of them are stored in (bfloat16 if that is
    quantized). They go to the device of `groups` (default: the CPU). With `stream_layers` a layer
    is in memory only while it is needed, and the next one while it is read: a model larger than
    memory still runs. Layers of multi-token prediction are loaded if the caller `keeps_mtp`.

    Raises:
        MappingError: the checkpoint is no whole decoder, or has other tensors than the model.
        LayoutError: the layout does not divide the model; the hint says which sizes do.
        OutOfMemoryError: the weights do not fit into memory; the hint says what would.
        CheckpointError: they cannot be read.
        UsageError: layers of an encoder would be streamed.
    """
    groups = ProcessGroups.alone() if groups is None else groups
    target_device = groups.device
    parallel = groups.parallel
    if parallel.vpp > 1:
        raise LayoutError(
            f"vpp is {parallel.vpp}, but a forward pass has no virtual stages",
            hint="virtual stages only help training; omit --vpp",
        )
    weights = Weights(
        source,
        parallel=parallel,
        seat=RankCoordinates(
            stage=groups.pp.rank, tp=groups.tp.rank, ep=groups.ep.rank, etp=groups.etp.rank
        ),
        vocab_multiple=VOCAB_MULTIPLE,
        keeps_mtp=keeps_mtp,
        threads=threads,
        progress=silent if stream_layers else progress,  # streamed layers are read again and again
    )
    if stream_layers and weights.config.num_decoder_layers:
        raise UsageError(
            "--stream-layers keeps one layer of a decoder in memory, and the model has an encoder",
            hint="leave out --stream-layers; --tp splits the model",
        )
    kind = weights.usual_dtype if dtype is None else named(str(dtype))
    (decoder,) = build_stages(
        weights.config, groups, dtype=computable(kind), sequence_parallel=sequence_parallel
    )
    expected = decoder.state_dict()
    check_names(weights, expected)
    weights.become({n: named(str(t.dtype)) for n, t in expected.items()})
    check_memory(weights, target_device, stream_layers=stream_layers)
    if stream_layers:
        LayerStreamer(decoder, weights, target_device)
    elif target_device.type == "cpu":
        fill(decoder, weights.load())
    else:
        for names in units_of(weights.tensors).values():
            tensors = weights.load(names)
            fill(decoder, {n: tensors.pop(n).to(target_device) for n in names})
    decoder.requires_grad_(False)
    decoder.eval()
    return decoder


def check_names(weights: Weights, expected: Mapping[str, Tensor]) -> None:
    """Every parameter of the model is loaded once, in its shape, and nothing else is.

    Raises:
        MappingError: one is missing, left over, or of another shape.
    """
    file = weights.catalogue.root
    for name, tensor in expected.items():
        stored = weights.tensors.get(name)
        if stored is None:
            raise MappingError(
                f"the model has a parameter of shape {list(tensor.shape)} that the checkpoint "
                "does not hold",
                file=file,
                tensor=name,
                hint="does the config.json belong to this checkpoint?",
                error_id="missing-tensors",
            )
        if tuple(tensor.shape) != stored.shape:
            raise MappingError(
                f"this rank's part of the checkpoint has shape {list(stored.shape)}, and of the "
                f"model {list(tensor.shape)}",
                file=file,
                tensor=name,
                hint="does the config.json belong to this checkpoint?",
            )
    over = [name for name in weights.tensors if name not in expected]
    if over:
        raise MappingError(
            f"the checkpoint holds {len(over)} tensors that the model has no parameter for",
            file=file,
            tensor=over[0],
            hint="does the config.json belong to this checkpoint?",
        )


def check_memory(
    weights: Weights,
    device: torch.device,
    *,
    stream_layers: bool = False,
    is_trained: bool = False,
    num_shards: int = 1,
    absent: Collection[str] = (),
) -> None:
    """Refuse before loading what cannot fit; what is trained is neither streamed nor cast, and may
    be sharded as fp32 a unit at a time. Tensors that are `absent` are not loaded.

    Raises:
        OutOfMemoryError: this rank's weights need more memory than is free.
    """
    if device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(device)[0]
    else:
        free = free_memory()
    loaded = [n for n in weights.tensors if n not in absent]
    sizes = [weights.num_bytes(names) for names in units_of(loaded).values()]
    resident = (
        [a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)] if stream_layers else sizes
    )
    needed = max(resident, default=0) if stream_layers else sum(resident)
    if num_shards > 1:
        whole = sum(weights.num_bytes([n]) * 4 // weights.kind(n).itemsize for n in weights.tensors)
        needed = max(sizes, default=0) + whole // num_shards
    if free is None or needed <= free:
        return
    ways = (
        []
        if stream_layers or is_trained
        else ["keep one layer in memory at a time (--stream-layers)"]
    )
    if not is_trained and any(weights.kind(n).itemsize > 2 for n in weights.tensors):
        ways.append("cast (--dtype bfloat16)")
    if axis := _wider(weights.config, weights.parallel):
        ways.append(f"spread the model over more processes (torchrun, {axis})")
    raise OutOfMemoryError(
        f"the weights take {format_bytes(needed)}{' at a time' if stream_layers else ''}, "
        f"and {device} has {format_bytes(free)} free",
        file=weights.catalogue.root,
        hint="; or ".join(ways) or None,
    )


def _wider(config: ModelConfig, parallel: ParallelConfig) -> str | None:
    """The option of the next layout with more tensor ranks, else stages, that divides a model."""
    wider = [ParallelConfig(tp=n) for n in divisors(config.attention.num_heads) if n > parallel.tp]
    wider += [ParallelConfig(pp=n) for n in divisors(config.num_layers) if n > parallel.pp]
    for kind in wider:
        try:
            check_layout(config, kind)
        except LayoutError:
            continue
        return f"--tp {kind.tp}" if kind.tp > 1 else f"--pp {kind.pp}"
    return None


def fill(decoder: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace a module's parameters and buffers, which keep their attributes."""
    for name, tensor in tensors.items():
        replaced(decoder, name, tensor)


def named_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """All weights of a loaded decoder by name, streamed ones a layer at a time."""
    streamer = find_streamer(decoder)
    yield from decoder.state_dict().items() if streamer is None else streamer.named_weights()


def find_nan(decoder: Decoder) -> str | None:
    """The first weight that contains a NaN or an infinity; None if there is none."""
    return next((n for n, tensor in named_weights(decoder) if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    flat = tensor.detach().flatten()
    for start in range(0, flat.numel(), _SCAN_ELEMENTS):
        part = flat[start : start + _SCAN_ELEMENTS]
        if part.element_size() == 1:
            part = part.float()
        if not bool(torch.isfinite(part).all()):
            return False
    return True


def computable(kind: DType) -> torch.dtype:
    """A type as torch's.

    Raises:
        UsageError: no model is computed in it.
    """
    dtype = getattr(torch, kind.name, None)
    if not isinstance(dtype, torch.dtype) or kind.name not in (
        "float32",
        "bfloat16",
        "float16",
        "float64",
    ):
        raise UsageError(
            f"models cannot run in {kind.name}", hint="--dtype float32, bfloat16 or float16"
        )
    return dtype
