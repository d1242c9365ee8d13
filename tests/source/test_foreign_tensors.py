"""Pickles in tensors that are called as extra states: refused, or left out, by every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from megtool import inspect, reshard, verify  # noqa: E402
from megtool.errors import FormatError  # noqa: E402
from megtool.source import foreign_tensors  # noqa: E402
from tests.support.checkpoints import te_payloads  # noqa: E402

EVIL = b"\x80\x02I0x10\n0cmycompany\nrun\n(S'touch pwned'\ntR."
PLAIN = b"\x80\x02cmycompany\nrun\n(S'touch pwned'\ntR."
NAME = "a._extra_state"
TARGETS = ("dcp", "safetensors", "zarr")


def as_bytes(data: bytes, dtype: Any = None) -> Any:
    padded = data if dtype is None else data.ljust(-len(data) % 4 + len(data), b"\0")
    return torch.frombuffer(bytearray(padded), dtype=dtype or torch.uint8).clone()


def write_source(kind: str, path: Path, state: Any, name: str = NAME) -> Path:
    tensors = {"a.weight": torch.ones(8, 8), name: state}
    if kind == "dcp":
        from torch.distributed.checkpoint.state_dict_saver import save

        save(tensors, checkpoint_id=path, no_dist=True)
        return path
    from safetensors.torch import save_file

    file = path.with_suffix(".safetensors")
    save_file(tensors, file)
    if kind == "zarr":
        with pytest.MonkeyPatch.context() as patch:  # write it as an attacker does
            patch.setattr(foreign_tensors, "verbatim_problems", lambda _data: ())
            reshard(file, path, to="zarr", fsync=False)
        return path
    return file


def written(path: Path) -> bytes:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return b"".join(p.read_bytes() for p in files)


@pytest.mark.parametrize("source_kind", TARGETS)
def test_a_hostile_extra_state_in_a_tensor_is_not_passed_on(
    tmp_path: Path, source_kind: str
) -> None:
    evil = PLAIN if source_kind == "dcp" else EVIL
    source = write_source(source_kind, tmp_path / "source", as_bytes(evil))
    for to in TARGETS:
        out = tmp_path / f"out_{to}{'.safetensors' if to == 'safetensors' else ''}"
        with pytest.raises(FormatError, match=r"mycompany\.run") as e:
            reshard(source, out, to=to, fsync=False)
        assert NAME in e.value.message
        assert e.value.id == "hostile-pickle"
        assert "--drop-objects" in (e.value.hint or "")
        assert str(source) in (e.value.file or "")
        assert not out.exists()
        report = reshard(source, out, to=to, drop_objects=True, fsync=False)
        (drop,) = [d for d in report.dropped if d.name == NAME]
        assert drop.is_lost
        assert "mycompany.run" in drop.reason
        assert b"mycompany" not in written(out)
        assert {t.name for t in open_tensors(out)} == {"a.weight"}


def open_tensors(path: Path) -> list[Any]:
    from megtool.formats import open_checkpoint

    return open_checkpoint(path).tensors


@pytest.mark.parametrize("source_kind", TARGETS)
def test_inspect_and_verify_name_it(tmp_path: Path, source_kind: str) -> None:
    source = write_source(source_kind, tmp_path / "source", as_bytes(EVIL))
    (foreign,) = inspect(source).foreign_objects
    assert foreign.name == NAME
    assert "mycompany.run" in foreign.text
    checked = verify(source)
    assert checked.exit_status == 7
    assert [d.tensor for d in checked.differences if d.kind == "object"] == [NAME]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("a._extra_state/shard_0_4", as_bytes(EVIL)),
        ("a.Extra_State", as_bytes(EVIL)),
        ("a._extra_state1", as_bytes(EVIL, torch.int32)),
        ("layers._extra_state", torch.stack([as_bytes(bytes(len(EVIL))), as_bytes(EVIL)])),
    ],
)
def test_other_names_types_and_rows(tmp_path: Path, name: str, state: Any) -> None:
    source = write_source("safetensors", tmp_path / "source", state, name)
    with pytest.raises(FormatError, match=r"mycompany\.run"):
        reshard(source, tmp_path / "out", to="dcp", fsync=False)


STREAM = b"ctorch.storage\n_load_from_bytes\n(C\x06cos\nx\ntR"


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cmycompany\nrun\n(S'x'\ntR0N.",
        b"\x80\x02cmycompany\nrun\n(S'x'\ntRN.",
        b"\x80\x02cmycompany\nrun\n0N.",
        b"\x80\x02}(S'a'\ncmycompany\nrun\n)RS'a'\nNu.",
        b"\x80\x02ccollections\ndefaultdict\n(cmycompany\nrun\ntR0N.",
        b"\x80\x04" + STREAM + b"0N.",
    ],
)
def test_what_a_pickle_builds_and_throws_away_counts(tmp_path: Path, data: bytes) -> None:
    """A tensor is copied as it is, so what is not in the result runs too."""
    source = write_source("safetensors", tmp_path / "source", as_bytes(data))
    with pytest.raises(FormatError, match=r"mycompany\.run|_load_from_bytes"):
        reshard(source, tmp_path / "out", to="dcp", fsync=False)


@pytest.mark.parametrize("padding", [0, 5])
def test_the_states_of_transformer_engine_are_copied(tmp_path: Path, padding: int) -> None:
    data = te_payloads.DELAYED_2_4 + bytes(padding)
    source = write_source("dcp", tmp_path / "source", as_bytes(data))
    for to in TARGETS:
        out = tmp_path / f"out_{to}{'.safetensors' if to == 'safetensors' else ''}"
        report = reshard(source, out, to=to, fsync=False)
        assert not report.dropped
        assert verify(source, out).verdict == "equal"


def test_other_tensors_and_random_states_are_copied(tmp_path: Path) -> None:
    random = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    for number, (name, data) in enumerate(
        (("a.rng_extra_state", random.tobytes()), ("a.tokens", EVIL), ("a._extra_state", b""))
    ):
        source = write_source("safetensors", tmp_path / f"s{number}", as_bytes(data or b"\0"), name)
        assert not reshard(source, tmp_path / f"out{number}", to="dcp", fsync=False).dropped


def test_a_state_too_large_to_be_checked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source("safetensors", tmp_path / "source", as_bytes(bytes(100)))
    reshard(source, tmp_path / "a", to="dcp", fsync=False)
    monkeypatch.setattr(foreign_tensors, "MAX_STATE_BYTES", 99)
    with pytest.raises(FormatError, match="too large to be checked"):
        reshard(source, tmp_path / "b", to="dcp", fsync=False)


def as_floats(data: bytes) -> Any:
    padded = data + b" " * (-len(data) % 4)
    return torch.frombuffer(bytearray(padded), dtype=torch.float32).clone()


def test_an_ordinary_tensor_may_not_become_a_hostile_extra_state(tmp_path: Path) -> None:
    source = write_source("safetensors", tmp_path / "source", as_bytes(EVIL), "a.tokens")
    rename = [f"a.tokens={NAME}"]
    for to in TARGETS:
        out = tmp_path / f"out_{to}{'.safetensors' if to == 'safetensors' else ''}"
        with pytest.raises(FormatError, match=r"mycompany\.run") as e:
            reshard(source, out, to=to, rename=rename, fsync=False)
        assert e.value.id == "hostile-pickle"
        assert not out.exists()
        report = reshard(source, out, to=to, rename=rename, drop_objects=True, fsync=False)
        (drop,) = [d for d in report.dropped if d.name == "a.tokens"]
        assert drop.is_lost
        assert "mycompany.run" in drop.reason
        assert b"mycompany" not in written(out)
        assert {t.name for t in open_tensors(out)} == {"a.weight"}
    sound = write_source("safetensors", tmp_path / "sound", as_bytes(te_payloads.DELAYED_2_4), "b")
    report = reshard(sound, tmp_path / "renamed", to="dcp", rename=["b=b._extra_state"])
    assert {t.name for t in open_tensors(tmp_path / "renamed")} == {"a.weight", "b._extra_state"}


def test_an_extra_state_is_no_number_to_be_averaged(tmp_path: Path) -> None:
    evil = as_floats(EVIL[:-1] + b" " * (-(len(EVIL)) % 4) + b".")
    first = write_source("safetensors", tmp_path / "first", torch.zeros_like(evil))
    second = write_source("safetensors", tmp_path / "second", evil * 2)
    reshard(first, tmp_path / "out", to="dcp", average=[second], fsync=False)
    assert b"mycompany" not in written(tmp_path / "out")
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    first = write_source("safetensors", ordinary / "a", torch.zeros_like(evil), "a.tokens")
    second = write_source("safetensors", ordinary / "b", evil * 2, "a.tokens")
    rename = [f"a.tokens={NAME}"]
    for to in TARGETS:
        out = tmp_path / f"mean_{to}{'.safetensors' if to == 'safetensors' else ''}"
        with pytest.raises(FormatError) as e:
            reshard(first, out, to=to, average=[second], rename=rename, fsync=False)
        assert e.value.id == "hostile-pickle"
        assert not out.exists()


def test_a_cast_may_not_make_a_hostile_extra_state(tmp_path: Path) -> None:
    """A tensor of float32 whose bytes are none, and whose rounded numbers are."""
    data = PLAIN[:-1] + b" " * (-len(PLAIN) % 2) + b"."
    wide = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float()
    source = write_source("safetensors", tmp_path / "source", wide)
    out = tmp_path / "out.safetensors"
    with pytest.raises(FormatError) as e:
        reshard(source, out, to="safetensors", dtype="bfloat16", fsync=False)
    assert e.value.id == "hostile-pickle"
    assert not out.exists()
