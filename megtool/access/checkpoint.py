"""`megtool.open`: any checkpoint under any names, read in part or as a stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megtool.access.extra_states import is_extra_state
from megtool.access.lazy_tensor import NamedView
from megtool.access.naming import NAMINGS, name_tensors
from megtool.access.read_boxes import BoxReader
from megtool.console import Progress, silent
from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import LayoutError, UnknownTensorsError, UsageError
from megtool.options.groups import AdaptedSource, SourceOptions
from megtool.options.layout import ParallelConfig
from megtool.process.gc_pause import paused_collection
from megtool.process.threads import BackgroundCall
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import Headers, TensorFilter, open_source
from megtool.spec.model_config import ModelConfig
from megtool.storage.location.path import location as to_location

if TYPE_CHECKING:
    import torch

BATCH_BYTES = 64 << 20
"""About how much `stream` reads at a time; the next batch is read while one is used."""

AdapterLocations = str | Path | Sequence[str | Path]
"""The folders of one adapter, or of several."""

T = TypeVar("T")


class Checkpoint:
    """An open checkpoint of any format. Its headers are read, its tensors are not."""

    def __init__(
        self, source: CheckpointSource, *, framework: str = "numpy", threads: int | None = None
    ) -> None:
        self.source = source
        self._framework, self._threads = framework, threads

    @property
    def location(self) -> Path:
        """Where it is."""
        return self.source.path

    @property
    def format(self) -> str:
        """The name of its format."""
        return self.source.format

    @property
    def family(self) -> str | None:
        """The family of its model, None where it has none."""
        return self.source.family_name

    @property
    def config(self) -> ModelConfig | None:
        """The configuration of its model, None where the model is not known."""
        return self.source.known_config

    @cached_property
    def tensors(self) -> NamedView:
        """Its tensors as stored (decoded where they are quantized)."""
        return self.as_("stored")

    def __repr__(self) -> str:
        return f"<{self.format} checkpoint {str(self.location)!r}: {self.family or 'no family'}>"

    def as_(
        self,
        naming: str,
        *,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 0,
        ep: int = 1,
        etp: int = 0,
        rank: int | None = None,
        dtype: str | torch.dtype | None = None,
        framework: str | None = None,
    ) -> NamedView:
        """Its tensors under other names, whole or as one rank of a layout has them.

        Args:
            naming: `hf`, `megatron`, `torchtitan` or `stored`.
            tp: Tensor-parallel size.
            pp: Pipeline-parallel size.
            vpp: Virtual chunks of each pipeline stage.
            ep: Expert-parallel size.
            etp: Tensor-parallel size of experts; 0: that of the rest.
            rank: Which rank of the layout: tp counts fastest, then ep, then pp. Without it tensors
                are whole.
            dtype: What floating model weights are cast to, for example `bfloat16` (or
                `torch.bfloat16`).
            framework: `numpy` or `torch`, of what is read; by default the checkpoint's.

        Raises:
            UsageError: the naming or the framework is unknown, or weights are not cast to `dtype`.
            MappingError: the naming needs a family that is not known.
            LayoutError: the layout does not divide the model, or has no such rank.
        """
        parallel = ParallelConfig(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp)
        if rank is None and parallel.world_size > 1:
            raise LayoutError(
                f"tp={tp}, pp={pp} and ep={ep} have {parallel.world_size} ranks, and none is named",
                hint=f"rank=0 to rank={parallel.world_size - 1}",
            )
        named = name_tensors(
            self.source,
            naming,
            parallel=None if rank is None else parallel,
            rank=rank or 0,
            dtype=_cast_type(dtype),
        )
        reader = BoxReader(self.source.catalogue, named.source, named.target, threads=self._threads)
        return NamedView(named, reader, framework=framework or self._framework)


def _cast_type(requested: Any) -> DType | None:
    """The element type of a name, or of a type of torch.

    Raises:
        FormatError: the name is none that megtool knows.
        UsageError: weights are not cast to it.
    """
    if not requested:
        return None
    kind = named_dtype(str(requested))
    if not kind.is_float:
        raise UsageError(f"weights are not cast to {kind}", hint="for example bfloat16")
    return kind


@paused_collection()
def open_checkpoint(
    location: str | Path | Checkpoint,
    *,
    family: str | None = None,
    like: str | Path | None = None,
    iteration: int | str | None = None,
    drop_setting: str | Sequence[str] = (),
    adapter: AdapterLocations = (),
    optimizer: bool = True,
    framework: str = "numpy",
    threads: int | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format, local or in a store; only headers are read.

        ckpt = megtool.open("s3://bucket/run/iter_0005000")
        ckpt.as_("hf")["model.layers.0.self_attn.q_proj.weight"][:128]

    Args:
        location: A folder, a save folder or a file; a path or a URL. An open checkpoint is
            returned as it is. Where the model is known, tensors that are extra states of modules
            (Transformer Engine's) are left out.
        family: The model family, if the checkpoint names none.
        like: A Hugging Face folder to take the configuration from.
        drop_setting: Settings, by name, that the model is taken to be without.
        iteration: Which iteration of a save folder; by default the latest.
        adapter: The folder of an adapter (LoRA), or several, to merge into the weights as they are
            read, without optimizer state; their bits are those that `megtool.reshard` writes.
        optimizer: False leaves optimizer state out.
        framework: What tensors are read as: `numpy` or `torch`.
        threads: How many threads read; by default as many as the storage keeps busy.

    Raises:
        FormatError: no checkpoint, or a damaged one.
        MappingError: its tensors do not fit the model that it names.
        StorageError: it cannot be read.
        UsageError: the location is empty, or no location; or an adapter is for an open checkpoint.
    """
    if isinstance(location, Checkpoint):
        refuse_adapter_of_open(adapter)
        return location
    headers, options = read_headers(
        location,
        family=family,
        like=like,
        iteration=iteration,
        drop_setting=drop_setting,
        adapter=adapter,
    )
    source = identify(headers, options, optimizer=optimizer)
    return Checkpoint(source, framework=framework, threads=threads)


