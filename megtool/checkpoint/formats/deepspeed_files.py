"""Files of a DeepSpeed checkpoint: model states, one rank's part of the optimizer, one parameter.

Each is read for its tree and the places of its tensors; classes that it names stay inert.
Source: deepspeed/runtime/engine.py, zero/{stage_1_and_2,stage3}.py and bf16_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megtool.checkpoint.catalogue import StoredFile
from megtool.checkpoint.containers import pickle_reader
from megtool.checkpoint.containers.torch_file import TorchFile, open_torch_file
from megtool.checkpoint.containers.zip_tensor import TensorView, tensor_view
from megtool.checkpoint.formats.megatron_legacy_file import entries, named
from megtool.dtypes import DType
from megtool.errors import FormatError

_STRANGE = "something else than DeepSpeed wrote it, or another version: convert it with DeepSpeed"
_OWN = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "args",
    }
)
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor of a file: where its first element lies, and how its elements do."""

    stored: StoredFile
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    row_major: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        out = 1
        for n in self.shape:
            out *= n
        return out


@dataclass(slots=True, kw_only=True)
class ModelStates:
    """What `*_model_states.pt` holds of a model-parallel rank.

    `shapes` lists, for each group of the optimizer, its parameters in order with their shapes.
    `frozen` are flat parts of parameters that are not trained (stage 3), of shapes
    `frozen_shapes`. `rest` is all that is neither, inert.
    """

    stored: StoredFile
    weights: dict[str, Held] = field(default_factory=dict)
    shapes: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    frozen: dict[str, Held] = field(default_factory=dict)
    frozen_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class OptimizerStates:
    """What `*_optim_states.pt` holds: a data-parallel rank's flat parts of each group.

    `groups[i]` maps `param` (the master weights), `exp_avg`, ... to flat tensors. `by_parameter`
    says that each parameter is cut over the ranks by itself (stage 3), not the whole group.
    `slices[i]` tells, where the file does, the range of each parameter in this rank's part.
    """

    stored: StoredFile
    by_parameter: bool
    ranks: list[int]
    groups: list[dict[str, Held]] = field(default_factory=list)
    slices: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    param_groups: Any = None


def read_model_states(root: Path, path: str) -> ModelStates:
    """Read a file of model states.

    Raises:
        FormatError: it is damaged, hostile, or holds something else.
    """
    stored = StoredFile.stat(root, path)
    out = ModelStates(stored=stored)
    with open_torch_file(root / path, stored.size) as opened:
        top = _top(opened, "param_shapes")
        _take_weights(top.get("module"), opened, out)
        shapes = top["param_shapes"]
        for group in shapes if isinstance(shapes, list | tuple) else [shapes]:
            out.shapes.append(_shapes(group, opened.file))
        out.frozen_shapes = _shapes(top.get("frozen_param_shapes") or {}, opened.file)
        for name, node in entries(top.get("frozen_param_fragments")) or ():
            if (held := _held(node, opened, stored, str(name))) is not None:
                out.frozen[str(name)] = held
        args = pickle_reader.plain(top.get("args"), file=opened.file)
        out.args = args if isinstance(args, dict) else {}
        out.rest = {k: v for k, v in top.items() if k not in _OWN}
    return out


def read_optimizer_states(root: Path, path: str) -> OptimizerStates:
    """Read one rank's file of the optimizer.

    Raises:
        FormatError: it is damaged, hostile, or holds something else.
    """
    stored = StoredFile.stat(root, path)
    with open_torch_file(root / path, stored.size) as opened:
        inner = named(_top(opened, "optimizer_state_dict")["optimizer_state_dict"])
        third = "fp32_flat_groups" in inner
        masters = inner.get("fp32_flat_groups" if third else "single_partition_of_fp32_groups")
        if masters is None:
            raise FormatError(
                f"no ZeRO optimizer: it holds {', '.join(map(str, sorted(inner)))[:120]}",
                file=opened.file,
                hint=_STRANGE,
            )
        ranks = pickle_reader.plain(inner.get("partition_count"), file=opened.file)
        out = OptimizerStates(
            stored=stored,
            by_parameter=third,
            ranks=[n for n in (ranks if isinstance(ranks, list | tuple) else [ranks]) if n],
        )
        listed = masters if isinstance(masters, list | tuple) else [masters]
        for number, node in enumerate(listed):
            out.groups.append({"param": _flat(node, opened, stored, f"group {number}")})
        base = inner.get("optimizer_state_dict" if third else "base_optimizer_state")
        _take_moments(base, opened, out)
        out.slices = _slices(inner.get("param_slice_mappings"))
    return out


