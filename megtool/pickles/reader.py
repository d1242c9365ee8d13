"""Decodes pickles as data, without importing anything they name.

Checkpoints store small values in pickles, and a pickle is a program. Here every class or function
that it names becomes an inert stub that stores its arguments; nothing is imported, called or
executed. `writer.encode` writes such a tree back.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from megtool.errors import FormatError
from megtool.pickles.guard import load_guarded

_MAX_GLOBALS = 4096
_MAX_NAME = 500
_MAX_DEPTH, _MAX_INT_BITS = 200, 4096
_MAX_EXPANDED, _MAX_REPEATS = 2_000_000, 8
"""A value may have so many parts, or so many times those that are stored."""


class Inert:
    """An object that a pickle names and builds, stored as data.

    A *global* (a class, a function, a dtype) is a subclass with `module` and `qualname`; an object
    that the pickle builds from it is an instance. `built_by` is `reduce` for `global(*args)` and
    `new` for `global.__new__(global, *args, **kwargs)`. `state` is restored afterwards (`has_state`
    distinguishes None from no state), `items` are appended or added, `pairs` are set by key.
    """

    __slots__ = ("args", "built_by", "has_state", "items", "kwargs", "pairs", "state")
    module: ClassVar[str] = ""
    qualname: ClassVar[str] = ""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    built_by: str
    state: Any
    has_state: bool
    items: list[Any]
    pairs: list[tuple[Any, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Store the arguments; pickles call this for objects restored without a constructor."""
        self = object.__new__(cls)
        self.args, self.kwargs, self.built_by = args, kwargs, "new"
        self.state, self.has_state = None, False
        self.items, self.pairs = [], []
        return self

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.built_by = "reduce"

    def __setstate__(self, state: Any) -> None:
        if self.has_state:
            raise ValueError(f"{self.name} restores its state twice")
        self.state, self.has_state = state, True

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def append(self, item: Any) -> None:
        """Store one item of a list-like object."""
        self.items.append(item)

    def extend(self, items: list[Any]) -> None:
        """Store items of a list-like object."""
        self.items.extend(items)

    def add(self, item: Any) -> None:
        """Store one item of a set-like object."""
        self.items.append(item)

    @property
    def name(self) -> str:
        """The dotted name in the pickle."""
        return f"{self.module}.{self.qualname}"

    def __repr__(self) -> str:
        return f"<inert {self.name}>"


class PersistentRef:
    """A persistent id in a pickle, and the bytes it refers to once they are attached.

    torch.save refers to tensor data this way: `("storage", class, key, device, numel)`.
    """

    __slots__ = ("data", "id")

    def __init__(self, pid: Any) -> None:
        self.id = pid
        self.data: bytes | None = None

    def __repr__(self) -> str:
        return f"<persistent {self.id!r}>" if isinstance(self.id, str) else "<persistent>"


_HOSTILE = re.compile(
    r"(os|posix|nt|posixpath|ntpath|sys|subprocess|_posixsubprocess|shutil|socket|_socket|ssl|pty|"
    r"runpy|importlib|imp|ctypes|_ctypes|cffi|code|codeop|pdb|bdb|webbrowser|marshal|types|operator|"
    r"_operator|pkgutil|pydoc|inspect|timeit|cProfile|profile|trace|commands|popen2|asyncio|"
    r"multiprocessing|threading|_thread|signal|tempfile|fileinput|http|urllib|ftplib|smtplib|"
    r"telnetlib|xmlrpc|zipimport|zipfile|tarfile|sqlite3|dbm|shelve|pickle|_pickle|dill|cloudpickle|"
    r"joblib|pip|setuptools|distutils|site|ensurepip|venv|gc|weakref|atexit|faulthandler|mmap|fcntl|"
    r"resource|io|_io|torch\.(hub|jit|utils\.cpp_extension|package)|numpy\.(f2py|testing))(\..*)?"
)
_HARMLESS = frozenset(
    {"types.SimpleNamespace", "types.NoneType", "signal.Signals", "io.BytesIO", "_io.BytesIO"}
)
_BUILTINS = frozenset({"builtins", "__builtin__"})
_HARMLESS_BUILTINS = re.compile(
    "bool|bytearray|bytes|complex|dict|float|frozenset|int|list|object|range|set|slice|str|tuple|"
    "type|long|unicode|xrange|NotImplemented|Ellipsis|(Exception|ValueError|TypeError|RuntimeError|KeyError)"
)


@lru_cache(maxsize=_MAX_GLOBALS)
def inert_global(module: str, qualname: str) -> type[Inert]:
    """The stub of `module.qualname`: the same class each time."""
    return type("Inert", (Inert,), {"__slots__": (), "module": module, "qualname": qualname})


