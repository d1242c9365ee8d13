"""Files of nested checkpoints, which are copied as they are: every item and byte is checked."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402

from megtool import inspect, reshard  # noqa: E402
from megtool.errors import FormatError  # noqa: E402
from megtool.formats.torch_dist.metadata import read_metadata  # noqa: E402
from megtool.options.layout import ParallelConfig  # noqa: E402
from megtool.pickles.small_files import is_pickle_file  # noqa: E402
from megtool.source.nested_items import find_item_problems  # noqa: E402
from tests.support.checkpoints.hostile_pickles import replace_object, zipped  # noqa: E402
from tests.support.checkpoints.trained import config, write  # noqa: E402

EVIL = b"cmycompany\nrun\n(S'touch pwned'\ntR."
POPPED = b"cmycompany\nrun\n(S'touch pwned'\ntR0N."
EXTRA, OBJECT = "a._extra_state", "state.mode"


def old_tar() -> bytes:
    """A tar without a mark, as V7 wrote them, with a pickle in it."""
    member = tarfile.TarInfo("pickle")
    member.size = len(EVIL)
    header = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    header[257:265] = bytes(8)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + EVIL.ljust(512, b"\0") + bytes(1024)


def buffer_of(data: bytes) -> bytes:
    """A file of torch.save with a tensor of bytes that are a pickle."""
    out = io.BytesIO()
    torch.save([torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()], out)
    return out.getvalue()


def write_nested(folder: Path, extra: bytes = b"\0" * 9) -> Path:
    """A checkpoint as ModelOpt saves it: an object and tensors, one of them an extra state."""
    state = torch.frombuffer(bytearray(extra), dtype=torch.uint8).clone()
    save({"state": {"mode": 1}, EXTRA: state}, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


def put(folder: Path, item: bytes) -> None:
    """Put an item in the place of the object; nothing is left of the old one."""
    file = next(folder.glob("*.distcp"))
    metadata = read_metadata((folder / ".metadata").read_bytes(), file=folder)
    _, offset, length = metadata.objects[OBJECT]
    data = file.read_bytes()
    file.write_bytes(data[:offset] + bytes(length) + data[offset + length :])
    replace_object(folder, OBJECT, item)


def append(folder: Path, data: bytes) -> None:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes() + data)


def hidden_suffix(folder: Path) -> None:
    """A data file of another name, whose item comes after bytes that are none."""
    item = zipped(EVIL[:-1])
    put(folder, item)
    file = next(folder.glob("*.distcp"))
    metadata = folder / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"weights.blob"))
    file.rename(folder / "weights.blob")


def without_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


HOSTILE: dict[str, Callable[[Path], object]] = {
    "an item that is a tar of V7": lambda p: put(p, old_tar()),
    "a pickle of protocol 0": lambda p: put(p, EVIL),
    "a pickle of protocol 2": lambda p: put(p, b"\x80\x02" + EVIL),
    "a pickle after another number": lambda p: put(p, b"\x80\x02I7\n.\x80\x02" + EVIL),
    "a zip": lambda p: put(p, zipped(EVIL[:-1])),
    "a zip that takes it off its stack": lambda p: put(p, zipped(POPPED[:-1])),
    "a buffer in a zip": lambda p: put(p, buffer_of(b"\x80\x02" + POPPED)),
    "bytes after the items": lambda p: append(p, zipped(EVIL[:-1])),
    "another suffix": hidden_suffix,
    "no metadata": without_metadata,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_items_are_found(tmp_path: Path, name: str) -> None:
    folder = write_nested(tmp_path / "nested")
    HOSTILE[name](folder)
    files = {p.name: p for p in folder.iterdir()}
    data = next(n for n in files if n.endswith((".distcp", ".blob")))
    assert find_item_problems(files)[data]


@pytest.mark.parametrize("data", [EVIL, b"\x80\x02" + POPPED, b"\x80\x04" + EVIL])
def test_an_extra_state_in_a_tensor_is_found(tmp_path: Path, data: bytes) -> None:
    folder = write_nested(tmp_path / "nested", data)
    problems = find_item_problems({p.name: p for p in folder.iterdir()})
    assert "mycompany.run" in str(problems["__0_0.distcp"])


def test_sound_items_are_copied(tmp_path: Path) -> None:
    folder = write_nested(tmp_path / "nested", pickle.dumps({"scale": 3}))
    files = {p.name: p for p in folder.iterdir()}
    assert find_item_problems(files) == {"__0_0.distcp": ()}


@pytest.fixture
def source(tmp_path: Path, materialize: Any) -> Path:
    folder = tmp_path / "nested"
    put(write_nested(folder), old_tar())
    beside = {f"modelopt_state/{p.name}": p.read_bytes() for p in folder.iterdir()}
    write(tmp_path / "source", config(), ParallelConfig(), materialize, beside=beside)
    return tmp_path / "source"


def test_they_are_refused_or_left_out(source: Path, tmp_path: Path) -> None:
    name = "modelopt_state/__0_0.distcp"
    assert [f.name for f in inspect(source).foreign_objects] == [name]
    with pytest.raises(FormatError) as e:
        reshard(source, tmp_path / "out", tp=2, fsync=False)
    assert e.value.id == "hostile-pickle"
    assert (e.value.file or "").endswith(name)
    report = reshard(source, tmp_path / "out", tp=2, drop_objects=True, fsync=False)
    assert name in {d.name for d in report.dropped}
    assert not list((tmp_path / "out").rglob("modelopt_state/*.distcp"))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (EVIL, True),
        (b"\x80\x05" + EVIL, True),
        (old_tar(), True),
        (zipped(b"}"), True),
        (b"PK\3\4 constants.PKL", True),
        (b"checkpoint: here\nname: a\n.", False),
        (b'{"a": 1}', False),
        (b"Copyright by somebody. All rights reserved.\n", False),
        (b"", False),
    ],
)
def test_what_loaders_unpickle_is_told_by_its_contents(
    tmp_path: Path, data: bytes, expected: bool
) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    assert is_pickle_file(file) is expected
