"""Hostile pickles by the hundred: values, places to nest them, and checkpoints that hold them.

A value is opcodes that push one object: a global that is named, called, built or smuggled in. It
is put into the pickles of a sound checkpoint opcode by opcode, so no pickle here is ever loaded.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.pickles import reader as pickle_reader
from megtool.pickles.writer import encode

_NAMES = """
os:system posix:system nt:system subprocess:Popen subprocess:check_output pty:spawn
builtins:eval builtins:exec builtins:__import__ builtins:getattr builtins:open builtins:print
builtins:compile builtins:map builtins:setattr __builtin__:eval __builtin__:apply
codecs:open codecs:decode pathlib:Path.unlink pathlib:Path.write_text importlib:import_module
runpy:run_path runpy:_run_code pickle:loads _pickle:loads _pickle:Unpickler marshal:loads
types:FunctionType types:CodeType types:MethodType functools:partial functools:reduce
operator:attrgetter operator:methodcaller itertools:starmap copyreg:_reconstructor
copyreg:__newobj__ copy_reg:_reconstructor ctypes:CDLL shutil:rmtree socket:create_connection
webbrowser:open pydoc:pipepager pdb:run bdb:Bdb.run timeit:timeit cProfile:run doctest:debug
doctest:debug_script code:InteractiveInterpreter idlelib.pyshell:ModifiedInterpreter
lib2to3.pgen2.grammar:Grammar.loads logging.config:listen platform:popen linecache:getline
base64:b64decode zlib:decompress bz2:open gzip:open tarfile:open zipimport:zipimporter
ast:literal_eval inspect:getsource cgitb:enable concurrent.futures:ThreadPoolExecutor
multiprocessing.util:spawnv_passfds asyncio.unix_events:_UnixSubprocessTransport._start
test.support.script_helper:assert_python_ok ensurepip:_run_pip venv:create
uuid:_get_command_stdout smtplib:SMTP urllib.request:urlopen http.client:HTTPConnection
torch:load torch:save torch:compile torch:ops torch.serialization:load torch.serialization:_load
torch.hub:load torch.jit:load torch.package:PackageImporter torch.fx:Interpreter
torch.fx.graph_module:reduce_graph_module torch.fx.graph_module:_exec_with_source
torch.utils.cpp_extension:load_inline torch.utils._config_module:load_config
torch.utils.data.datapipes.utils.decoder:basichandlers torch.storage:_from_buffer
torch.distributed.run:main torch._inductor.codecache:compile_file torch.nn:Module
torch._utils:_rebuild_wrapper_subclass torch._utils:_import_dotted_name torch:Tensor.apply_
torch.distributed.checkpoint.metadata:Evil torch.nn.modules.linear:Linear
numpy:load numpy:fromfile numpy.distutils.exec_command:exec_command numpy.f2py:run_main
numpy.testing._private.utils:runstring numpy.ctypeslib:load_library numpy:memmap
numpy.core.multiarray:fromfile numpy:frompyfunc numpy.lib.npyio:load
megatron.core.enums:ModelType.__class__ megatron.core.utils:safely_import
megatron.core.transformer.enums:os megatron.training.checkpointing:load_checkpoint
transformer_engine.common.recipe:exec transformer_engine:load_framework_extension
modelopt.torch.opt:restore yaml:unsafe_load dill:loads joblib:load cloudpickle:loads
cloudpickle.cloudpickle:_make_function jinja2:Template pandas:read_pickle sys:exit
deepspeed.runtime.engine:DeepSpeedEngine omegaconf:OmegaConf.load mycompany:Settings
fractions:Fraction decimal:Decimal random:Random threading:Thread signal:signal
collections:namedtuple enum:Enum argparse:ArgumentParser datetime:os.system
"""
HOSTILE_GLOBALS = tuple(
    (pair.rpartition(":")[0], pair.rpartition(":")[2]) for pair in _NAMES.split()
)
"""Classes and functions that no checkpoint needs, as `module:qualname`."""


def text(value: str) -> bytes:
    """The opcode of a string."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def blob(value: bytes) -> bytes:
    """The opcode of bytes (protocol 3)."""
    return b"B" + struct.pack("<I", len(value)) + value


