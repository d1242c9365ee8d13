"""What of a Megatron state dict does not fit a checkpoint, gathered from all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megtool.access.fit import refuse_misfits
from megtool.convert.dialects import is_optimizer_state
from megtool.frameworks.megatron_core.keys import BUCKETS
from megtool.source.checkpoint import CheckpointSource

_FRESH = "--finetune or --no-load-optim starts with a fresh optimizer"


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """A value of every rank."""
    out: list[Any] = [value]
    if world_size() > 1:
        out = [None] * world_size()
        dist.all_gather_object(out, value)
    return out


@dataclass(slots=True, kw_only=True)
class MegatronFaults:
    """What does not fit, by key: of one rank, or of all."""

    missing: dict[str, None] = field(default_factory=dict)
    misshapen: dict[str, str] = field(default_factory=dict)
    mistyped: dict[str, str] = field(default_factory=dict)
    requested: set[tuple[str, str]] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many tensors do not fit."""
        return len(self.missing) + len(self.misshapen) + len(self.mistyped)

    def check(self, source: CheckpointSource, *, lenient: bool) -> None:
        """Refuse what does not fit, all of it at once.

        Raises:
            MappingError: tensors are missing (unless `lenient`), have other shapes, or cannot hold
                what is stored.
        """
        states = [k for k in self.missing if is_optimizer_state(k) or BUCKETS.match(k)]
        lacks = None
        hint = "nothing was loaded; is it the same model?"
        missing = [] if lenient else list(self.missing)
        if missing and len(states) == len(missing):
            lacks = "the checkpoint has no such optimizer state"
            hint = f"nothing was loaded; {_FRESH}"
            if any(BUCKETS.match(k) for k in missing):
                hint += ", --dist-ckpt-optim-fully-reshardable asks for state of any layout"
        refuse_misfits(
            "the tensors that Megatron asks for",
            missing=missing,
            misshapen=self.misshapen,
            mistyped=self.mistyped,
            file=source.path,
            lacks=lacks,
            hint=hint,
        )
