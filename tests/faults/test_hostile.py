"""Hostile input R6-R9: headers, pickles, zips and paths end in one typed error, nothing done."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import inspect, reshard, verify
from megtool.cli.app import main
from megtool.errors import FormatError, MappingError
from tests.support.checkpoints.damage import (
    DATA_FILES,
    DIGESTED,
    FORMATS,
    SMALL,
    attempt,
    files_of,
    put,
)
from tests.support.folders import contents, staging_folders, stored_tensors
from tests.support.models import tiny_llama

# ---- R6, R7, R8: hostile headers, pickles and zips


def hostile_headers() -> dict[str, bytes]:
    def frame(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text

    def one(dtype: str, shape: str, offsets: str) -> bytes:
        entry = f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'
        return frame(f'{{"lm_head.weight":{entry}}}'.encode())

    return {
        "length of 2**63": (1 << 63).to_bytes(8, "little") + b"{}",
        "overflow": one("F32", f"[{1 << 40},{1 << 40}]", "[0,0]"),
        "negative": one("F32", "[-1]", "[0,4]"),
        "unknown dtype": one("F13", "[1]", "[0,4]"),
        "reversed": one("F32", "[1]", "[4,0]"),
        "nan": one("F32", "[NaN]", "[0,4]"),
        "deep": frame(b"[" * 100_000),
        "duplicate": frame(b'{"a":1,"a":2}'),
        "not text": frame(b'{"\xff":1}'),
        "empty": b"",
    }


HEADERS = hostile_headers()


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    original = tiny_llama.save(tmp_path / "hf", **SMALL)
    (original / "model.safetensors").write_bytes(HEADERS[case])
    error = attempt(original, to="torch_dist")
    assert isinstance(error, FormatError)
    assert str(original) in (error.file or "")
    assert staging_folders(tmp_path) == []


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


PICKLES = {
    "system": pickle.dumps(Call(os.system, "touch pwned"), protocol=2),
    "eval": pickle.dumps(Call(eval, "1"), protocol=2),
    "open": pickle.dumps(Call(open, "/etc/passwd"), protocol=2),
    "getattr": b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x01\0\0\0a\x86R.",
    "import": b"\x80\x02csubprocess\nPopen\nX\x04\0\0\0true\x85R.",
    "memo bomb": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "noise": bytes(range(256)),
}


def replace_pickle(file: Path, data: bytes) -> None:
    """Put another pickle into a zip that torch wrote."""
    with zipfile.ZipFile(file) as z:
        members = {n: z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as z:
        for name, old in members.items():
            z.writestr(name, data if name.endswith("data.pkl") else old)


@pytest.mark.parametrize("place", [".metadata", "common.pt"])
@pytest.mark.parametrize("case", PICKLES)
def test_nothing_a_pickle_names_is_run(
    copied: Callable[[str], Path], audit: Any, case: str, place: str
) -> None:
    path = copied("torch_dist")
    out = path.parent / "result"
    commands: list[Callable[[], Any]] = [
        lambda: inspect(path),
        lambda: verify(path),
        lambda: reshard(path, out, overwrite=True),
    ]
    for command in commands:
        command()  # what has to be imported is imported now
    shutil.rmtree(out)
    if place == ".metadata":
        (path / "release" / place).write_bytes(PICKLES[case])
    else:
        replace_pickle(path / "release" / place, PICKLES[case])
    for command in commands:
        audit.seen.clear()
        audit.watching = True
        try:
            with pytest.raises(FormatError) as e:
                command()
        finally:
            audit.watching = False
        assert place in (e.value.file or "")
        assert {event for event, _ in audit.seen} <= {"open", "os.listdir", "os.scandir"}
        opened = [str(x) for event, x in audit.seen if event == "open"]
        assert [x for x in opened if not x.startswith(str(path))] == []
    assert not Path("pwned").exists()
    assert not out.exists()


def test_compressed_items_are_refused(copied: Callable[[str], Path]) -> None:
    path = copied("torch_dist")
    file = path / "release" / "common.pt"
    with zipfile.ZipFile(file) as z:
        members = {n: z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items():
            z.writestr(name, data)
    assert isinstance(attempt(path), FormatError)


# ---- R9: paths


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "a\0b"]
)
def test_an_index_that_leads_out_is_refused(copied: Callable[[str], Path], name: str) -> None:
    path = copied("hf")
    index = path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(value))
    error = attempt(path)
    assert isinstance(error, FormatError)
    assert error.file == str(index)


@pytest.mark.parametrize("kind", DIGESTED)
def test_a_data_file_that_is_a_link_out_is_refused(
    copied: Callable[[str], Path], kind: str
) -> None:
    path = copied(kind)
    file = next(f for f in files_of(path) if f.name.endswith(DATA_FILES))
    away = path.parent / "elsewhere"
    away.mkdir()
    file.rename(away / file.name)
    file.symlink_to(away / file.name)
    error = attempt(path)
    assert isinstance(error, FormatError)
    assert file.name in str(error)


def test_links_out_are_not_carried_along(
    copied: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = copied("torch_dist")
    secret = path.parent / "secret"
    secret.write_text("secret")
    (path / "release" / "hf" / "notes.txt").symlink_to(secret)
    caplog.set_level("WARNING")
    assert attempt(path) is None
    written = contents(path.parent / "result")
    assert written
    assert b"secret" not in written.values()
    assert "notes.txt" in caplog.text


def test_names_of_tensors_are_never_paths(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    odd = ["../../evil", "/etc/evil", "a/b", "nul\0", "é" * 300, " ", "__x__"]
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({n: np.arange(3.0) for n in odd}, folder / "odd.safetensors")
    reshard(folder / "odd.safetensors", folder / "out.safetensors")
    reshard(folder / "odd.safetensors", folder / "dcp", to="dcp")
    reshard(folder / "dcp", folder / "back.safetensors", to="safetensors")
    assert stored_tensors(folder / "back.safetensors") == stored_tensors(folder / "odd.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


# ---- the command line says it in one line


@pytest.mark.parametrize("verb", ["inspect", "reshard", "verify"])
@pytest.mark.parametrize("kind", [*FORMATS, "gguf"])
def test_the_command_line_tells_damage_in_one_line(
    copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str], kind: str, verb: str
) -> None:
    path = copied(kind)
    first = (".metadata", "metadata.pkl", "model-00001-of-", path.name)
    file = next(f for f in files_of(path) if f.name.startswith(first))
    put(file, file.read_bytes()[:100])
    out = path.parent / "result"
    status = main([verb, str(path), *([str(out)] if verb == "reshard" else [])])
    told = capsys.readouterr()
    assert status == 3
    assert told.out == ""
    errors = [line for line in told.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "Traceback" not in told.err
    assert file.name in told.err
    assert not out.exists()
    assert staging_folders(path.parent) == []


def test_names_of_another_dialect_never_land_in_a_hugging_face_folder(
    copied: Callable[[str], Path],
) -> None:
    path = copied("gguf")
    put(path, path.read_bytes().replace(b"\0llama", b"\0parrt", 1))
    error = attempt(path)
    assert isinstance(error, MappingError)
    assert "'parrt'" in error.message
    assert "llama" in (error.hint or "")
