"""Transformer Engine's extra state, read and written without it: scales and histories of maxima.

A module's delayed scaling state is a dict of float32 tensors and facts. Releases 1.x keep it as
`torch.save` wrote it, in a BytesIO; 2.x as a pickle in a tensor of bytes. With G matrix products in
a module (the experts of a grouped linear layer), `scale_fwd` is `[3 * G]`, for the input, the
weight and the output of each, `scale_bwd` `[2 * G]`; histories have one more dimension in front.
Source: transformer_engine 1.13 and 2.20, `pytorch/module/base.py`; megatron-core 0.16.1,
`extensions/transformer_engine.py` (`TEGroupedLinear._split_extra_state`).
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.checkpoint.containers import pickled
from megtool.checkpoint.containers.pickle_writer import encode
from megtool.checkpoint.containers.pickled import Inert, Persistent, inert_global
from megtool.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor

KINDS = {"fwd": 3, "bwd": 2}
"""What each product has of forward and backward state: input, weight, output; two gradients."""

_NUM_GEMMS = "num_gemms"
_MORE = "extra_fp8_variables"
_BYTES_IO = ("io.BytesIO", "_io.BytesIO")
_TENSOR = "torch._utils._rebuild_tensor_v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraState:
    """The delayed scaling state of one module.

    `tensors` are float32: `scale_fwd`, `amax_history_fwd` and so on, and of releases 1.x
    `scale_inv_fwd`. `facts` is all the rest, inert. `is_saved` is the form of releases 1.x.
    """

    tensors: dict[str, Tensor]
    facts: dict[Any, Any]
    is_saved: bool

    @property
    def num_gemms(self) -> int:
        """Matrix products of the module."""
        more = self.facts.get(_MORE)
        said = more.get(_NUM_GEMMS) if isinstance(more, dict) else None
        return said if isinstance(said, int) and said > 0 else 1


def decode(value: Any, *, file: str | Path = "") -> ExtraState | None:
    """The state in an extra state as a checkpoint's inert tree has it; None where it holds none.

    Raises:
        FormatError: it is damaged, or names something hostile.
    """
    data, is_saved = _data(value)
    if not data:
        return None
    tree = _saved(data, file) if is_saved else pickled.decode(data, file=file)
    if not isinstance(tree, dict):
        return None
    tensors = {k: t for k, v in tree.items() if (t := _tensor(v, file)) is not None}
    if not any(name.startswith("scale_fwd") for name in tensors):
        return None
    facts = {k: v for k, v in tree.items() if k not in tensors}
    return ExtraState(tensors=tensors, facts=facts, is_saved=is_saved)


def to_tree(state: ExtraState) -> Any:
    """A state as an inert tree again, in the form of its release."""
    held = {**state.tensors, **state.facts}
    if state.is_saved:
        import torch

        out = io.BytesIO()
        torch.save(held, out)
        node = inert_global("_io", "BytesIO")(out.getvalue())
        return node
    return bytes_tensor(encode(held, stand_for=_inner_tensor))


def bytes_tensor(data: bytes) -> Inert:
    """A tensor of bytes, as an inert tree that a `torch.save` file is written of."""
    storage = Persistent(("storage", inert_global("torch", "ByteStorage"), "0", "cpu", len(data)))
    storage.data = data
    hooks = inert_global("collections", "OrderedDict")()
    rebuild = inert_global("torch._utils", "_rebuild_tensor_v2")
    return rebuild(storage, 0, (len(data),), (1,), False, hooks)


def split(state: ExtraState, parts: int) -> list[ExtraState] | None:
    """The state of each of `parts` products of a module; None where it is not of so many."""
    out = []
    for name, tensor in state.tensors.items():
        if tensor.shape[-1] != KINDS[name[-3:]] * parts:
            return None
    for k in range(parts):
        tensors = {
            name: t.reshape(*t.shape[:-1], KINDS[name[-3:]], parts)[..., k].clone()
            for name, t in state.tensors.items()
        }
        out.append(replace(state, tensors=tensors, facts=_with_gemms(state.facts, 1)))
    return out


def join(states: Sequence[ExtraState]) -> ExtraState | None:
    """The state of one module whose products had these; None where they do not fit together."""
    import torch

    first = states[0]
    for state in states:
        same = {n: t.shape for n, t in state.tensors.items()}
        if same != {n: t.shape for n, t in first.tensors.items()} or state.num_gemms != 1:
            return None
    tensors = {
        name: torch.stack([s.tensors[name] for s in states], -1).flatten(-2)
        for name in first.tensors
    }
    return replace(first, tensors=tensors, facts=_with_gemms(first.facts, len(states)))


def _with_gemms(facts: dict[Any, Any], number: int) -> dict[Any, Any]:
    more = facts.get(_MORE)
    if not isinstance(more, dict) or _NUM_GEMMS not in more:
        return facts
    return {**facts, _MORE: {**more, _NUM_GEMMS: number}}


def _data(value: Any) -> tuple[bytes, bool]:
    """The bytes of an extra state, and whether `torch.save` wrote them."""
    if (raw := pickled.as_bytes(value)) is not None:
        return raw, False
    if not isinstance(value, Inert):
        return b"", False
    if value.name in _BYTES_IO:
        parts = [*value.args, *(value.state if isinstance(value.state, tuple) else ())]
        return next(filter(None, map(pickled.as_bytes, parts)), b""), True
    if value.name != _TENSOR or len(value.args) < 3 or not isinstance(value.args[0], Persistent):
        return b"", False
    start, shape = value.args[1], value.args[2]
    held = value.args[0].data or b""
    if not isinstance(start, int) or not isinstance(shape, tuple) or len(shape) != 1:
        return b"", False
    return held[start : start + shape[0]], False


def _saved(data: bytes, file: str | Path) -> Any:
    """What `torch.save` wrote, read by its own safe reader."""
    import torch

    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as e:
        raise FormatError(f"an extra state cannot be read: {str(e)[:200]}", file=file) from e


def _tensor(value: Any, file: str | Path) -> Tensor | None:
    """The tensor that a node of the tree is, None for any other node."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.float()
    if not (isinstance(value, Inert) and value.name == _TENSOR and len(value.args) >= 4):
        return None
    storage, start, shape, step = value.args[:4]
    raw_storage = (
        pickled.as_bytes(storage.args[0]) if isinstance(storage, Inert) and storage.args else None
    )
    if raw_storage is None:
        return None
    held = _saved(raw_storage, file)
    try:
        with warnings.catch_warnings():  # torch warns of the typed storages that it pickles itself
            warnings.simplefilter("ignore", UserWarning)
            raw = bytearray(bytes(held.untyped()))
        flat = torch.frombuffer(raw, dtype=held.dtype)
        return flat.as_strided(tuple(shape), tuple(step), start).float().clone()
    except (AttributeError, TypeError, ValueError, RuntimeError) as e:
        raise FormatError(
            f"a tensor in an extra state makes no sense: {str(e)[:200]}", file=file
        ) from e


def _inner_tensor(value: Any) -> Any:
    """A tensor inside a pickle, as torch pickles it."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"cannot pickle a {type(value).__name__}")
    return pickled.decode(pickle.dumps(value, protocol=2), file="")
