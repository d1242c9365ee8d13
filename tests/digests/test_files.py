"""Digests of files, from their writes in any order, are those of what is on the disk."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.digests.crc32c import FileDigest, crc32c
from megtool.digests.files import (
    FileDigests,
    check_files,
    digest_tree,
    read_file_digest,
    read_sections,
)
from megtool.errors import FormatError
from megtool.storage.files import Files

SIZE = 1000


@given(
    cuts=st.lists(st.integers(0, SIZE), max_size=6),
    pieces=st.lists(st.integers(1, SIZE - 1), max_size=8, unique=True),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_writes_in_any_order_and_size(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], pieces: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("writes") / "file"
    files, digests = Files(), FileDigests()
    fd = files.open_write(path)
    files.truncate(fd, SIZE)
    digests.register(path, SIZE, sorted(cuts))
    files.recorder = digests
    edges = [0, *sorted(pieces), SIZE]
    ranges = list(pairwise(edges))
    for number in rng.permutation(len(ranges)).tolist():
        begin, end = ranges[number]
        data = rng.integers(0, 256, end - begin, dtype=np.uint8)
        if number % 3 == 0:
            files.pwrite_all(fd, data, begin)
        elif number % 3 == 1:
            parts = [p for p in np.array_split(data, 3) if p.size]
            files.pwrite_gather(fd, parts, begin)
        else:  # overwritten: the former contents are recorded first, which cancels them
            files.pwrite_all(fd, np.ones_like(data), begin)
            files.record(fd, begin, (np.ones_like(data),))
            files.pwrite_all(fd, data, begin)
    files.close(fd)
    content = path.read_bytes()
    assert digests.get(path) == FileDigest(size=SIZE, crc32c=crc32c(content))
    for begin, end in zip([0, *sorted({*cuts})], sorted({*cuts, SIZE}), strict=False):
        assert digests.section(path, begin, end) == crc32c(content[begin:end])


def test_bytes_that_are_never_written_are_zeros(tmp_path: Path) -> None:
    files, digests = Files(), FileDigests()
    path = tmp_path / "file"
    fd = files.open_write(path)
    files.truncate(fd, 64)
    digests.register(path, 64)
    files.recorder = digests
    files.pwrite_all(fd, b"abc", 40)
    files.close(fd)
    assert digests.get(path) == read_file_digest(Files(), path)


@pytest.mark.parametrize("how", ["beyond", "kernel", "truncate"])
def test_what_was_not_seen_is_not_known_and_read_back(tmp_path: Path, how: str) -> None:
    files, digests = Files(), FileDigests()
    path, source = tmp_path / "tree" / "file", tmp_path / "source"
    path.parent.mkdir()
    source.write_bytes(b"0123456789")
    fd = files.open_write(path)
    files.truncate(fd, 8)
    digests.register(path, 8)
    files.recorder = digests
    if how == "beyond":
        files.pwrite_all(fd, b"0123456789", 0)
    elif how == "kernel":
        read = files.open_read(source)
        files.copy_range(read, 0, fd, 0, 8)
        files.close(read)
    else:
        files.pwrite_all(fd, b"12345678", 0)
        files.truncate(fd, 4)
    files.close(fd)
    assert digests.get(path) is None
    assert digests.section(path, 0, 8) is None
    content = path.read_bytes()
    (path.parent / "more").write_bytes(b"")
    assert digest_tree(Files(), path.parent, digests, excluded=["more"]) == {
        "file": FileDigest(size=len(content), crc32c=crc32c(content))
    }


@pytest.mark.parametrize("threads", [1, 3])
def test_sections_of_a_large_file_are_read_in_parts(tmp_path: Path, threads: int) -> None:
    content = np.random.default_rng(1).bytes(3 << 20)
    (tmp_path / "file").write_bytes(content)
    seen: list[int] = []
    sections = [(0, 1 << 20), (1 << 20, 1 << 20), (5, 3 << 20)]
    crcs = read_sections(
        Files(), tmp_path / "file", sections, threads=threads, progress=seen.append
    )
    assert crcs == [crc32c(content[a:b]) for a, b in sections]
    assert sum(seen) == sum(b - a for a, b in sections)
    with pytest.raises(FormatError, match="truncated"):
        read_sections(Files(), tmp_path / "file", [(0, (3 << 20) + 1)])


def test_every_kind_of_change_of_a_file_is_named(tmp_path: Path) -> None:
    names = ("same", "flipped", "cut", "gone", "folder", "link")
    expected = {}
    for name in names:
        (tmp_path / name).write_bytes(b"contents of " + name.encode())
        expected[name] = read_file_digest(Files(), tmp_path / name)
    (tmp_path / "flipped").write_bytes(b"contents of fliqped")
    (tmp_path / "cut").write_bytes(b"contents")
    (tmp_path / "gone").unlink()
    (tmp_path / "folder").unlink()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/etc/hostname")
    reasons = {m.file: m.reason for m in check_files(tmp_path, expected)}
    assert reasons.keys() == set(names) - {"same"}
    assert "CRC-32C" in reasons["flipped"]
    assert "8 bytes" in reasons["cut"]
    assert "missing" in reasons["gone"]
    assert "regular file" in reasons["folder"]
    assert "regular file" in reasons["link"]
