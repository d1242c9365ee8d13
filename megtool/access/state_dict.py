"""`megtool.load_state_dict`: any checkpoint into the modules or tensors that are there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megtool.access.checkpoint import (
    AdapterLocations,
    Checkpoint,
    identify,
    in_batches,
    read_headers,
    refuse_adapter_of_open,
)
from megtool.access.extra_states import (
    is_empty,
    is_extra_state,
    kept_states,
    refuse_foreign_states,
    warn_kept,
)
from megtool.access.fit import FILLED_IN_PART, describe_obstacles, refuse_misfits, require_memory
from megtool.access.naming import NamedTensors, fitting_namings, name_as_stored, seat_of
from megtool.access.read_boxes import BoxRead, BoxReader
from megtool.access.wrapped_names import find_unwrapped
from megtool.console import Progress, silent
from megtool.convert.identity import is_optimizer_state
from megtool.convert.rank_tensors import LocalTensor, cut_local
from megtool.dtypes import dtype as named_dtype
from megtool.errors import LayoutError, MappingError, MegtoolError, UsageError
from megtool.options.layout import ParallelConfig
from megtool.plan.memory import Memory, allocate, as_torch
from megtool.process.gc_pause import paused_collection
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    from torch import nn

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What `load_state_dict` did: the naming that fits, and tensors by what became of them.

    `missing` are tensors of the model, by its own names, that the checkpoint does not have;
    `unused` those of the checkpoint that the model does not ask for.
    """

    naming: str
    num_tensors: int
    num_bytes: int
    missing: tuple[str, ...]
    unused: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """A tensor to fill: its name, its whole shape, and the box of it that `local` is."""

    name: str
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    local: torch.Tensor

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorRequest:
        """This rank's part of a tensor, which may be a DTensor."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(name=name, shape=shape, lo=(0,) * len(shape), hi=shape, local=tensor)
        size, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        hi = tuple(a + n for a, n in zip(offset, size, strict=True))
        return cls(name=name, shape=shape, lo=tuple(offset), hi=hi, local=tensor.to_local())

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's part."""
        return self.local.numel() * self.local.element_size()


@paused_collection()
def load_state_dict(
    model: nn.Module | Mapping[str, Any],
    location: str | Path | Checkpoint,
    *,
    naming: str | None = None,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 0,
    ep: int = 1,
    etp: int = 0,
    rank: int | None = None,
    strict: bool = True,
    family: str | None = None,
    like: str | Path | None = None,
    iteration: int | str | None = None,
    drop_setting: str | Sequence[str] = (),
    adapter: AdapterLocations = (),
    threads: int | None = None,
    progress: Progress = silent,
) -> LoadReport:
    """Fill the tensors of a model, or of a state dict, from a checkpoint of any format, in place.

        megtool.load_state_dict(model, "s3://bucket/run/iter_0005000")

    Tensors keep their types and devices; values are cast and decoded. Of a DTensor this rank's part
    alone is read, at the place that its mesh gives it; with `rank`, plain tensors are those of one
    rank of a layout (see `Checkpoint.as_`). Nothing is read before all names and shapes fit. A
    model may be wrapped (compiled, data-parallel); modules keep their own extra states where the
    checkpoint has none.

    Args:
        model: A module, or tensors by name.
        location: A checkpoint, or where one is.
        naming: What the model's names are: `hf`, `megatron`, `torchtitan` or `stored`; by default
            what fits.
        tp: Tensor-parallel size, for plain tensors of one rank; so are `pp`, `vpp`, `ep`, `etp`.
        rank: Which rank of that layout.
        strict: False leaves tensors alone that the checkpoint does not have.
        family: The model family, if the checkpoint names none.
        like: A Hugging Face folder to take the configuration from.
        drop_setting: Settings, by name, that the model is taken to be without.
        iteration: Which iteration of a save folder; by default the latest.
        adapter: The folder of an adapter (LoRA), or several, to merge into the weights.
        threads: How many threads read.
        progress: Called with what was read.

    Raises:
        MappingError: tensors are missing, have other shapes or cannot hold what is stored; all of
            them are named.
        UsageError: there are no tensors, or some are on the meta device; or an adapter is for a
            checkpoint that is open.
        LayoutError: the layout does not divide the model, or has no such rank.
        CheckpointError: it cannot be opened or read; if reading had begun, the hint says that the
            model is filled in part.
        FormatError: an extra state would run code when its module gets it.
    """
    layout = ParallelConfig(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp)
    parallel = None if rank is None else layout
    if rank is None and layout.world_size > 1:
        raise LayoutError(
            f"tp={tp}, pp={pp} and ep={ep} have {layout.world_size} ranks, and none is named",
            hint=f"rank=0 to rank={layout.world_size - 1}; DTensors need no layout",
        )
    if rank is not None:
        seat_of(layout, rank)
    state = _state_of(model)
    requests = [TensorRequest.of(n, t) for n, t in state.items() if isinstance(t, torch.Tensor)]
    require_memory([w.name for w in requests if w.local.is_meta])
    place, catalogue, named = _open_fitting(
        location,
        requests,
        naming=naming,
        parallel=parallel,
        rank=rank or 0,
        known={"family": family, "like": like, "iteration": iteration, "adapter": adapter}
        | {"drop_setting": drop_setting},
    )
    stored = _stored_names(named, state)
    present, missing = check_fit(place, named, stored, requests, state, strict=strict)
    extra = [key for name, key in stored.items() if is_extra_state(name)]
    refuse_foreign_states(catalogue, extra)
    reader = BoxReader(catalogue, named.source, named.target, threads=threads)
    tensors = {name: named.tensors[key] for name, key in stored.items()}
    try:
        fill_tensors(reader, tensors, present, progress)
    except MegtoolError as e:
        e.add_hint(FILLED_IN_PART)
        raise
    _give_copies(model, state, stored)
    warn_kept(kept_states(state, stored), place)
    used = set(stored.values())
    return LoadReport(
        naming=named.naming,
        num_tensors=len(present),
        num_bytes=sum(w.num_bytes for w in present),
        missing=tuple(missing),
        unused=tuple(n for n in named.tensors if n not in used and ":" not in n),
    )