def name(module: str, qualname: str) -> bytes:
    """A global by its text."""
    return f"c{module}\n{qualname}\n".encode()


def stacked(module: str, qualname: str) -> bytes:
    """A global by two strings on the stack (protocol 4)."""
    parts = (module.encode(), qualname.encode())
    return b"".join(b"\x8c" + bytes((len(p),)) + p for p in parts) + b"\x93"


_COMMAND = text("touch pwned")

FORMS: dict[str, Callable[[str, str], bytes]] = {
    "global": name,
    "stack_global": stacked,
    "reduce": lambda m, q: name(m, q) + _COMMAND + b"\x85R",
    "stack_reduce": lambda m, q: stacked(m, q) + _COMMAND + b"\x85R",
    "newobj": lambda m, q: name(m, q) + _COMMAND + b"\x85\x81",
    "newobj_ex": lambda m, q: name(m, q) + b")}" + text("shell") + b"\x88s\x92",
    "build": lambda m, q: name(m, q) + b")R}" + text("cmd") + _COMMAND + b"sb",
    "inst": lambda m, q: b"(" + _COMMAND + f"i{m}\n{q}\n".encode(),
    "obj": lambda m, q: b"(" + name(m, q) + _COMMAND + b"o",
    "items": lambda m, q: name(m, q) + b")R(" + _COMMAND + b"e",
    "pairs": lambda m, q: name(m, q) + b")R" + _COMMAND + b"Ns",
}
"""How a pickle uses a global."""

TORCH_LOAD = name("torch", "load")
_CALL = TORCH_LOAD + _COMMAND + b"\x85R"
_ORDERED = name("collections", "OrderedDict")
_REBUILD = name("torch._utils", "_rebuild_tensor_v2")


def pickled(value: bytes, protocol: int = 2) -> bytes:
    """A whole pickle of one value."""
    return b"\x80" + bytes((protocol,)) + value + b"."


