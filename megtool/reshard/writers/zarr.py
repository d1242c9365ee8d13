"""Folders of one array per tensor: `zarr`, `tensorstore`, and databases of them, `ocdbt`."""

from __future__ import annotations

from functools import partial

from megtool.checkpoint.catalogue import Destination
from megtool.checkpoint.commit import StagingFolder
from megtool.checkpoint.formats.tensorstore import write_database
from megtool.checkpoint.formats.zarr_compression import compress
from megtool.checkpoint.formats.zarr_layout import DEFAULT_SHARD_BYTES
from megtool.checkpoint.formats.zarr_layout import plan_zarr_layout as lay_out_arrays
from megtool.dtypes import DType
from megtool.reshard.megatron.checkpoint_objects import encode_stored_object
from megtool.reshard.megatron.common_state import account_for_common
from megtool.reshard.source import CheckpointSource, collect_small_files
from megtool.reshard.writers.target_spec import Target, TargetOptions


def plan_zarr_layout(
    source: CheckpointSource, options: TargetOptions, out: Target, dtype: DType | None
) -> None:
    """Plan the arrays, with all objects and the common state as the source has them.

    Nothing here depends on a layout of ranks, so state of the source's ranks stays valid.
    """
    catalogue = source.catalogue
    source_state = catalogue.metadata.get("common")
    common = source_state if isinstance(source_state, dict) else None
    out.destination = lay_out_arrays(
        out.side.tensors,
        kind=out.format,
        shard_bytes=options.max_shard_bytes or DEFAULT_SHARD_BYTES,
        objects={
            name: source_state.value
            if source_state.extent is None
            else encode_stored_object(catalogue, source_state)
            for name, source_state in catalogue.objects.items()
        },
        common=common,
        small_files=collect_small_files(source, dtype),
        compress=options.compress,
    )
    out.moved += catalogue.objects
    out.account(*account_for_common(source, common, out.format))
    if options.compress is not None or out.format == "ocdbt":
        is_database = out.format == "ocdbt"
        out.finish = partial(_finish, out.destination, options.compress, is_database)


def _finish(
    destination: Destination,
    codec: str | None,
    is_database: bool,
    stage: StagingFolder,
    threads: int,
) -> None:
    if codec is not None:
        compress(destination, stage, codec, threads=threads)
    if is_database:
        write_database(destination, stage)
