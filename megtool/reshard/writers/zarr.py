"""Folders of one array per tensor: `zarr`, `tensorstore`, and databases of them, `ocdbt`."""

from __future__ import annotations

from functools import partial

import numpy as np

from megtool.dtypes import DType
from megtool.errors import UsageError
from megtool.formats.zarr.compression import compress
from megtool.formats.zarr.layout import DEFAULT_SHARD_BYTES
from megtool.formats.zarr.layout import plan_zarr_layout as lay_out_arrays
from megtool.formats.zarr.tensorstore import write_database
from megtool.megatron_state.optimizer.master_weight_check import split_box
from megtool.options.target import TargetOptions
from megtool.reshard.writers.target_spec import Target
from megtool.run_state.checkpoint_objects import encode_stored_object
from megtool.run_state.common_state import account_for_common
from megtool.source.checkpoint import CheckpointSource, collect_small_files
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Destination
from megtool.tensors.placement import narrow
from megtool.transport.reading.reader import CheckpointReader


def plan_layout(
    source: CheckpointSource, options: TargetOptions, out: Target, dtype: DType | None
) -> None:
    """Plan the arrays, with all objects and the common state as the source has them.

    Nothing here depends on a layout of ranks, so state of the source's ranks stays valid.

    Raises:
        UsageError: there is no tensor, or a bool is neither 0 nor 1.
    """
    catalogue = source.catalogue
    if not out.side.tensors:
        raise UsageError(
            f"{out.format!r} holds arrays, and there is no tensor to write",
            file=source.path,
            hint="--to dcp or safetensors may be without tensors",
        )
    _check_bools(source, out)
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


def _check_bools(source: CheckpointSource, out: Target) -> None:
    """Refuse bytes that no bool has: tensorstore reads no chunk that holds one."""
    catalogue = source.catalogue
    bools = [
        p
        for name in out.side.placements
        if (p := source.view.placements.get(name)) is not None
        and catalogue[p.stored].dtype.name == "bool"
        and numel(p.shape)
    ]
    if not bools:
        return
    with CheckpointReader(catalogue, Files()) as reader:
        for placement in bools:
            for lo, hi in split_box([0] * len(placement.shape), list(placement.shape)):
                values = reader.open_canonical(narrow(placement, lo, hi)).read().view(np.uint8)
                wrong = np.flatnonzero(values.reshape(-1) > 1)
                if len(wrong):
                    raise UsageError(
                        f"a bool is the byte {values.reshape(-1)[wrong[0]]}, and {out.format!r} "
                        "holds 0 and 1 alone",
                        file=source.path,
                        tensor=placement.stored,
                        hint="--to dcp or safetensors holds the bytes as they are",
                    )


def _finish(
    destination: Destination,
    codec: str | None,
    is_database: bool,
    stage: Stage,
    threads: int,
) -> None:
    if codec is not None:
        compress(destination, stage, codec, threads=threads)
    if is_database:
        write_database(destination, stage)