def zipped(value: bytes) -> bytes:
    """A file of torch.save whose pickle pushes the value."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as z:
        z.writestr("archive/data.pkl", pickled(value))
        z.writestr("archive/version", b"3\n")
    return out.getvalue()


NESTINGS: dict[str, Callable[[bytes], bytes]] = {
    "bare": lambda v: v,
    "list": lambda v: b"](" + v + b"e",
    "tuple": lambda v: v + v + v + b"\x87",
    "value": lambda v: b"}" + text("k") + v + b"s",
    "key": lambda v: b"}" + v + b"Ns",
    "deep": lambda v: b"](" + b"}" + text("k") + b"](" + v + b"\x85ese",
    "set": lambda v: name("builtins", "set") + b"](" + v + b"e\x85R",
    "namespace": lambda v: name("argparse", "Namespace") + b")\x81}" + text("a") + v + b"sb",
    "simple namespace": lambda v: name("types", "SimpleNamespace") + b")R}" + text("a") + v + b"sb",
    "ordered": lambda v: _ORDERED + b")R" + text("k") + v + b"s",
    "state of an ordered dict": lambda v: _ORDERED + b")R}" + text("k") + v + b"sb",
    "recipe": lambda v: (
        name("transformer_engine.common.recipe", "DelayedScaling")
        + b")\x81}"
        + text("amax_compute_algo")
        + v
        + b"sb"
    ),
    "pickle in bytes": lambda v: blob(pickled(v)),
    "old pickle in bytes": lambda v: blob(v + b"."),
    "damaged pickle in bytes": lambda v: blob(pickled(v) + b"\0\0"),
    "pickle in encoded text": lambda v: (
        name("_codecs", "encode") + text(pickled(v).decode("latin1")) + text("latin1") + b"\x86R"
    ),
    "pickle in a buffer": lambda v: (
        name("_io", "BytesIO") + b")\x81(" + blob(pickled(v)) + b"K\0Ntb"
    ),
    "zip in a buffer": lambda v: name("_io", "BytesIO") + b")\x81(" + blob(zipped(v)) + b"K\0Ntb",
    "pickle in a pickle in bytes": lambda v: blob(pickled(blob(pickled(v)))),
}
"""Where a value is put. Those called `damaged` run what they name before they fail."""

MISUSES: dict[str, bytes] = {
    "a factory": name("collections", "defaultdict") + TORCH_LOAD + b"\x85R",
    "a harmless factory that calls": name("collections", "defaultdict")
    + name("torch._utils", "_rebuild_tensor_v2")
    + b"\x85R",
    "a dtype that is called": name("torch", "bfloat16") + _COMMAND + b"\x85R",
    "a storage of a petabyte": name("torch.storage", "UntypedStorage")
    + b"\x8a\x08\0\0\0\0\0\0\x04\0\x85R",
    "a byte array of a petabyte": name("builtins", "bytearray")
    + b"\x8a\x08\0\0\0\0\0\0\x04\0\x85R",
    "a subclass made by any function": name("torch._tensor", "_rebuild_from_type_v2")
    + b"("
    + TORCH_LOAD
    + name("torch", "Tensor")
    + _COMMAND
    + b"\x85}tR",
    "a tensor with hooks": _REBUILD
    + b"(("
    + text("storage")
    + name("torch", "FloatStorage")
    + text("0")
    + text("cpu")
    + b"K\0tQK\0K\0\x85K\1\x85\x89"
    + _ORDERED
    + b")RK\0"
    + TORCH_LOAD
    + b"stR",
    "an old stream that is no storage": name("torch.storage", "_load_from_bytes")
    + blob(pickled(_CALL))
    + b"\x85R",
    "an old stream with a class": name("torch.storage", "_load_from_bytes")
    + blob(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}." + pickled(_CALL))
    + b"\x85R",
    "an array of another class": name("numpy.core.multiarray", "_reconstruct")
    + name("mycompany", "Array")
    + b"K\0\x85"
    + text("b")
    + b"\x87R",
    "an array of objects": name("numpy._core.multiarray", "_reconstruct")
    + name("numpy", "ndarray")
    + b"K\0\x85"
    + text("b")
    + b"\x87R(K\1K\1\x85"
    + name("numpy", "dtype")
    + text("O8")
    + b"\x89\x88\x87R\x89]"
    + _CALL
    + b"atb",
    "text in a codec": name("_codecs", "encode") + text("a") + text("zlib") + b"\x86R",
    "an enum of a call": name("megatron.core.enums", "ModelType") + _CALL + b"\x85R",
    "a namespace that is called": name("argparse", "Namespace") + _CALL + b"\x85R",
    "a namespace with slots": name("argparse", "Namespace") + b")\x81" + _CALL + b"b",
    "a path that is a call": name("pathlib", "PosixPath") + _CALL + b"\x85R",
    "a device that is a call": name("torch", "device") + _CALL + b"\x85R",
    "a size that is a call": name("torch", "Size") + _CALL + b"\x85R",
    "a layout that is a call": name("torch.serialization", "_get_layout") + _CALL + b"\x85R",
    "a function that is called": name("torch.nn.functional", "gelu") + _COMMAND + b"\x85R",
    "an extension": b"\x82\x01",
    "a wide extension": b"\x84\x01\0\0\0",
    "a persistent id": _CALL + b"Q",
}
"""Values that name allowed globals in ways that no checkpoint does, or nest what is hostile."""


def hostile_values() -> Iterator[tuple[str, bytes]]:
    """Every hostile value with its id: all globals in some form, one in all forms and places."""
    forms = list(FORMS.items())
    for number, (module, qualname) in enumerate(HOSTILE_GLOBALS):
        for shift in (0, 4):
            form, make = forms[(number + shift) % len(forms)]
            yield f"{form} of {module}.{qualname}", make(module, qualname)
    for form, make in FORMS.items():
        for place, nest in NESTINGS.items():
            for module, qualname in (("torch.serialization", "load"), ("mycompany", "Settings")):
                yield f"{form} of {module}.{qualname}, {place}", nest(make(module, qualname))
    for title, value in MISUSES.items():
        for place in ("bare", "namespace", "pickle in bytes"):
            yield f"{title}, {place}", NESTINGS[place](value)


# ---- checkpoints that hold them


def add_entry(data: bytes, value: bytes, key: str = "evil") -> bytes:
    """A pickle of a dict with one more entry."""
    return data[:-1] + text(key) + value + b"s."


def add_attribute(data: bytes, value: bytes, key: str = "evil") -> bytes:
    """A pickle of a dict with one more attribute of the namespace `args` in it."""
    tree = pickle_reader.decode(data, file="source")
    args = encode(tree["args"])[2:-1]  # ends with the state's dict, then BUILD
    return data[:-1] + text("args") + args[:-1] + text(key) + value + b"sbs."


def edit_zip(data: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """A file of torch.save with its pickle edited."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new,
    ):
        for member in old.namelist():
            with old.open(member) as f:
                f._expected_crc = None  # type: ignore[attr-defined]  # zero where torch ignores it
                content = f.read()
            new.writestr(member, edit(content) if member.endswith("data.pkl") else content)
    return out.getvalue()


