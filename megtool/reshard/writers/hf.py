"""Hugging Face folders and bare safetensors files."""

from __future__ import annotations

from megtool.checkpoint.formats.safetensors import DEFAULT_SHARD_BYTES
from megtool.checkpoint.formats.safetensors import lay_out as lay_out_safetensors
from megtool.checkpoint.param_groups import is_group_object
from megtool.checkpoint.plan import Dropped
from megtool.checkpoint.random_state import is_rerun, is_rerun_idle
from megtool.dtypes import DType
from megtool.reshard.megatron.common_state import account_for_common
from megtool.reshard.megatron.extra_state_names import EMPTY, is_empty_state
from megtool.reshard.open_source import CheckpointSource
from megtool.reshard.source import hugging_face_files, saved_tokenizer
from megtool.reshard.writers.target_spec import Request, Target


def lay_out(source: CheckpointSource, request: Request, out: Target, dtype: DType | None) -> None:
    """Lay out safetensors files, and list what they have no place for."""
    single = request.destination.name if out.format == "safetensors" else None
    small = {} if single else hugging_face_files(source, dtype) | saved_tokenizer(source)
    out.is_file = single is not None
    out.destination = lay_out_safetensors(
        out.side.tensors,
        max_shard_bytes=request.max_shard_bytes or DEFAULT_SHARD_BYTES,
        small=small,
        single_file=single,
    )
    catalogue = source.catalogue
    for name in catalogue.objects:
        reason, is_lost = f"{out.format!r} holds tensors and small files alone", True
        if is_empty_state(catalogue, name):
            reason, is_lost = EMPTY, False
        elif is_group_object(name) and not source.side.states:
            reason, is_lost = "its optimizer state is left out", False
        elif is_rerun(name) and is_rerun_idle(catalogue):
            reason, is_lost = "rerun state; none was pending", False
        out.dropped.append(Dropped(name=name, reason=reason, is_lost=is_lost))
    out.account(*account_for_common(source, None, out.format))