def refuse_adapter_of_open(adapter: AdapterLocations) -> None:
    """Refuse to merge an adapter into a checkpoint that is open without it.

    Raises:
        UsageError: there is one.
    """
    if adapter:
        raise UsageError(
            f"the checkpoint is open already, without the adapter {adapter!r}",
            hint="megtool.open(LOCATION, adapter=FOLDER) opens it with one",
        )


def read_headers(
    location: str | Path,
    *,
    family: str | None = None,
    like: str | Path | None = None,
    iteration: int | str | None = None,
    drop_setting: str | Sequence[str] = (),
    adapter: AdapterLocations = (),
) -> tuple[Headers, AdaptedSource]:
    """The headers of a checkpoint, and what is said of its model; see `open_checkpoint`.

    Raises:
        FormatError: no checkpoint, or a damaged one.
        StorageError: it cannot be read.
        UsageError: the location is empty, or no location.
    """
    options = AdaptedSource(
        family=family,
        like=None if like is None else to_location(like),
        iteration=None if iteration is None else str(iteration),
        drop_setting=drop_setting,  # type: ignore[arg-type] # converted
        adapter=adapter,  # type: ignore[arg-type] # converted
    )
    return Headers.read(to_location(location), options), options


def identify(headers: Headers, options: SourceOptions, *, optimizer: bool) -> CheckpointSource:
    """The checkpoint of these headers as that of a model; see `open_checkpoint`.

    Raises:
        FormatError: it is damaged.
        MappingError: its tensors do not fit the model that it names.
    """
    try:
        return open_source(headers, options, optimizer=optimizer, compare_copies=False)
    except UnknownTensorsError:  # a family's names have no place for modules' extra states
        states = TensorFilter(ignore=is_extra_state)
        return open_source(
            headers, options, optimizer=optimizer, tensors=states, compare_copies=False
        )


def stream(
    location: str | Path | Checkpoint,
    *,
    to: str = "hf",
    tp: int = 1,
    pp: int = 1,
    vpp: int = 0,
    ep: int = 1,
    etp: int = 0,
    rank: int | None = None,
    dtype: str | torch.dtype | None = None,
    framework: str = "torch",
    family: str | None = None,
    like: str | Path | None = None,
    iteration: int | str | None = None,
    drop_setting: str | Sequence[str] = (),
    adapter: AdapterLocations = (),
    threads: int | None = None,
    progress: Progress = silent,
) -> Iterator[tuple[str, Any]]:
    """The tensors of a checkpoint one after another, under any names and layout.

        for name, tensor in megtool.stream("ckpt", to="hf", tp=8, rank=3): ...

    About 128 MiB are in memory at a time (or the two largest tensors in succession), and what the
    caller keeps. Model weights alone; the other arguments are those of `open` and `Checkpoint.as_`.

    Raises:
        MegtoolError: it cannot be opened, named, cut or read.
    """
    checkpoint = open_checkpoint(
        location,
        family=family,
        like=like,
        iteration=iteration,
        drop_setting=drop_setting,
        adapter=adapter,
        optimizer=False,
        threads=threads,
    )
    view = checkpoint.as_(
        to,
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        etp=etp,
        rank=rank,
        dtype=dtype,
        framework=framework,
    )
    return stream_view(view, progress)


def stream_view(view: NamedView, progress: Progress = silent) -> Iterator[tuple[str, Any]]:
    """The tensors of a view, the next batch read while one is used."""
    total = view.num_bytes
    for batch in _read_ahead(view):
        for name in list(batch):
            tensor = batch.pop(name)
            progress("stream", view[name].num_bytes, total)
            yield name, tensor


def _read_ahead(view: NamedView) -> Iterator[dict[str, Any]]:
    """Batches of tensors; a thread reads the next one."""
    ahead: BackgroundCall[dict[str, Any]] | None = None
    try:
        for names in in_batches(view, lambda name: view[name].num_bytes):
            ready = None if ahead is None else ahead.result()
            ahead = BackgroundCall(functools.partial(view.read, names))
            if ready is not None:
                yield ready
                del ready
        if ahead is not None:
            yield ahead.result()
    finally:
        if ahead is not None:
            ahead.wait()


def in_batches(items: Iterable[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in their order, `BATCH_BYTES` together at most, or a larger one alone."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + num_bytes(item) > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += num_bytes(item)
    if batch:
        yield batch


__all__ = ["NAMINGS", "Checkpoint", "in_batches", "open_checkpoint", "stream", "stream_view"]