def replace_object(folder: Path, key: str, item: bytes) -> None:
    """Put another item in the place of an object of a torch.distributed checkpoint."""
    file = folder / ".metadata"
    tree = pickle_reader.decode(file.read_bytes(), file=file)
    for index, info in tree.state["storage_data"].items():
        if index.state["fqn"] == key:
            data = folder / info.state["relative_path"]
            info.state |= {"offset": data.stat().st_size, "length": len(item)}
            data.write_bytes(data.read_bytes() + item)
            file.write_bytes(encode(tree))
            return
    raise KeyError(key)


def objects_of(folder: Path) -> list[str]:
    """The names of the objects of a torch.distributed checkpoint."""
    tree = pickle_reader.decode((folder / ".metadata").read_bytes(), file="source")
    return [
        key
        for key, value in tree.state["state_dict_metadata"].items()
        if value.qualname == "BytesStorageMetadata"
    ]


def byte_tensor(payload: bytes) -> bytes:
    """A file of torch.save with a list of one tensor of bytes, as extra states are saved."""
    count = len(payload)
    size = struct.pack("<i", count)
    value = (
        b"]"
        + _REBUILD
        + b"(("
        + text("storage")
        + name("torch", "ByteStorage")
        + text("0")
        + text("cpu")
        + b"J"
        + size
        + b"tQK\0J"
        + size
        + b"\x85K\1\x85\x89"
        + _ORDERED
        + b")RtRa"
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as z:
        z.writestr("archive/data.pkl", pickled(value))
        z.writestr("archive/data/0", payload)
        z.writestr("archive/version", b"3\n")
    return out.getvalue()


def listed(value: bytes) -> bytes:
    """A file of torch.save with a list of one value, as objects are saved."""
    return zipped(b"]" + value + b"a")


def _in_zip(pattern: str, edit: Callable[[bytes, bytes], bytes]) -> Callable[[Path, bytes], None]:
    def patch(root: Path, value: bytes) -> None:
        file = sorted(root.rglob(pattern))[0]
        file.write_bytes(edit_zip(file.read_bytes(), lambda data: edit(data, value)))

    return patch


def _in_object(make: Callable[[bytes], bytes], part: str) -> Callable[[Path, bytes], None]:
    def patch(root: Path, value: bytes) -> None:
        folder = next(root.rglob(".metadata")).parent
        key = next(n for n in objects_of(folder) if part in n)
        replace_object(folder, key, make(value))

    return patch


def _in_metadata(edit: Callable[[bytes, bytes], bytes]) -> Callable[[Path, bytes], None]:
    def patch(root: Path, value: bytes) -> None:
        file = next(root.rglob(".metadata"))
        file.write_bytes(edit(file.read_bytes(), value))

    return patch


def _planner_data(data: bytes, value: bytes) -> bytes:
    """The root of `.metadata` with positions in a state dict that are the value."""
    return data[:-2] + text("planner_data") + b"}" + text("x") + value + b"\x85ssb."


def _as_new_file(path: str, make: Callable[[bytes], bytes]) -> Callable[[Path, bytes], None]:
    def patch(root: Path, value: bytes) -> None:
        folder = next(root.rglob("metadata.json")).parent
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(make(value))

    return patch


PLACES: dict[str, dict[str, Callable[[Path, bytes], None]]] = {
    "torch_dist": {
        "common.pt": _in_zip("common.pt", add_entry),
        "args": _in_zip("common.pt", add_attribute),
        "an object": _in_object(listed, "_extra_state"),
        "an extra state's bytes": _in_object(lambda v: byte_tensor(pickled(v)), "_extra_state"),
        "an extra state's zip": _in_object(lambda v: byte_tensor(zipped(v)), "_extra_state"),
        "an extra state's buffer": _in_object(
            lambda v: listed(NESTINGS["zip in a buffer"](v)), "_extra_state"
        ),
        "random state": _in_object(listed, "rng_state"),
        ".metadata": _in_metadata(lambda data, v: data[:-2] + text("evil") + v + b"sb."),
        "planner data": _in_metadata(_planner_data),
        "train_state.pt": _as_new_file("train_state.pt", zipped),
        "modelopt_state": _as_new_file(
            "modelopt_state/common.pt", lambda v: zipped(b"}" + text("a") + v + b"s")
        ),
        "a file of NeMo": _as_new_file("context/0b2c.bin", pickled),
        "a file of the tokenizer": _as_new_file("tokenizer/extra.pkl", pickled),
    },
    "megatron": {
        "a rank file": _in_zip("model_optim_rng.pt", add_entry),
        "args": _in_zip("model_optim_rng.pt", add_attribute),
        "random state": _in_zip(
            "model_optim_rng.pt",
            lambda data, v: add_entry(data, b"]" + v + b"a", "rng_state"),
        ),
    },
    "dcp": {
        "an object": _in_object(listed, "rng_state"),
        ".metadata": _in_metadata(lambda data, v: data[:-2] + text("evil") + v + b"sb."),
        "planner data": _in_metadata(_planner_data),
    },
    "zarr": {
        "common.pt": _in_zip("common.pt", add_entry),
        "args": _in_zip("common.pt", add_attribute),
        "an object": lambda root, value: next((root / "objects").rglob("*.pt")).write_bytes(
            listed(value)
        ),
    },
}
"""Where a value is put into a checkpoint of each format, as `patch(folder, value)`."""


@dataclass(frozen=True, slots=True)
class HostileVariant:
    """A sound checkpoint of a `kind`, made hostile by `patch(folder)`."""

    id: str
    kind: str
    patch: Callable[[Path], None]


def hostile_variants(kind: str, *, every: int = 1) -> Iterator[HostileVariant]:
    """Hostile variants of a checkpoint of a kind: every `every`-th value, in all places in turn."""
    places = list(PLACES[kind].items())
    for number, (title, value) in enumerate(hostile_values()):
        if number % every:
            continue
        place, patch = places[number // every % len(places)]

        def apply(
            folder: Path, patch: Callable[[Path, bytes], None] = patch, value: bytes = value
        ) -> None:
            patch(folder, value)

        yield HostileVariant(f"{title} in {place}", kind, apply)


# ---- what a folder's pickles name

_NAME = re.compile(r"[^\W\d][\w.]*")
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")


def named_globals(data: bytes) -> set[tuple[str, str]]:
    """All globals that pickles anywhere in the bytes name, also in members, items and text."""
    out: set[tuple[str, str]] = set()
    for start in re.finditer(rb"\x80[\2-\5]", data):
        strings: list[str] = []
        try:
            for opcode, argument, _ in pickletools.genops(data[start.start() :]):
                pair: tuple[str, str] | None = None
                if opcode.name in ("GLOBAL", "INST"):
                    module, _, qualname = str(argument).partition(" ")
                    pair = module, qualname
                elif opcode.name == "STACK_GLOBAL" and len(strings) > 1:
                    pair = strings[-2], strings[-1]
                elif opcode.name in _STRINGS:
                    strings.append(str(argument))
                    if "\x80" in argument:
                        out |= named_globals(argument.encode("latin1", "ignore"))
                if pair and all(map(_NAME.fullmatch, pair)):
                    out.add(pair)
        except (ValueError, LookupError, OverflowError):
            continue
    return out


def globals_in(path: Path) -> set[tuple[str, str]]:
    """All globals that pickles in a file, or in the files of a folder, name."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {pair for file in files for pair in named_globals(file.read_bytes())}


def as_tree(value: bytes) -> Any:
    """A value as the reader decodes it.

    Raises:
        FormatError: the reader refuses it.
    """
    return pickle_reader.decode(pickled(value, 4), file="hostile")
