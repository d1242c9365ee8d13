"""What is written is opened again before it is put in place, or refused when it is planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megtool import export, quantize, reshard, verify
from megtool.errors import FormatError, UsageError
from megtool.reshard import execute, staged_write
from megtool.source.open import open_source
from tests.support.folders import staging_folders
from tests.support.models import gguf_models, tiny_llama

ARRAYS = ("zarr", "tensorstore", "ocdbt")
PLAIN = ("hf", "safetensors", "dcp", *ARRAYS)


def stored(folder: Path, dtype: str, shape: tuple[int, ...], data: bytes) -> Path:
    """A file of one tensor `w`."""
    entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, len(data)]}
    return one_file(folder, {"w": entry}, data)


def one_file(folder: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path = folder / "source.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def shapes(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    tensors = open_source(path).catalogue.tensors
    return {t.name: (t.shape, t.dtype.name) for t in tensors}


def destination(folder: Path, to: str) -> Path:
    return folder / ("out.safetensors" if to == "safetensors" else "out")


def refused(source: Path, folder: Path, to: str, **more: Any) -> UsageError:
    for dry_run in (True, False):
        with pytest.raises(UsageError) as caught:
            reshard(source, destination(folder, to), to=to, dry_run=dry_run, **more)
    assert not destination(folder, to).exists()
    assert not staging_folders(folder)
    return caught.value


@pytest.mark.parametrize("to", PLAIN)
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_source_without_tensors(tmp_path: Path, to: str, metadata: Any) -> None:
    source = one_file(tmp_path, {} if metadata is None else {"__metadata__": metadata})
    if to in ARRAYS:
        assert "no tensor" in refused(source, tmp_path, to).message
        return
    reshard(source, destination(tmp_path, to), to=to, fsync=False)
    assert shapes(destination(tmp_path, to)) == {}


@pytest.mark.parametrize("to", PLAIN)
@pytest.mark.parametrize(
    "shape",
    [(1 << 62, 0), (0, (1 << 63) - 1), (1 << 40, 1 << 40, 0), (3, 0, 5), (0,), ()],
    ids=str,
)
def test_sizes_beside_a_zero(tmp_path: Path, to: str, shape: tuple[int, ...]) -> None:
    source = stored(tmp_path, "F32", shape, bytes(0 if shape else 4))
    huge = max(shape, default=0)
    if (to == "dcp" and huge > 5) or (to in ARRAYS and huge > 1 << 62):
        assert refused(source, tmp_path, to).tensor == "w"
        return
    reshard(source, destination(tmp_path, to), to=to, fsync=False)
    assert shapes(destination(tmp_path, to)) == {"w": (shape, "float32")}


@pytest.mark.parametrize("to", PLAIN)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_bool_that_is_neither_0_nor_1(tmp_path: Path, to: str, shape: tuple[int, ...]) -> None:
    source = stored(tmp_path, "BOOL", shape, bytes([0, 1, 2, 255]))
    if to in ARRAYS:
        error = refused(source, tmp_path, to)
        assert error.tensor == "w"
        assert "byte 2" in error.message
        return
    reshard(source, destination(tmp_path, to), to=to, fsync=False)
    assert verify(source, destination(tmp_path, to)).verdict == "equal"


@pytest.mark.parametrize("to", ARRAYS)
@pytest.mark.parametrize("shape", [(4,), (), (0, 3)])
def test_other_bools_are_written(tmp_path: Path, to: str, shape: tuple[int, ...]) -> None:
    source = stored(tmp_path, "BOOL", shape, bytes([1, 0, 0, 1][: 1 if not shape else shape[0]]))
    reshard(source, tmp_path / "out", to=to, fsync=False)
    assert shapes(tmp_path / "out") == {"w": (shape, "bool")}


def remove(name: str) -> Callable[[Path], object]:
    return lambda tree: sorted(tree.rglob(name))[-1].unlink()


def cut(name: str) -> Callable[[Path], object]:
    def change(tree: Path) -> None:
        path = sorted(tree.rglob(name))[-1] if tree.is_dir() else tree
        path.write_bytes(path.read_bytes()[:-60])

    return change


DAMAGE = {
    "hf": cut("*.safetensors"),
    "safetensors": cut("*"),
    "dcp": cut(".metadata"),
    "zarr": remove("zarr.json"),
    "tensorstore": remove("zarr.json"),
    "ocdbt": cut("manifest.ocdbt"),
    "torch_dist": cut(".metadata"),
    "megatron": cut("model_optim_rng.pt"),
}


@pytest.mark.parametrize("to", DAMAGE)
def test_what_does_not_read_back_is_not_put_in_place(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staged files are opened, whatever the format, and compared with the plan."""
    source = tiny_llama.save(tmp_path / "source")
    path = destination(tmp_path, to)
    reshard(source, path, to=to, fsync=False)
    check = execute.check_readable

    def damaged(a: Any, target: Any, plan: Any, tree: Path) -> None:
        DAMAGE[to](tree)
        check(a, target, plan, tree)

    monkeypatch.setattr(execute, "check_readable", damaged)
    with pytest.raises(FormatError, match="read back"):
        reshard(source, path, to=to, fsync=False, overwrite=True)
    assert verify(source, path).exit_status == 0
    assert not staging_folders(tmp_path)


@pytest.mark.parametrize("verb", ["quantize", "hf", "gguf", "trtllm"])
@pytest.mark.parametrize("damage", ["cut", "renamed"])
def test_every_verb_reads_headers_back(
    tmp_path: Path, verb: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gguf_models.save if verb == "gguf" else tiny_llama.save
    source = model(tmp_path / "source", *(["llama"] if verb == "gguf" else []))
    out = tmp_path / ("out.gguf" if verb == "gguf" else "out")
    check = staged_write.check_headers

    def damaged(plan: Any, stage: Any) -> None:
        path = next(p for p in stage.tree.rglob("*") if p.suffix in (".safetensors", ".gguf"))
        data = path.read_bytes()
        name = plan.target.catalogue.tensors[0].name.encode()
        other = name[:-1] + b"~"
        path.write_bytes(data[:-60] if damage == "cut" else data.replace(name, other, 1))
        check(plan, stage)

    def write() -> None:
        if verb == "quantize":
            quantize(source, out, recipe="fp8_per_channel", fsync=False)
        else:
            export(source, out, to=verb, fsync=False)

    with monkeypatch.context() as patch:
        patch.setattr(staged_write, "check_headers", damaged)
        with pytest.raises(FormatError, match="read back"):
            write()
    assert not out.exists()
    assert not staging_folders(tmp_path)
    write()
    assert out.exists()
