"""What a user names may be in a store: no code takes it for a local path."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

STORAGE = "storage/"
"""The room that knows which storage it has."""

LOCAL = {
    # Folders that megtool makes itself.
    ("formats/gguf/tokenizer.py", "Path(folder)"),
    ("formats/zarr/ocdbt_listing.py", "Path(folder)"),
    ("staging/store/spooled.py", "Path(self._folder.name)"),
    ("commands/demo.py", "Path(place)"),
    ("commands/demo.py", "Path(temporary)"),
    ("data/token_cache.py", "Path(folder)"),
    ("data/tokenizer.py", "Path(folder)"),
    ("data/tokenizer.py", "Path(folder, name)"),
    ("export/gguf/header.py", "Path(folder)"),
    ("export/gguf/importance.py", "Path(folder)"),
    # Files of Python, and names inside a checkpoint.
    ("formats/deepspeed/files.py", "Path(path)"),
    ("formats/deepspeed/partitions.py", "Path(file.stored.path)"),
    ("formats/megatron_legacy/rank_file.py", "Path(path)"),
    ("formats/zarr/layout.py", "Path(t.name)"),
    ("cli/reference.py", "Path(spec.origin)"),
    ("quantize/finalize.py", "Path(sys.argv[0])"),
    ("quant/recipes/dialect_modelopt.py", "Path(p)"),
    # Local where the code before has asked.
    ("staging/folder/place.py", "Path(os.path.realpath(destination))"),
    ("staging/destination/check.py", "Path(os.path.realpath(source))"),
    ("staging/destination/check.py", "Path(os.path.realpath(path))"),
    ("staging/left_overs.py", "Path(os.path.realpath(location))"),
    ("data/dataset_writer.py", "Path(os.path.realpath(self.prefix))"),
    ("train/checkpointing/save.py", "Path(os.path.realpath(self.folder))"),
}
"""Every path that is made of a text and never of a location; anything else is `location(...)`."""

SYSTEM_CALLS = {
    "staging/folder/place.py": {"os.path.realpath"},
    "staging/destination/check.py": {"os.path.realpath", "os.access"},
    "formats/zarr/reader.py": {"os.scandir"},
    "staging/left_overs.py": {"os.path.realpath"},
    "staging/nested_runs.py": {"os.scandir"},
    "process/child.py": {"open"},
    "cli/import_guard.py": {"open"},
    "commands/demo.py": {"os.open"},
    "console.py": {"open", "os.open"},
    "data/dataset_writer.py": {"os.path.realpath"},
    "data/token_cache.py": {"np.memmap"},
    "train/resume_point.py": {"os.access", "os.path.exists"},
    "train/checkpointing/save.py": {"os.path.realpath"},
}
"""Who asks the system about names, which it knows to be local."""

CALLS = {
    *("open", "np.memmap", "os.access", "os.listdir", "os.lstat", "os.open", "os.scandir"),
    *("os.stat", "os.walk", "os.path.exists", "os.path.isdir", "os.path.isfile"),
    *("os.path.realpath", "shutil.copy", "shutil.copytree"),
}


def find_calls(code: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each call with an argument that is no constant."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and node.args:
            values = [a for a in node.args if not isinstance(a, ast.Constant)]
            if values:
                yield ast.unparse(node.func), ast.unparse(node)


def find_faults(file: str, code: str) -> list[str]:
    faults = []
    for name, text in find_calls(code):
        if (name == "Path" and (file, text) not in LOCAL) or name in CALLS - SYSTEM_CALLS.get(
            file, set()
        ):
            faults.append(f"{file}: {text}")
    return faults


def test_no_location_becomes_a_local_path(checkout: Path) -> None:
    package = checkout / "megtool"
    faults, seen = [], set()
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if not file.startswith(STORAGE):
            code = path.read_text()
            faults += find_faults(file, code)
            seen |= {(file, text) for name, text in find_calls(code) if name == "Path"}
    assert faults == []
    assert LOCAL - seen == set()


@pytest.mark.parametrize(
    "code", ["Path(options.source)", "open(path)", "os.stat(path)", "np.memmap(path, mode='r')"]
)
def test_a_local_path_is_found(code: str) -> None:
    assert find_faults("commands/verify.py", f"def f():\n    return {code}\n")


@pytest.mark.parametrize("code", ["location(path)", "Path('/proc/meminfo')", "path.open()"])
def test_what_is_right_passes(code: str) -> None:
    assert find_faults("commands/verify.py", f"def f():\n    return {code}\n") == []
