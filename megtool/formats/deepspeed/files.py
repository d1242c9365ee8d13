"""Files of a DeepSpeed checkpoint: model states, one rank's part of the optimizer, one parameter.

Each is read for its tree and the positions of its tensors; classes that it names stay inert.
Source: deepspeed/runtime/engine.py, zero/{stage_1_and_2,stage3}.py and bf16_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.pickles.reader import dict_items, string_items
from megtool.pickles.torch_file import TorchFile, open_torch_file
from megtool.pickles.zip_tensor import StorageView, TensorLocation, parse_storage_view
from megtool.tensors.catalogue import StoredFile

_UNKNOWN_WRITER_HINT = "not written by DeepSpeed, or by another version: convert it with DeepSpeed"
_MODEL_KEYS = frozenset(
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
class DeepSpeedTensor(TensorLocation):
    """A tensor of a file."""

    stored: StoredFile

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
    `frozen_shapes`. `other_values` are all other values, inert.
    """

    stored: StoredFile
    weights: dict[str, DeepSpeedTensor] = field(default_factory=dict)
    shapes: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    frozen: dict[str, DeepSpeedTensor] = field(default_factory=dict)
    frozen_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    other_values: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class OptimizerStates:
    """What `*_optim_states.pt` holds: a data-parallel rank's flat parts of each group.

    `groups[i]` maps `param` (the master weights), `exp_avg`, ... to flat tensors. With
    `is_stage_3`, each parameter is split over the ranks, not the whole group. `slices[i]` is the
    range of each parameter in this rank's part, if the file declares it.
    """

    stored: StoredFile
    is_stage_3: bool
    ranks: list[int]
    groups: list[dict[str, DeepSpeedTensor]] = field(default_factory=list)
    slices: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    param_groups: Any = None


def read_model_states(root: Path, path: str) -> ModelStates:
    """Read a file of model states.

    Raises:
        FormatError: the file is damaged, hostile, or of another kind.
    """
    stored = StoredFile.stat(root, path)
    out = ModelStates(stored=stored)
    with open_torch_file(root / path, stored.size) as torch_file:
        root_dict = _read_root(torch_file, "param_shapes")
        _take_weights(root_dict.get("module"), torch_file, out)
        shapes = root_dict["param_shapes"]
        for group in shapes if isinstance(shapes, list | tuple) else [shapes]:
            out.shapes.append(_read_shapes(group, torch_file.file))
        out.frozen_shapes = _read_shapes(
            root_dict.get("frozen_param_shapes") or {}, torch_file.file
        )
        for name, node in dict_items(root_dict.get("frozen_param_fragments")) or ():
            if (tensor := _read_tensor(node, torch_file, stored, str(name))) is not None:
                out.frozen[str(name)] = tensor
        args = pickle_reader.to_plain(root_dict.get("args"), file=torch_file.file)
        out.args = args if isinstance(args, dict) else {}
        out.other_values = {k: v for k, v in root_dict.items() if k not in _MODEL_KEYS}
        pickle_reader.check_expansion(out.other_values, file=torch_file.file)
    return out


def read_optimizer_states(root: Path, path: str) -> OptimizerStates:
    """Read one rank's file of the optimizer.

    Raises:
        FormatError: the file is damaged, hostile, or of another kind.
    """
    stored = StoredFile.stat(root, path)
    with open_torch_file(root / path, stored.size) as torch_file:
        inner = string_items(_read_root(torch_file, "optimizer_state_dict")["optimizer_state_dict"])
        is_stage_3 = "fp32_flat_groups" in inner
        masters = inner.get("fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups")
        if masters is None:
            raise FormatError(
                f"no ZeRO optimizer: it holds {', '.join(map(str, sorted(inner)))[:120]}",
                file=torch_file.file,
                hint=_UNKNOWN_WRITER_HINT,
            )
        ranks = pickle_reader.to_plain(inner.get("partition_count"), file=torch_file.file)
        out = OptimizerStates(
            stored=stored,
            is_stage_3=is_stage_3,
            ranks=[n for n in (ranks if isinstance(ranks, list | tuple) else [ranks]) if n],
        )
        listed = masters if isinstance(masters, list | tuple) else [masters]
        for number, node in enumerate(listed):
            out.groups.append({"param": _read_flat(node, torch_file, stored, f"group {number}")})
        base = inner.get("optimizer_state_dict" if is_stage_3 else "base_optimizer_state")
        _take_moments(base, torch_file, out)
        out.slices = _read_slices(inner.get("param_slice_mappings"))
    return out