def is_global(value: Any, name: str | None = None) -> bool:
    """Whether `value` is a global of a pickle, with this `name` if given."""
    if not (isinstance(value, type) and issubclass(value, Inert)):
        return False
    return name is None or f"{value.module}.{value.qualname}" == name


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        file: str | Path,
        stub_classes: Mapping[tuple[str, str], Any],
        global_names: set[str] | None,
    ) -> None:
        # Buffered, because the C unpickler reads ahead only from files that can peek.
        super().__init__(io.BufferedReader(io.BytesIO(data), 1 << 16))
        self._file = file
        self._stub_classes = stub_classes
        self._num_globals = 0
        self._global_names = global_names

    def find_class(self, module: str, name: str) -> Any:
        self._num_globals += 1
        if self._num_globals > _MAX_GLOBALS or len(module) + len(name) > _MAX_NAME:
            raise FormatError(
                f"pickle names too many or too long globals, such as {module[:60]!r}",
                file=self._file,
                error_id="hostile-pickle",
            )
        if f"{module}.{name}" not in _HARMLESS and (
            _HOSTILE.fullmatch(module)
            or (module in _BUILTINS and not _HARMLESS_BUILTINS.fullmatch(name))
        ):
            raise FormatError(
                f"pickle names {module}.{name}, which no checkpoint needs: refused as hostile",
                file=self._file,
                hint="nothing was executed; do not load this file with other tools",
                error_id="hostile-pickle",
            )
        if self._global_names is not None:
            self._global_names.add(f"{module}.{name}")
        stub = self._stub_classes.get((module, name))
        return inert_global(module, name) if stub is None else stub

    def persistent_load(self, pid: Any) -> Any:
        return PersistentRef(pid)


def decode(
    data: bytes,
    *,
    file: str | Path,
    stub_classes: Mapping[tuple[str, str], Any] | None = None,
    global_names: set[str] | None = None,
) -> Any:
    """The tree in a pickle: plain Python values, `Inert` and `Persistent` nodes.

    `stub_classes` are the caller's classes for some `(module, name)`; they must be harmless for any
    arguments and state. `global_names` receives the dotted name of every global.

    Raises:
        FormatError: the pickle is damaged, too large, or names something hostile.
    """
    unpickler = _Unpickler(data, file, stub_classes or {}, global_names)
    try:
        return load_guarded(unpickler.load, data, file=file)
    except FormatError:
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        MemoryError,
        RuntimeError,
        BufferError,
        OSError,
    ) as e:
        reason = str(e) or type(e).__name__
        raise FormatError(f"it is not a readable pickle: {reason[:200]}", file=file) from e


_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
_DICTS = frozenset({"collections.OrderedDict", "collections.defaultdict"})
_SETS = frozenset(f"{m}.{s}" for m in _BUILTINS for s in ("set", "frozenset"))


def to_plain(tree: Any, *, file: str | Path = "") -> Any:
    """The tree with well-known nodes converted to plain values.

    Namespaces and ordered dicts become dicts, `torch.Size` a tuple, dtypes and other globals their
    dotted name, paths strings, encoded bytes bytes, sets lists. Other nodes stay `Inert` (an enum
    member is `Inert` with its value in `args`). Shared parts stay shared.

    Raises:
        FormatError: the tree contains itself, is too deep, or is too large written out.
    """
    try:
        out = _convert(tree, {})
    except (RecursionError, TypeError) as e:
        raise FormatError(f"pickled tree has no plain form: {e}", file=file) from e
    check_expansion(out, file=file)
    return out


def check_expansion(tree: Any, *, file: str | Path) -> None:
    """Refuse a tree that is large once it is compared, printed or written, however few its parts.

    Lists of lists that share their parts double in size with each level, which a pickle says in a
    few bytes.

    Raises:
        FormatError: lists, tuples and dicts contain themselves, are too deep or too large, or an
            integer is longer than any setting.
    """
    problem = _find_expansion(tree)
    if problem:
        raise FormatError(
            f"a stored value {problem}",
            file=file,
            hint="no program writes such checkpoints: the file is damaged or made to harm",
            error_id="hostile-pickle",
        )


def _find_expansion(tree: Any) -> str:
    sizes: dict[int, tuple[int, int]] = {}
    open_: set[int] = set()
    num_parts = 0
    stack: list[tuple[Any, bool]] = [(tree, False)]
    while stack:
        node, is_left = stack.pop()
        if isinstance(node, int):
            if node.bit_length() > _MAX_INT_BITS:
                return f"is an integer of {node.bit_length():,} bits"
            continue
        if not isinstance(node, dict | list | tuple | set | frozenset | Inert):
            continue
        key = id(node)
        parts: Sequence[Any]
        if (pairs := dict_items(node)) is not None:
            parts = [part for pair in pairs for part in pair]
        elif isinstance(node, Inert):
            # Its parts do not count as its own: objects may refer to their parents.
            if key not in sizes:
                sizes[key] = 1, 0
                stack.extend((part, False) for part in _parts_of(node))
            continue
        else:
            parts = list(node)
        if is_left:
            inner = [sizes.get(id(part), (1, 0)) for part in parts]
            size = 1 + sum(count for count, _ in inner)
            depth = 1 + max((depth for _, depth in inner), default=0)
            if depth > _MAX_DEPTH:
                return f"is more than {_MAX_DEPTH} levels deep"
            if size > max(_MAX_EXPANDED, _MAX_REPEATS * num_parts):
                return f"has more than {_MAX_EXPANDED:,} parts, as it repeats shared ones"
            sizes[key] = size, depth
            open_.discard(key)
        elif key in open_:
            return "contains itself"
        elif key not in sizes:
            open_.add(key)
            num_parts += len(parts)
            stack.append((node, True))
            stack.extend((part, False) for part in parts)
    return ""


