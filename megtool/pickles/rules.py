"""Check that a tree names allowed globals only, and uses each as checkpoints do.

An allowed name is not enough: a dtype that is called, a dict whose default comes from a function,
or bytes that hold another pickle do what their writer wants when somebody loads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from megtool.dtypes import dtype, from_storage
from megtool.errors import FormatError
from megtool.pickles.allow_list import ALLOWED_GLOBALS, GlobalForm
from megtool.pickles.payload import PAYLOAD_FILE, read_payload
from megtool.pickles.reader import (
    Inert,
    PersistentRef,
    as_bytes,
    dict_items,
    inert_global,
    is_global,
)
from megtool.pickles.storage_stream import parse_storage_stream
from megtool.tensors.box import strides as row_major

_MAX_NESTING = 8
_SMALL_BYTES = 64 << 10
_CALLEES = frozenset(
    {
        GlobalForm.TENSOR,
        GlobalForm.PARAMETER,
        GlobalForm.SUBCLASS,
        GlobalForm.STORAGE_STREAM,
        GlobalForm.ARRAY,
    }
)
"""Forms that a tree may call, but not hand to another function."""

_PLAIN = (str, bytes, bytearray, int, float, type(None))
_LATIN = ("latin1", "latin-1")
_FACTORIES = frozenset({"list", "dict", "set", "tuple", "int", "float", "str", "bool"})


def find_problems(tree: Any, *, depth: int = 0) -> tuple[str, ...]:
    """What a tree must not be written with, each once; empty for a tree that may be written.

    A problem is the name of a global that is not allowed, with a note if only its use is not.
    Values that are neither plain nor inert are ignored: the writer refuses or replaces them.
    """
    problems: dict[str, None] = {}
    visited: set[int] = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if node is None or isinstance(node, str | int | float) or id(node) in visited:
            continue
        visited.add(id(node))
        problems |= dict.fromkeys(own_problems(node, depth=depth))
        stack.extend(child_nodes(node))
    return tuple(problems)


def own_problems(node: Any, *, depth: int = 0) -> tuple[str, ...]:
    """The problems of a node itself, without those of the nodes below it."""
    if is_global(node):
        form = ALLOWED_GLOBALS.get((node.module, node.qualname))
        dotted = f"{node.module}.{node.qualname}"
        if form is None:
            return (dotted,)
        return (f"{dotted} (as a value)",) if form in _CALLEES else ()
    if isinstance(node, Inert):
        form = ALLOWED_GLOBALS.get((node.module, node.qualname))
        if form is None:
            return (node.name,)
        if not _has_form(node, form):
            return (f"{node.name} (in an unusual form)",)
        data = as_bytes(node)
        if form is GlobalForm.TENSOR:
            try:
                data = tensor_bytes(node)
            except FormatError as e:
                return (f"{node.name} ({e.message})",)
        return () if data is None else payload_problems(data, depth)
    if isinstance(node, bytes | bytearray):
        return payload_problems(bytes(node), depth)
    if isinstance(node, PersistentRef):
        if not (_is_reference(node.id) or _is_plain(node.id)):
            return ("a reference to no storage",)
        return () if node.data is None else payload_problems(node.data, depth)
    return ()


def child_nodes(node: Any) -> Iterator[Any]:
    """The nodes below a node."""
    if isinstance(node, dict):
        for pair in node.items():
            yield from pair
    elif isinstance(node, list | tuple | set | frozenset):
        yield from node
    elif isinstance(node, PersistentRef):
        yield node.id
    elif isinstance(node, Inert):
        form = ALLOWED_GLOBALS.get((node.module, node.qualname))
        yield from node.args[1:] if form in (GlobalForm.SUBCLASS, GlobalForm.ARRAY) else node.args
        yield from node.kwargs.values()
        yield from node.items
        for pair in node.pairs:
            yield from pair
        yield node.state


def tensor_bytes(node: Inert) -> bytes | None:
    """The bytes of a tensor in row-major order; None if they are not attached.

    Raises:
        FormatError: they are outside its storage, or more than it has.
    """
    storage, start, size, steps = node.args[:4]
    shape, strides = _sizes(size), _sizes(steps)
    if isinstance(storage, PersistentRef):
        data, name = storage.data, storage.id[1].qualname
    else:
        stream = parse_storage_stream(as_bytes(storage.args[0]) or b"", file=PAYLOAD_FILE)
        data, name = stream.data, stream.storage
    if data is None:
        return None
    typed = node.args[6] if len(node.args) > 6 and is_global(node.args[6]) else None
    if name in ("UntypedStorage", "TypedStorage"):
        width = dtype(typed.qualname).itemsize if typed is not None else 1
    else:
        width = from_storage(name).itemsize
    numel = math.prod(shape)
    if numel == 0:
        return b""
    if len(shape) != len(strides) or min((start, *shape, *strides)) < 0:
        raise FormatError("impossible sizes")
    end = start + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if end * width > len(data) or numel * width > max(len(data), _SMALL_BYTES):
        raise FormatError("larger than its storage")
    if strides == row_major(shape):
        return data[start * width : (start + numel) * width]
    items = np.frombuffer(data, f"V{width}", count=len(data) // width)[start:]
    view = np.lib.stride_tricks.as_strided(items, shape, [s * width for s in strides])
    return view.tobytes()


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(value.args[0] if isinstance(value, Inert) else value)


def payload_problems(data: bytes, depth: int = 0) -> tuple[str, ...]:
    """The problems of bytes that may be a pickle or a file of `torch.save`."""
    check = _payload_problems if len(data) <= _SMALL_BYTES else _payload_problems.__wrapped__
    return check(data, depth)


@lru_cache(maxsize=1024)
def _payload_problems(data: bytes, depth: int) -> tuple[str, ...]:
    try:
        payload = read_payload(data)
        if payload is None:
            return ()
        if depth >= _MAX_NESTING:
            return (f"pickles nested more than {_MAX_NESTING} deep",)
        return find_problems(payload.tree, depth=depth + 1)
    except (FormatError, RecursionError) as e:
        return (f"{PAYLOAD_FILE}: {e.message if isinstance(e, FormatError) else 'too deep'}",)


def verbatim_problems(data: bytes, depth: int = 0) -> tuple[str, ...]:
    """The problems of bytes that are copied as they are, instead of encoded again.

    Everything that a pickle builds counts, also what is not in its result in the end: an object
    that it takes off its stack again, or overwrites.
    """
    if own_problems := payload_problems(data, depth):
        return own_problems
    recorder = _Recorder()
    try:
        payload = read_payload(data, stub_classes=recorder)
    except (FormatError, RecursionError) as e:
        return (f"{PAYLOAD_FILE}: {e}",)
    if payload is None:
        return ()
    problems = dict.fromkeys(find_problems([*recorder.nodes, payload.tree], depth=depth + 1))
    stack: list[Any] = [*recorder.nodes, payload.tree]
    visited: set[int] = set()
    while stack:
        node = stack.pop()
        if node is None or isinstance(node, str | int | float) or id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, bytearray):
            problems["a bytearray, which could change after its use"] = None
        elif (inner := _inner_bytes(node)) and depth < _MAX_NESTING:
            problems |= dict.fromkeys(verbatim_problems(inner, depth + 1))
        stack.extend(child_nodes(node))
    return tuple(problems)


def _inner_bytes(node: Any) -> bytes | None:
    """The bytes that a node holds, which somebody may unpickle again."""
    if isinstance(node, bytes):
        return node
    if isinstance(node, PersistentRef):
        return node.data
    if not isinstance(node, Inert) or is_global(node):
        return None
    form = ALLOWED_GLOBALS.get((node.module, node.qualname))
    return tensor_bytes(node) if form is GlobalForm.TENSOR else as_bytes(node)


class _Recorder(dict[tuple[str, str], Any]):
    """Stubs for all globals of a pickle, which note every object that it builds."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Any] = []

    def __bool__(self) -> bool:
        return True

    def get(self, key: tuple[str, str], _default: Any = None) -> Any:
        if key not in self:
            base, nodes = inert_global(*key), self.nodes

            def new(cls: type[Inert], *args: Any, **kwargs: Any) -> Inert:
                node = Inert.__new__(cls, *args, **kwargs)
                nodes.append(node)
                return node

            self[key] = type("Inert", (base,), {"__slots__": (), "__new__": new})
            nodes.extend(() if key in ALLOWED_GLOBALS else [base])
        return self[key]


