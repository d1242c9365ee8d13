"""Folders of one array per tensor: `zarr`, `tensorstore`, and databases of them, `ocdbt`."""

from __future__ import annotations

from functools import partial

from megtool.checkpoint.catalogue import Destination
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.formats.tensorstore import gather
from megtool.checkpoint.formats.zarr_compression import compress
from megtool.checkpoint.formats.zarr_layout import DEFAULT_SHARD_BYTES
from megtool.checkpoint.formats.zarr_layout import lay_out as lay_out_arrays
from megtool.dtypes import DType
from megtool.reshard.megatron.checkpoint_objects import item_of
from megtool.reshard.megatron.common_state import account_for_common
from megtool.reshard.open_source import CheckpointSource
from megtool.reshard.source import files_beside_ranks
from megtool.reshard.writers.target_spec import Request, Target


def lay_out(source: CheckpointSource, request: Request, out: Target, dtype: DType | None) -> None:
    """Lay out the arrays, and beside them all objects and the common state as the source has them.

    Nothing here depends on a layout of ranks, so what belongs to the source's ranks stays true.
    """
    found = source.catalogue
    held = found.metadata.get("common")
    common = held if isinstance(held, dict) else None
    out.destination = lay_out_arrays(
        out.side.tensors,
        kind=out.format,
        shard_bytes=request.max_shard_bytes or DEFAULT_SHARD_BYTES,
        objects={
            name: held.value if held.extent is None else item_of(found, held)
            for name, held in found.objects.items()
        },
        common=common,
        small=files_beside_ranks(source, dtype),
        compress=request.compress,
    )
    out.moved += found.objects
    out.account(*account_for_common(source, common, out.format))
    if request.compress is not None or out.format == "ocdbt":
        is_database = out.format == "ocdbt"
        out.finish = partial(_finish, out.destination, request.compress, is_database)


def _finish(
    destination: Destination, how: str | None, is_database: bool, stage: Stage, threads: int
) -> None:
    if how is not None:
        compress(destination, stage, how, threads=threads)
    if is_database:
        gather(destination, stage)
