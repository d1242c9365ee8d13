"""The house rules that a parser can check: sizes, names, docstrings, converters as data."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

CAPS = {"megtool": 600, "converters": 300, "examples": 300, "tests": 650}
FUNCTION_CAP = 120
EMPTY_NAMES = {"utils", "helpers", "common", "base", "manager", "handler", "engine", "wrapper"}
PRINTERS = {"runner.py", "console.py"}

ROOT = Path(__file__).resolve().parent.parent


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", CAPS)
def test_no_file_outgrows_its_cap(folder: str) -> None:
    sizes = {named(path): len(path.read_text().splitlines()) for path in sources(folder)}
    assert {path: size for path, size in sizes.items() if size > CAPS[folder]} == {}


def test_no_function_outgrows_its_cap() -> None:
    sizes = {
        f"{named(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in sources("megtool", "examples")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {where: size for where, size in sizes.items() if size > FUNCTION_CAP} == {}


def test_every_file_begins_with_a_sentence() -> None:
    bad = []
    for path in sources(*CAPS):
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        if not first.endswith((".", "?", ":")):
            bad.append(f"{named(path)}: {first!r}")
    assert bad == []


def test_no_name_says_nothing() -> None:
    paths = [p for folder in CAPS for p in (ROOT / folder).rglob("*")]
    assert [named(p) for p in paths if p.stem.removeprefix("test_") in EMPTY_NAMES] == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether the handler catches everything; to clean up or tell another thread is allowed."""
    match handler.type:
        case None | ast.Name(id="Exception"):
            return True
        case ast.Name(id="BaseException"):
            raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
            return not raises and handler.name is None
    return False


