"""A checkpoint that is one file has its digests in its header: every changed byte is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, inspect, reshard, verify
from megtool.digests.embedded import METADATA_KEY, EmbeddedDigests, parse_embedded
from megtool.errors import FormatError, MegtoolError
from tests.support.models import gguf_models

TENSORS = {
    "b": torch.arange(7, dtype=torch.int8),
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "source.safetensors")
    reshard(tmp_path / "source.safetensors", tmp_path / "out.safetensors")
    return tmp_path / "out.safetensors"


def test_every_flipped_byte_of_a_file_is_found(single: Path) -> None:
    assert verify(single).verdict == "ok"
    data = single.read_bytes()
    text = data.index(b"crc32c outside=")
    offsets = [*range(0, 700, 7), *range(text, text + 60, 3), *range(4090, len(data))]
    for offset in offsets:
        changed = bytearray(data)
        changed[offset] ^= 1 << offset % 8
        single.write_bytes(changed)
        try:
            report = verify(single)
        except MegtoolError:
            continue
        assert report.exit_status == 7, offset
    single.write_bytes(data)
    assert verify(single).verdict == "ok"


def test_the_tensor_is_named(single: Path) -> None:
    data = bytearray(single.read_bytes())
    data[-1] ^= 1  # the int8 tensor is the last
    single.write_bytes(data)
    report = verify(single)
    assert [(d.tensor, d.kind) for d in report.differences] == [("b", "digest")]
    assert (report.digests[0].matching, report.digests[0].differing) == (2, 1)


def test_other_tools_read_the_file(single: Path) -> None:
    loaded = load_file(single)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], t) for name, t in TENSORS.items())


def test_a_file_without_digests_is_unverified(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "plain.safetensors")
    assert verify(tmp_path / "plain.safetensors").verdict == "unverified"
    reshard(tmp_path / "plain.safetensors", tmp_path / "none.safetensors", digest="none")
    assert inspect(tmp_path / "none.safetensors").digests is None
    assert verify(tmp_path / "none.safetensors").verdict == "unverified"
    assert load_file(tmp_path / "none.safetensors").keys() == TENSORS.keys()


def test_a_gguf_file_has_them_too(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    source, out = gguf_models.save(tmp_path / "hf", "llama"), tmp_path / "model.gguf"
    export(source, out, to="gguf", outtype="q8_0")
    assert inspect(out).digests == inspect(out).num_tensors
    assert verify(out).verdict == "ok"
    data = out.read_bytes()
    for offset in range(0, len(data), len(data) // 97):
        changed = bytearray(data)
        changed[offset] ^= 1 << offset % 8
        out.write_bytes(changed)
        try:
            report = verify(out)
        except MegtoolError:
            continue
        assert report.exit_status == 7, offset


@pytest.mark.parametrize(
    "text", [7, "", "crc32c outside=0 tensors=", "crc32c outside=0000000g tensors=", "x"]
)
def test_damaged_text_is_refused(text: object) -> None:
    with pytest.raises(FormatError, match="damaged"):
        parse_embedded(text, Path("x.safetensors"))


def test_the_text_comes_back() -> None:
    digests = EmbeddedDigests(7, (1, 2**32 - 1))
    assert parse_embedded(str(digests), Path("x")) == digests
    assert METADATA_KEY == "megtool.digests"


def test_a_name_that_looks_like_digests_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    save_file({"crc32c outside=00000000 tensors=": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(FormatError, match="looks like the digests"):
        reshard(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors"]


def test_a_verified_file_is_closed(single: Path) -> None:
    verify(single)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        verify(single)
    assert len(os.listdir("/proc/self/fd")) == before
