"""Hugging Face folders and bare safetensors files."""

from __future__ import annotations

from megtool.checkpoint.formats.safetensors import DEFAULT_SHARD_BYTES
from megtool.checkpoint.formats.safetensors import lay_out as lay_out_safetensors
from megtool.checkpoint.plan import Dropped
from megtool.commands.lay_out.target import Request, Target
from megtool.commands.megatron.groups import is_group_object
from megtool.commands.megatron.state import EMPTY, is_empty_state, lost_state
from megtool.commands.opened import Opened
from megtool.commands.small_files import hugging_face_files
from megtool.dtypes import DType


def lay_out(source: Opened, request: Request, out: Target, dtype: DType | None) -> None:
    """Lay out safetensors files, and list what they have no place for."""
    single = request.destination.name if out.format == "safetensors" else None
    small = {} if single else hugging_face_files(source, dtype)
    out.is_file = single is not None
    out.destination = lay_out_safetensors(
        out.side.tensors,
        max_shard_bytes=request.max_shard_bytes or DEFAULT_SHARD_BYTES,
        small=small,
        single_file=single,
    )
    for name in source.catalogue.objects:
        harmless = is_empty_state(source.catalogue, name) or is_group_object(name)
        reason = EMPTY if harmless else f"{out.format!r} holds tensors and small files alone"
        out.dropped.append(Dropped(name=name, reason=reason, is_lost=not harmless))
    out.dropped += lost_state(source.catalogue, out.format)
