"""Folders of one array per tensor: `zarr` and `tensorstore`."""

from __future__ import annotations

from megtool.checkpoint.formats.zarr_layout import DEFAULT_SHARD_BYTES
from megtool.checkpoint.formats.zarr_layout import lay_out as lay_out_arrays
from megtool.checkpoint.plan import Dropped
from megtool.commands.lay_out.target import Request, Target
from megtool.commands.megatron.state import carried_objects, lost_state
from megtool.commands.opened import Opened
from megtool.commands.small_files import files_beside_ranks
from megtool.config import ParallelConfig
from megtool.convert.parallel_args import layout_fields, merged_layout
from megtool.dtypes import DType


def lay_out(source: Opened, request: Request, out: Target, dtype: DType | None) -> None:
    """Lay out the arrays, and beside them the objects and the common state as the source has them.

    Nothing depends on a layout of ranks here, so what belongs to the source's ranks stays.
    """
    found = source.catalogue
    args = found.metadata.get("args")
    known = layout_fields(args) if isinstance(args, dict) else {}
    parallel = merged_layout(known, {}) if known else ParallelConfig()
    objects, lost = carried_objects(found, parallel)
    out.dropped += lost
    common = found.metadata.get("common")
    if not isinstance(common, dict) or out.dialect not in ("megatron", "identity"):
        common = None
        out.dropped += lost_state(found, out.format)
        objects, others = {}, objects
        out.dropped += [Dropped(name=n, reason="it is Megatron's", is_lost=True) for n in others]
    out.destination = lay_out_arrays(
        out.side.tensors,
        kind=out.format,
        shard_bytes=request.max_shard_bytes or DEFAULT_SHARD_BYTES,
        objects=objects,
        common=common,
        small=files_beside_ranks(source, dtype),
    )