def _state_of(model: nn.Module | Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of a model.

    Raises:
        UsageError: there is no tensor among them.
    """
    make = getattr(model, "state_dict", None)
    state = model if isinstance(model, Mapping) else make() if make is not None else {}
    if not any(isinstance(t, torch.Tensor) for t in state.values()):
        is_nested = any(isinstance(v, Mapping) for v in state.values())
        raise UsageError(
            f"there are no tensors in the {type(model).__name__}",
            hint="give one of its parts, or use megtool.dcp.load"
            if is_nested
            else "give a module, or a mapping of tensors by name",
        )
    return state


def _give_copies(
    model: nn.Module | Mapping[str, Any], state: Mapping[str, Any], names: Collection[str]
) -> None:
    """Give a module what was filled and is not its own memory.

    Hooks may make tensors of the state dict from others: torchtitan's fused projections of queries,
    keys and values are three there.
    """
    if isinstance(model, Mapping):
        return
    with torch.no_grad():
        own = {
            _storage(t) for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"
        }
        if any(_storage(state[n]) not in own for n in names):
            model.load_state_dict({n: state[n] for n in names}, strict=False)


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr() if local.numel() else 0


def _open_fitting(
    location: str | Path | Checkpoint,
    requests: Sequence[TensorRequest],
    *,
    naming: str | None,
    parallel: ParallelConfig | None,
    rank: int,
    known: Mapping[str, Any],
) -> tuple[Path, Catalogue, NamedTensors]:
    """Where a checkpoint is, its tensors, and these under the names that fit the requests best.

    `known` are the other arguments of `megtool.open`.

    Raises:
        MegtoolError: it cannot be opened, or no naming has any of the names.
    """
    if isinstance(location, Checkpoint):
        refuse_adapter_of_open(known["adapter"])
        checkpoint = location
    else:
        headers, options = read_headers(location, **known)
        says = ("family", "like", "drop_setting", "adapter")
        is_plain = not (any(known.get(name) for name in says) or parallel)
        if naming in (None, "stored") and is_plain:
            as_stored = _find_as_named(headers.catalogue, requests)
            if as_stored is not None:
                return headers.path, *as_stored
        checkpoint = Checkpoint(identify(headers, options, optimizer=False))
    names = [w.name for w in requests if not is_extra_state(w.name)] or [w.name for w in requests]
    named = choose_naming(checkpoint, names, naming, parallel, rank)
    return checkpoint.location, checkpoint.source.catalogue, named


def _find_as_named(
    catalogue: Catalogue, requests: Sequence[TensorRequest]
) -> tuple[Catalogue, NamedTensors] | None:
    """The tensors of a Hugging Face folder or safetensors file that has all by these names, or
    None.

    Which model it is need not be known then, and that takes longer to find out than headers to
    read.
    """
    if catalogue.format not in ("hf", "safetensors") or _missing(requests, catalogue):
        return None
    for warning in catalogue.warnings:
        _LOG.warning("%s", warning)
    if any(is_optimizer_state(t.name) for t in catalogue.tensors):
        catalogue = catalogue.select(lambda name: not is_optimizer_state(name))
    return catalogue, name_as_stored(catalogue)


def _missing(requests: Sequence[TensorRequest], names: Container[str]) -> list[str]:
    """The names of tensors that are not among `names`.

    Extra states are not counted, nor is a tensor that shares its memory with one that is there.
    """
    absent = [w for w in requests if w.name not in names and not is_extra_state(w.name)]
    if not absent:
        return []
    filled = {_place(w.local) for w in requests if w.name in names}
    return [w.name for w in absent if not w.num_bytes or _place(w.local) not in filled]


def choose_naming(
    checkpoint: Checkpoint,
    names: Sequence[str],
    naming: str | None,
    parallel: ParallelConfig | None = None,
    rank: int = 0,
) -> NamedTensors:
    """The checkpoint's tensors under the names that fit most of `names`, or under `naming`.

    Raises:
        MappingError: no naming has any of the names.
        LayoutError: the layout does not divide the model.
    """
    best, hits = None, -1 if naming else 0
    reasons: dict[str, MegtoolError] = {}
    for named in fitting_namings(
        checkpoint.source, naming, parallel=parallel, rank=rank, reasons=reasons
    ):
        count = sum(find_unwrapped(n, named.tensors) is not None for n in names)
        if count > hits:
            best, hits = named, count
        if hits == len(names):
            break
    if best is None:
        unfit = [e for e in reasons.values() if isinstance(e, LayoutError)]
        if unfit:
            raise unfit[0]
        why = "; ".join(f"{n}: {e.message}" for n, e in reasons.items())
        raise MappingError(
            f"the model's names are none that the checkpoint's tensors have, such as "
            f"{next(iter(names), None)!r}" + (f" ({why})" if why else ""),
            file=checkpoint.location,
            hint="--family and --like say which model it is (family=, like= in Python); "
            "megtool.open(...).as_('hf') lists names",
            error_id="missing-tensors",
        )
    return best


def _stored_names(named: NamedTensors, state: Mapping[str, Any]) -> dict[str, str]:
    """What entries are called in the checkpoint, by the model's names, of those that it has.

    Extra states that are empty are not asked for: nothing can be filled into them.
    """
    keys = {
        name: find_unwrapped(name, named.tensors)
        for name, value in state.items()
        if not (is_extra_state(name) and is_empty(value))
    }
    return {name: key for name, key in keys.items() if key is not None}


def check_fit(
    location: str | Path,
    named: NamedTensors,
    stored: Mapping[str, str],
    requests: Sequence[TensorRequest],
    state: Mapping[str, Any],
    *,
    strict: bool,
) -> tuple[list[TensorRequest], list[str]]:
    """What can be filled, and the names of what cannot; `stored` says what is there.

    Raises:
        MappingError: tensors are missing (if `strict`), have other shapes, or cannot hold what is
            stored: all are named.
    """
    present = [w for w in requests if w.name in stored]
    missing = _missing(requests, stored)
    misshapen = {
        w.name: f"{w.name} is {list(w.shape)}, and here {list(shape)}"
        for w in present
        if w.shape != (shape := named.tensors[stored[w.name]].shape)
    }
    mistyped = describe_obstacles({n: (state[n], named.dtypes[key]) for n, key in stored.items()})
    hint = "nothing was loaded; is it the same model?"
    refuse_misfits(
        f"the model's {len(requests)} tensors, by their {named.naming!r} names,",
        missing=missing if strict else [],
        misshapen=misshapen,
        mistyped=mistyped,
        file=location,
        hint=hint
        if misshapen or mistyped
        else f"{hint} strict=False leaves what is missing as it is",
    )
    return present, missing


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided:
        return id(tensor), 0
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def fill_tensors(
    reader: BoxReader,
    tensors: Mapping[str, LocalTensor],
    requests: Sequence[TensorRequest],
    progress: Progress = silent,
) -> None:
    """Fill tensors: those in contiguous memory of the CPU directly, others in batches.

    Raises:
        CheckpointError: a read failed.
        UsageError: an element type cannot be converted.
    """
    total = sum(w.num_bytes for w in requests)

    def tell(stage: str, num_bytes: int, total_bytes: int) -> None:
        progress(stage, num_bytes, total)

    reads = [_box_read(reader, tensors[r.name], r) for r in requests]
    is_direct = [r.local.device.type == "cpu" and r.local.is_contiguous() for r in requests]
    direct = [n for n, is_first in enumerate(is_direct) if is_first]
    places = [memory_of(requests[n].local) for n in direct]
    reader.read([reads[n] for n in direct], places, tell)
    others = [n for n, is_first in enumerate(is_direct) if not is_first]
    for batch in in_batches(others, lambda n: requests[n].num_bytes):
        parts = [
            GlobalTensor(name=str(n), shape=tuple(requests[n].local.shape), dtype=reads[n].dtype)
            for n in batch
        ]
        memory = allocate(parts)
        reader.read([reads[n] for n in batch], [memory[t.name] for t in parts], tell)
        for n, t in zip(batch, parts, strict=True):
            with torch.no_grad():
                requests[n].local.copy_(as_torch(memory[t.name], t))


def _box_read(reader: BoxReader, tensor: LocalTensor, request: TensorRequest) -> BoxRead:
    kind = named_dtype(str(request.local.dtype))
    stored = reader.target.tensors[tensor.key].dtype
    if kind != stored and not (kind.is_float and stored.is_float):
        raise UsageError(
            f"{request.name!r} is {stored} in the checkpoint and {kind} in the model",
            hint="only floating numbers are cast: load it into a tensor of its own type",
        )
    return BoxRead(tensor=cut_local(tensor, request.lo, request.hi, request.name), dtype=kind)


def memory_of(tensor: torch.Tensor) -> Memory:
    """The bytes of a contiguous tensor on the CPU."""
    memory: Memory = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memory
