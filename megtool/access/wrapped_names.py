"""Names of tensors in models that PyTorch wraps: compiled, data-parallel or checkpointed ones.

Wrappers put a part of their own into the names of a state dict, before all of them or, where a part
of a model is wrapped, in their middle: `torch.compile` `_orig_mod`, DistributedDataParallel (and
Megatron's) `module`, FSDP1 `_fsdp_wrapped_module`, activation checkpointing
`_checkpoint_wrapped_module`. Source: torch 2.13, `_get_fqns` in
`distributed/checkpoint/state_dict.py`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

_OWN_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARTS = _OWN_PARTS | {"module"}


def unwrapped_names(name: str) -> Iterator[str]:
    """A name; then without the parts that wrappers put into it, last those that others may have."""
    yield name
    parts = name.split(".")
    for marks in (_OWN_PARTS, _PARTS):
        rest = [p for p in parts if p not in marks]
        if rest and len(rest) < len(parts):
            yield ".".join(rest)
            parts = rest


def find_unwrapped(name: str, names: Container[str]) -> str | None:
    """What a name of a model that may be wrapped is called among `names`; None if it is not."""
    return next((n for n in unwrapped_names(name) if n in names), None)