def _parts_of(node: Inert) -> Iterator[Any]:
    yield from (*node.args, *node.kwargs.values(), *node.items, node.state)
    for pair in node.pairs:
        yield from pair


def _convert(node: Any, done: dict[int, Any]) -> Any:
    if node is None or isinstance(node, str | bytes | int | float | PersistentRef):
        return node
    if is_global(node):
        return f"{node.module}.{node.qualname}"
    key = id(node)
    if key in done:
        return done[key]
    out: Any
    if isinstance(node, dict):
        out = {_convert(k, done): _convert(v, done) for k, v in node.items()}
    elif isinstance(node, list | set | frozenset):
        out = [_convert(x, done) for x in node]
    elif isinstance(node, tuple):
        out = tuple(_convert(x, done) for x in node)
    elif isinstance(node, Inert):
        out = _convert_inert(node, done)
    else:
        out = node
    done[key] = out
    return out


def _convert_inert(node: Inert, done: dict[int, Any]) -> Any:
    if node.name in _NAMESPACES:
        return _convert(node.state if isinstance(node.state, dict) else {}, done)
    if node.name in _DICTS:
        first = node.args[-1] if node.args and isinstance(node.args[-1], list | dict) else []
        pairs = list(first.items()) if isinstance(first, dict) else [tuple(p) for p in first]
        return {_convert(k, done): _convert(v, done) for k, v in [*pairs, *node.pairs]}
    if node.name == "torch.Size" and len(node.args) == 1:
        return tuple(_convert(node.args[0], done))
    if node.name in _SETS:
        return [_convert(x, done) for x in (*(node.args[0] if node.args else ()), *node.items)]
    if node.module in ("pathlib", "pathlib._local") and all(isinstance(a, str) for a in node.args):
        return str(PurePosixPath(*node.args))
    encoded = as_bytes(node)
    return node if encoded is None else encoded


def as_bytes(node: Any) -> bytes | None:
    """The bytes of a node (old protocols write them as encoded text); None for other nodes."""
    if isinstance(node, bytes | bytearray):
        return bytes(node)
    is_text = isinstance(node, Inert) and node.name == "_codecs.encode" and node.args
    if not is_text or not isinstance(node.args[0], str):
        return None
    try:
        return node.args[0].encode("latin1")
    except UnicodeEncodeError:
        return None


def find_references(tree: Any) -> list[PersistentRef]:
    """All persistent references of a tree, each once, in order of appearance."""
    references: list[PersistentRef] = []
    visited: set[int] = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, str | bytes | int | float) or node is None or id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, PersistentRef):
            references.append(node)
        elif isinstance(node, dict):
            stack.extend(x for pair in reversed(node.items()) for x in reversed(pair))
        elif isinstance(node, list | tuple):
            stack.extend(reversed(node))
        elif isinstance(node, set | frozenset):
            stack.extend(node)
        elif isinstance(node, Inert):
            inner = [*node.args, *node.kwargs.values(), *node.items]
            inner += [x for pair in node.pairs for x in pair]
            stack.extend(reversed([*inner, node.state]))
    return references


def dict_items(node: Any) -> list[tuple[Any, Any]] | None:
    """Items of a dict, an inert `OrderedDict` or `defaultdict`; None for anything else."""
    if isinstance(node, dict):
        return list(node.items())
    if not isinstance(node, Inert) or node.name not in _DICTS:
        return None
    first = node.args[-1] if node.args else None
    if isinstance(first, dict):
        return [*first.items(), *node.pairs]
    if isinstance(first, list) and all(isinstance(p, tuple | list) and len(p) == 2 for p in first):
        return [*((k, v) for k, v in first), *node.pairs]
    return list(node.pairs)


def string_items(node: Any) -> dict[str, Any]:
    """The entries of a dictionary whose keys are strings; empty if `node` is no dictionary."""
    return {k: v for k, v in dict_items(node) or () if isinstance(k, str)}


def rebuild_dict(node: Any, pairs: Iterable[tuple[Any, Any]]) -> Any:
    """A dictionary of the same class as `node` with the entries `pairs`."""
    if not isinstance(node, Inert):
        return dict(pairs)
    args = node.args[:-1] if node.args and isinstance(node.args[-1], dict | list) else node.args
    out = type(node).__new__(type(node), *args, **node.kwargs)
    out.built_by, out.pairs = node.built_by, list(pairs)
    if node.has_state:
        out.__setstate__(node.state)
    return out