def test_library_code_neither_prints_nor_asserts_nor_catches_everything() -> None:
    bad = []
    for path in sources("megtool", "converters"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{named(path)}:{getattr(node, 'lineno', 0)}"
            match node:
                case ast.Assert():
                    bad.append(f"{where}: assert")
                case ast.Call(func=ast.Name(id="print")) if path.name not in PRINTERS:
                    bad.append(f"{where}: print")
                case ast.ExceptHandler() if swallows(node):
                    bad.append(f"{where}: catches everything")
    assert bad == []


SHARED_CLASS_NAMES: dict[str, str] = {}
"""Public classes that may have the same name in two modules, with the reason."""


def test_every_public_class_has_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources("megtool", "converters"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(named(path))
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert {n: paths for n, paths in shared.items() if n not in SHARED_CLASS_NAMES} == {}
    assert set(SHARED_CLASS_NAMES) <= set(shared)
    assert len(SHARED_CLASS_NAMES) <= 5


VAGUE_NAMES = {
    *("found", "held", "told", "said", "kept", "made", "how", "beside", "at", "one"),
    *("mine", "theirs", "asked", "wanted", "settled", "apart", "taken"),
}
"""Participles, pronouns and adverbs that say nothing of the thing they name."""

ALLOWED_VAGUE_NAMES: dict[str, str] = {}
"""`path: name` of those that are the field's word, with the reason."""


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Parameters, local variables, fields and attributes of `self`, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield node.lineno, name.lstrip("_")


def test_no_name_is_a_participle_or_a_pronoun() -> None:
    vague = [
        f"{named(path)}:{line}: {name}"
        for path in sources("megtool", "converters")
        for line, name in bound_names(ast.parse(path.read_text()))
        if name in VAGUE_NAMES and f"{named(path)}: {name}" not in ALLOWED_VAGUE_NAMES
    ]
    assert vague == []
    assert len(ALLOWED_VAGUE_NAMES) <= 10


MAX_PARAMETERS = 8


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters without self or cls."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(node.args.kwonlyargs)


_PLAN = "the parts of one plan, each computed apart; callers give few of them, by keyword"
_RUN = "one call for a whole run: its inputs and settings, by keyword; only its verb calls it"
_API = "a function of the Python API: its options, by keyword"
_ROW = "a row of a table of fields: its columns, by keyword"
_READ = "what is read of a checkpoint, and for what: each reader gives few of them, by keyword"
_KERNEL = "an operation: tensors and the numbers that go with them, as the kernel behind it takes"

ALLOWED_LONG_LISTS = {
    "megtool/access/checkpoint.py: as_": _API,
    "megtool/access/checkpoint.py: open_checkpoint": _API,
    "megtool/access/checkpoint.py: stream": _API,
    "megtool/access/state_dict.py: load_state_dict": _API,
    "megtool/formats/zarr/layout.py: plan_zarr_layout": _PLAN,
    "megtool/plan/planner.py: build_plan": _PLAN,
    "megtool/inference/generation/text_engine.py: __init__": _API,
    "megtool/inference/generation/text_engine.py: submit": _API,
    "megtool/kernels/vocabulary/cross_entropy.py: linear_cross_entropy": _KERNEL,
    "megtool/kernels/vocabulary/lm_head.py: _fold": _KERNEL,
    "megtool/kernels/vocabulary/token_statistics.py: token_log_probs": _KERNEL,
    "megtool/number_formats/encode.py: encode": _KERNEL,
    "megtool/source/open.py: open_source": _READ,
    "megtool/spec/facts.py: fact": _ROW,
    "megtool/staging/open_stage.py: open_stage": _RUN,
    "megtool/train/features/logits_divergence.py: forward": _KERNEL,
}
"""`path: function` of those that may have more, with the reason."""


def test_no_function_has_too_many_parameters() -> None:
    """Options are grouped in dataclasses; GPU kernels take pointers and sizes one by one."""
    long = {
        f"{named(path)}: {node.name}"
        for path in sources("megtool")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and num_parameters(node) > MAX_PARAMETERS
        and not path.name.endswith("_triton.py")
    }
    assert long == set(ALLOWED_LONG_LISTS)


def test_nothing_passes_its_locals_on() -> None:
    calls = [
        f"{named(path)}:{node.lineno}"
        for path in sources("megtool")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "locals"
    ]
    assert calls == []


def imports_at_module_level(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of the package that a file imports when it is imported itself."""
    targets = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            targets |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names if alias.name in modules}
    return targets & modules.keys()


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules on circles of imports, and between them."""
    left = dict(graph)
    while True:
        targets = set().union(*left.values())
        ends = {n for n, t in left.items() if n not in targets or not t & left.keys() - {n}}
        if not ends:
            return sorted(left)
        left = {name: t for name, t in left.items() if name not in ends}


def test_files_of_a_room_do_not_import_each_other_in_circles() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources("megtool")
    }
    graph = {name: imports_at_module_level(path, modules) for name, path in modules.items()}
    assert cycles(graph) == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert cycles(graph) == ["b", "c"]


CODE = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.comprehension,
    ast.Try,
    ast.With,
)


@pytest.mark.parametrize("path", sources("converters"), ids=lambda path: path.stem)
def test_a_converter_is_data(path: Path) -> None:
    bad = []
    for node in ast.walk(ast.parse(path.read_text())):
        where = getattr(node, "lineno", 0)
        if isinstance(node, CODE):
            bad.append(f"{where}: {type(node).__name__}")
        elif isinstance(node, ast.Import):
            bad.append(f"{where}: import {node.names[0].name}")
        elif isinstance(node, ast.ImportFrom) and (
            node.level or f"{node.module}.".split(".")[:2] != ["megtool", "convert"]
        ):
            bad.append(f"{where}: from {node.module}")
    assert bad == []


_OBJECTS = "objects are uploaded whole, files are written step by step"
_LISTING = "what is asked for ahead in a store costs nothing to ask for later on a disk"
_FOREIGN = "another framework's own storage is used for a path of this machine"

ALLOWED_TO_ASK = {
    "megtool/commands/options/finetune.py": "TensorBoard appends to files",
    "megtool/data/dataset_upload.py": _OBJECTS,
    "megtool/data/token_cache.py": "an object has a version besides its time",
    "megtool/formats/torch_dist/reader.py": _LISTING,
    "megtool/formats/zarr/reader.py": _LISTING,
    "megtool/frameworks/dcp.py": _FOREIGN,
    "megtool/frameworks/megatron_core/training.py": _FOREIGN,
    "megtool/plan/worker.py": "an object under construction is not read back",
    "megtool/quant/calibration/calibration_file_io.py": _OBJECTS,
    "megtool/quant/derive_calibration.py": _OBJECTS,
    "megtool/reshard/written_digests.py": "a store has copied bytes that nobody has read",
    "megtool/train/checkpointing/added_files.py": _OBJECTS,
    "megtool/train/checkpointing/retention.py": "a save on a disk appears whole, with one rename",
    "megtool/train/checkpointing/save.py": "a save on a disk appears whole, with one rename",
    "megtool/train/resume_point.py": "what is above a folder may be a file, or not be writable",
    "megtool/train/run_log.py": _OBJECTS,
}
"""Modules above `storage/` and `staging/` that ask whether a path is in a store, and why."""


def asks_for_store(node: ast.AST) -> bool:
    """Return whether a node is a call of `is_remote`, or of `isinstance` with a path of stores."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id == "isinstance":
        names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
        return bool(names & {"StorePath", "ObjectPath"})
    return node.func.id == "is_remote"


def test_only_storage_and_staging_tell_stores_from_disks() -> None:
    found = {
        named(path)
        for path in sources("megtool", "converters")
        if path.relative_to(ROOT).parts[1] not in ("storage", "staging")
        and any(map(asks_for_store, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == set(ALLOWED_TO_ASK)