def read_parameter(root: Path, path: str) -> tuple[StoredFile, Held]:
    """Read one file of a universal checkpoint: a dict whose `param` is the tensor.

    Raises:
        FormatError: it is damaged, hostile, or holds something else.
    """
    stored = StoredFile.stat(root, path)
    with open_torch_file(root / path, stored.size) as opened:
        found = named(opened.tree)
        node = found.get("param") if found else opened.tree
        held = _held(node, opened, stored, Path(path).parent.name)
        if held is None:
            raise FormatError("holds no parameter", file=opened.file, hint=_STRANGE)
    return stored, held


def _top(opened: TorchFile, key: str) -> dict[str, Any]:
    top = named(opened.tree)
    if key not in top:
        raise FormatError(f"has no {key!r}", file=opened.file, hint=_STRANGE)
    return top


def _held(node: Any, opened: TorchFile, stored: StoredFile, name: str) -> Held | None:
    """The tensor that a node of the tree is; None where it is none."""
    view = tensor_view(node, file=opened.file)
    return None if view is None else _place(view, opened, stored, name)


def _place(view: TensorView, opened: TorchFile, stored: StoredFile, name: str) -> Held:
    return Held(
        stored=stored,
        offset=opened.place(view, tensor=name),
        shape=view.shape,
        strides=view.strides,
        dtype=view.dtype,
        row_major=view.row_major,
    )


def _flat(node: Any, opened: TorchFile, stored: StoredFile, name: str) -> Held:
    held = _held(node, opened, stored, name)
    if held is None or len(held.shape) != 1 or not held.row_major:
        raise FormatError(
            f"{name} of the optimizer is no flat tensor", file=opened.file, hint=_STRANGE
        )
    return held


def _take_weights(module: Any, opened: TorchFile, out: ModelStates) -> None:
    """Every tensor of the model once; a second name of the same view is a tied one."""
    seen = set[TensorView]()
    for name, node in _leaves(module, "", 0):
        view = tensor_view(node, file=opened.file)
        if view is None or (view in seen and view.span_bytes):
            continue
        seen.add(view)
        out.weights[name] = _place(view, opened, out.stored, name)


def _leaves(node: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts, by their keys joined with dots."""
    pairs = entries(node)
    if pairs is None or depth > _MAX_DEPTH:
        if path:
            yield path, node
        return
    for key, value in pairs:
        yield from _leaves(value, f"{path}.{key}" if path else str(key), depth + 1)


def _shapes(group: Any, file: Path) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    for name, node in entries(group) or ():
        shape = pickle_reader.plain(node, file=file)
        if not isinstance(shape, tuple | list) or any(type(n) is not int or n < 0 for n in shape):
            raise FormatError(f"its shape is {shape!r:.60}", file=file, tensor=str(name))
        out[str(name)] = tuple(shape)
    return out


def _take_moments(base: Any, opened: TorchFile, out: OptimizerStates) -> None:
    """Flat moments of every group; the elastic form is a list of them without a state dict."""
    whole = named(base)
    out.param_groups = whole.get("param_groups")
    if isinstance(base, list):
        states: Mapping[Any, Any] = dict(enumerate(base))
    else:
        states = dict(entries(whole.get("state")) or ())
    for number, group in enumerate(out.groups):
        for state, node in entries(states.get(number)) or ():
            view = tensor_view(node, file=opened.file)
            if view is not None and len(view.shape) == 1 and state != "step":
                name = f"{state} of group {number}"
                group[str(state)] = _flat(node, opened, out.stored, name)


def _slices(mappings: Any) -> list[dict[str, tuple[int, int]]]:
    """`(start, numel)` by name for each group; empty where the file does not say."""
    out = []
    for group in mappings if isinstance(mappings, list) else []:
        found = {}
        for name, address in entries(group) or ():
            state = address.state if isinstance(address, pickle_reader.Inert) else None
            if isinstance(state, dict) and {"start", "numel"} <= state.keys():
                found[str(name)] = (int(state["start"]), int(state["numel"]))
        out.append(found)
    return out
