"""Hugging Face folders and bare safetensors files."""

from __future__ import annotations

from dataclasses import replace

from megtool.dtypes import DType
from megtool.formats.safetensors.reader import DEFAULT_SHARD_BYTES
from megtool.formats.safetensors.reader import plan_safetensors_layout as lay_out_safetensors
from megtool.megatron_state.extra_states.names import EMPTY, is_empty_state
from megtool.megatron_state.param_groups import is_group_object
from megtool.megatron_state.random_state import is_rerun_idle, is_rerun_object, is_rng_object
from megtool.options.target import TargetOptions
from megtool.plan.copies import DroppedItem
from megtool.reshard.writers.target_spec import Target
from megtool.run_state.common_state import account_for_common
from megtool.source.checkpoint import CheckpointSource, collect_hf_files, collect_saved_tokenizer
from megtool.source.repeated_tensors import find_repeated_names
from megtool.tensors.placement import Placement


def plan_layout(
    source: CheckpointSource, options: TargetOptions, out: Target, dtype: DType | None
) -> None:
    """Plan safetensors files, and record what they cannot hold."""
    single = options.destination.name if out.format == "safetensors" else None
    small = {} if single else collect_hf_files(source, dtype) | collect_saved_tokenizer(source)
    out.is_file = single is not None
    repeated = {} if options.rename else find_repeated_names(source, out.side)
    kinds = {t.name: t for t in out.side.tensors}
    further = [replace(kinds[n], name=copy) for n, copies in repeated.items() for copy in copies]
    out.side = replace(out.side, tensors=[*out.side.tensors, *further])
    out.destination = lay_out_safetensors(
        out.side.tensors,
        max_shard_bytes=options.max_shard_bytes or DEFAULT_SHARD_BYTES,
        small_files=small,
        single_file=single,
    )
    out.add_copies({name: [name, *copies] for name, copies in repeated.items()})
    written = {t.name for t in further}
    for alias in out.copies:  # each from its own bytes, which are those of what it repeats
        stored = out.side.placements[alias].stored
        if stored in written:
            shape = out.side.placements[alias].shape
            out.parts[alias] = Placement.identity(alias, shape, stored=stored)
    catalogue = source.catalogue
    for name in catalogue.objects:
        reason, is_lost = f"{out.format!r} holds only tensors and small files", True
        if is_empty_state(catalogue, name):
            reason, is_lost = EMPTY, False
        elif (is_group_object(name) or is_rng_object(name)) and not source.view.states:
            reason, is_lost = "its optimizer state is left out", False
        elif is_rerun_object(name) and is_rerun_idle(catalogue):
            reason, is_lost = "rerun state; none was pending", False
        out.dropped.append(DroppedItem(name=name, reason=reason, is_lost=is_lost))
    out.account(*account_for_common(source, None, out.format))