def _is_reference(pid: Any) -> bool:
    """Whether an id is that of a storage: `("storage", class, key, device, numel)`."""
    return (
        isinstance(pid, tuple)
        and len(pid) in (5, 6)
        and pid[0] == "storage"
        and is_global(pid[1])
        and pid[1].module in ("torch", "torch.storage")
        and pid[1].qualname.endswith("Storage")
        and isinstance(pid[2], str)
        and isinstance(pid[3], str)
        and type(pid[4]) is int
        and (len(pid) == 5 or pid[5] is None)
    )


def _has_form(node: Inert, form: GlobalForm) -> bool:
    try:
        return _CHECKS[form](node)
    except RecursionError:
        return False


def _is_bare(node: Inert) -> bool:
    """Whether nothing happens to an object after it is built."""
    return not (node.kwargs or node.items or node.pairs or node.has_state)


def _are_fields(state: Any) -> bool:
    """Whether a state sets attributes by name: a dict, or a pair of one and of slots."""
    if state is None:
        return True
    if isinstance(state, tuple) and len(state) == 2:
        return all(map(_are_fields, state))
    return isinstance(state, dict) and all(isinstance(k, str) for k in state)


def _is_plain(value: Any) -> bool:
    """Whether a value is a scalar, or a tuple or list of some."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _check_value(_node: Inert) -> bool:
    return False


def _check_enum(node: Inert) -> bool:
    return _is_bare(node) and len(node.args) == 1


def _check_call(node: Inert) -> bool:
    is_set = node.qualname in ("set", "frozenset")
    built = node.built_by == "reduce" and not (node.kwargs or node.pairs or node.has_state)
    return built and (is_set or not node.items) and _reserves_nothing(node)


def _reserves_nothing(node: Inert) -> bool:
    """Whether an array from a buffer has no more elements than the buffer has bytes."""
    if node.qualname != "_frombuffer":
        return True
    return len(node.args) == 4 and as_bytes(node.args[0]) is not None


def _check_record(node: Inert) -> bool:
    return node.built_by == "new" and _is_bare(node)


def _check_object(node: Inert) -> bool:
    if node.kwargs or node.items or node.pairs or not _is_plain(node.args):
        return False
    if node.built_by == "reduce" and node.args:
        return False
    state = node.state
    if node.qualname == "TensorProperties" and isinstance(state, tuple):
        return len(state) <= 5
    return _are_fields(state)


def _check_mapping(node: Inert) -> bool:
    if node.kwargs or not _are_fields(node.state):
        return False
    if node.qualname != "defaultdict":
        return len(node.args) <= (2 if node.qualname == "deque" else 1)
    factory = node.args[0] if node.args else None
    return len(node.args) <= 2 and (
        factory is None
        or (
            is_global(factory)
            and factory.module in ("builtins", "__builtin__")
            and factory.qualname in _FACTORIES
        )
    )


def _check_tensor(node: Inert) -> bool:
    if node.built_by != "reduce" or not _is_bare(node) or not 4 <= len(node.args) <= 8:
        return False
    storage, offset, *sizes = node.args[:4]
    is_storage = isinstance(storage, PersistentRef) or (
        isinstance(storage, Inert) and storage.name == "torch.storage._load_from_bytes"
    )
    tail = node.args[4:]
    return (
        is_storage
        and type(offset) is int
        and all(map(_is_size, sizes))
        and (len(tail) < 1 or isinstance(tail[0], bool))
        and (len(tail) < 2 or _is_empty(tail[1]))
        and (len(tail) < 3 or is_global(tail[2]) or _is_empty(tail[2]))
        and (len(tail) < 4 or _is_empty(tail[3]))
    )


def _is_size(value: Any) -> bool:
    if isinstance(value, Inert):
        return value.name == "torch.Size" and len(value.args) == 1 and _is_size(value.args[0])
    return isinstance(value, tuple | list) and all(type(n) is int for n in value)


def _is_empty(value: Any) -> bool:
    """Whether there are no hooks and no metadata."""
    return value is None or dict_items(value) == []


def _check_parameter(node: Inert) -> bool:
    if node.built_by != "reduce" or not _is_bare(node) or not 3 <= len(node.args) <= 4:
        return False
    return _is_empty(node.args[2]) and (len(node.args) == 3 or _are_fields(node.args[3]))


def _check_subclass(node: Inert) -> bool:
    if node.built_by != "reduce" or not _is_bare(node) or len(node.args) != 4:
        return False
    function, kind, args, state = node.args
    if not (is_global(function) and is_global(kind) and isinstance(args, tuple)):
        return False
    if f"{kind.module}.{kind.qualname}" not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return False
    form = ALLOWED_GLOBALS.get((function.module, function.qualname))
    return form is GlobalForm.TENSOR and _check_tensor(function(*args)) and _are_fields(state)


def _check_stream(node: Inert) -> bool:
    data = as_bytes(node.args[0]) if len(node.args) == 1 else None
    if data is None or node.built_by != "reduce" or not _is_bare(node):
        return False
    try:
        parse_storage_stream(data, file=PAYLOAD_FILE)
    except FormatError:
        return False
    return True


def _check_bytes(node: Inert) -> bool:
    if node.built_by != "reduce" or not _is_bare(node):
        return False
    if node.qualname != "encode":
        is_text = len(node.args) == 2 and node.args[1] in _LATIN
        is_copy = len(node.args) == 1 and as_bytes(node.args[0]) is not None
        return not node.args or is_copy or (is_text and isinstance(node.args[0], str))
    return len(node.args) == 2 and isinstance(node.args[0], str) and node.args[1] in _LATIN


def _check_buffer(node: Inert) -> bool:
    if node.kwargs or node.items or node.pairs:
        return False
    state = node.state
    if state is None:
        return len(node.args) == 1 and as_bytes(node.args[0]) is not None
    return (
        not node.args
        and isinstance(state, tuple)
        and len(state) == 3
        and as_bytes(state[0]) is not None
        and type(state[1]) is int
        and _is_empty(state[2])
    )


def _check_array(node: Inert) -> bool:
    if node.built_by != "reduce" or node.kwargs or node.items or node.pairs:
        return False
    args, state = node.args, node.state
    return (
        len(args) == 3
        and is_global(args[0], "numpy.ndarray")
        and args[1] == (0,)
        and (as_bytes(args[2]) in (b"b", b"") or args[2] == "b")
        and (state is None or (isinstance(state, tuple) and 4 <= len(state) <= 5))
    )


def _check_generator(node: Inert) -> bool:
    if node.built_by != "reduce" or node.kwargs or node.items or node.pairs:
        return False
    device = node.args[0] if len(node.args) == 1 else None
    is_device = isinstance(device, Inert) and device.name == "torch.device"
    return is_device and isinstance(node.state, tuple) and len(node.state) == 3


def _check_array_dtype(node: Inert) -> bool:
    if node.built_by != "reduce" or node.kwargs or node.items or node.pairs:
        return False
    args, state = node.args, node.state
    return (
        1 <= len(args) <= 3
        and isinstance(args[0], str)
        and _is_plain(args)
        and (state is None or isinstance(state, tuple))
    )


_CHECKS: dict[GlobalForm, Callable[[Inert], bool]] = {
    GlobalForm.VALUE: _check_value,
    GlobalForm.ENUM: _check_enum,
    GlobalForm.CALL: _check_call,
    GlobalForm.RECORD: _check_record,
    GlobalForm.OBJECT: _check_object,
    GlobalForm.MAPPING: _check_mapping,
    GlobalForm.TENSOR: _check_tensor,
    GlobalForm.PARAMETER: _check_parameter,
    GlobalForm.SUBCLASS: _check_subclass,
    GlobalForm.STORAGE_STREAM: _check_stream,
    GlobalForm.BYTES: _check_bytes,
    GlobalForm.BYTES_IO: _check_buffer,
    GlobalForm.ARRAY: _check_array,
    GlobalForm.ARRAY_DTYPE: _check_array_dtype,
    GlobalForm.GENERATOR: _check_generator,
}