def read_parameter(root: Path, path: str) -> tuple[StoredFile, DeepSpeedTensor]:
    """Read one file of a universal checkpoint: a dict whose `param` is the tensor.

    Raises:
        FormatError: the file is damaged, hostile, or of another kind.
    """
    stored = StoredFile.stat(root, path)
    with open_torch_file(root / path, stored.size) as torch_file:
        values = string_items(torch_file.tree)
        node = values.get("param") if values else torch_file.tree
        tensor = _read_tensor(node, torch_file, stored, Path(path).parent.name)
        if tensor is None:
            raise FormatError("holds no parameter", file=torch_file.file, hint=_UNKNOWN_WRITER_HINT)
    return stored, tensor


def _read_root(torch_file: TorchFile, key: str) -> dict[str, Any]:
    root_dict = string_items(torch_file.tree)
    if key not in root_dict:
        raise FormatError(f"has no {key!r}", file=torch_file.file, hint=_UNKNOWN_WRITER_HINT)
    return root_dict


def _read_tensor(
    node: Any, torch_file: TorchFile, stored: StoredFile, name: str
) -> DeepSpeedTensor | None:
    """The tensor of a node of the tree; None if it is not a tensor."""
    view = parse_storage_view(node, file=torch_file.file)
    return None if view is None else _make_tensor(view, torch_file, stored, name)


def _make_tensor(
    view: StorageView, torch_file: TorchFile, stored: StoredFile, name: str
) -> DeepSpeedTensor:
    return DeepSpeedTensor(
        stored=stored,
        offset=torch_file.locate(view, tensor=name),
        shape=view.shape,
        strides=None if view.is_row_major else view.strides,
        dtype=view.dtype,
    )


def _read_flat(node: Any, torch_file: TorchFile, stored: StoredFile, name: str) -> DeepSpeedTensor:
    tensor = _read_tensor(node, torch_file, stored, name)
    if tensor is None or len(tensor.shape) != 1 or tensor.strides is not None:
        raise FormatError(
            f"{name} of the optimizer is not a flat tensor",
            file=torch_file.file,
            hint=_UNKNOWN_WRITER_HINT,
        )
    return tensor


def _take_weights(module: Any, torch_file: TorchFile, out: ModelStates) -> None:
    """Every tensor of the model once; a second name of the same view is a tied weight."""
    views = set[StorageView]()
    for name, node in _leaves(module, "", 0):
        view = parse_storage_view(node, file=torch_file.file)
        if view is None or (view in views and view.span_bytes):
            continue
        views.add(view)
        out.weights[name] = _make_tensor(view, torch_file, out.stored, name)


def _leaves(node: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts, by their keys joined with dots."""
    pairs = dict_items(node)
    if pairs is None or depth > _MAX_DEPTH:
        if path:
            yield path, node
        return
    for key, value in pairs:
        yield from _leaves(value, f"{path}.{key}" if path else str(key), depth + 1)


def _read_shapes(group: Any, file: Path) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    for name, node in dict_items(group) or ():
        shape = pickle_reader.to_plain(node, file=file)
        if not isinstance(shape, tuple | list) or any(type(n) is not int or n < 0 for n in shape):
            raise FormatError(f"its shape is {shape!r:.60}", file=file, tensor=str(name))
        out[str(name)] = tuple(shape)
    return out


def _take_moments(base: Any, torch_file: TorchFile, out: OptimizerStates) -> None:
    """Read the flat moments of every group; the elastic form is a list without a state dict."""
    optimizer = string_items(base)
    out.param_groups = optimizer.get("param_groups")
    if isinstance(base, list):
        states: Mapping[Any, Any] = dict(enumerate(base))
    else:
        states = dict(dict_items(optimizer.get("state")) or ())
    for number, group in enumerate(out.groups):
        for state, node in dict_items(states.get(number)) or ():
            view = parse_storage_view(node, file=torch_file.file)
            if view is not None and len(view.shape) == 1 and state != "step":
                name = f"{state} of group {number}"
                group[str(state)] = _read_flat(node, torch_file, out.stored, name)


def _read_slices(mappings: Any) -> list[dict[str, tuple[int, int]]]:
    """`(start, numel)` by name for each group; empty if the file does not declare it."""
    out = []
    for group in mappings if isinstance(mappings, list) else []:
        ranges = {}
        for name, address in dict_items(group) or ():
            state = address.state if isinstance(address, pickle_reader.Inert) else None
            if isinstance(state, dict) and {"start", "numel"} <= state.keys():
                ranges[str(name)] = (int(state["start"]), int(state["numel"]))
        out.append(ranges)
    return out
