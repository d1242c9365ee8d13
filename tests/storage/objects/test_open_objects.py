"""Objects that are read: in batches, and refused if they change meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import megtool
from megtool.errors import FormatError, SourceChangedError, StorageError
from megtool.formats import open_checkpoint
from megtool.storage.files import Files, read_file
from megtool.storage.local_copy import local_copy, map_file
from megtool.storage.location.path import StorePath, location
from megtool.storage.objects.open_objects import REQUEST_BYTES
from megtool.tensors.placement import Placement
from megtool.transport.reading.reader import CheckpointReader
from tests.support.models import tiny_llama
from tests.support.stores.read_counts import CountingStore

DATA = np.random.default_rng(0).integers(0, 256, 5_000_000, np.uint8).tobytes()


@pytest.fixture
def store() -> Iterator[CountingStore]:
    made = CountingStore("memory://open")
    made.forget()
    yield made
    made.forget()


def test_a_large_read_is_many_requests(store: CountingStore) -> None:
    store.put("a", DATA)
    assert read_file(location("memory://open/a")) == DATA
    assert len(store.reads) == -(-len(DATA) // REQUEST_BYTES) > 2
    assert store.num_bytes_read == len(DATA)


def test_runs_with_small_gaps_are_one_request(store: CountingStore) -> None:
    store.put("a", DATA)
    files = Files()
    fd = files.open_read(location("memory://open/a"))
    runs = [(n * 101_000, memoryview(bytearray(100_000))) for n in range(9)]
    files.pread_batch(fd, runs[::-1])
    assert all(memory == DATA[at : at + 100_000] for at, memory in runs)
    assert len(store.reads) == 1
    store.reads.clear()
    far = [(n * 200_000, memoryview(bytearray(100_000))) for n in range(9)]
    files.pread_batch(fd, far)
    assert store.num_bytes_read == 900_000
    files.close(fd)


def test_a_read_beyond_the_end(store: CountingStore) -> None:
    store.put("a", DATA[:1000])
    files = Files()
    fd = files.open_read(location("memory://open/a"))
    for num_bytes in (10, 1_000_000):
        with pytest.raises(FormatError, match="truncated: ends at byte 1,000"):
            files.pread_into(fd, memoryview(bytearray(num_bytes)), 995)
    files.close(fd)


@pytest.mark.parametrize("num_bytes", [100, 3_000_000])
@pytest.mark.parametrize("change", ["replace", "remove", "truncate"])
def test_an_object_that_changes_while_it_is_read(
    store: CountingStore, change: str, num_bytes: int
) -> None:
    store.put("a", DATA)
    files = Files()
    fd = files.open_read(location("memory://open/a"))
    files.pread_into(fd, memoryview(bytearray(100)), 0)
    if change == "remove":
        store.delete(["a"])
    else:
        store.put("a", DATA[::-1] if change == "replace" else DATA[:1_000_000])
    with pytest.raises(SourceChangedError, match="replaced or removed while it was read") as e:
        files.pread_into(fd, memoryview(bytearray(num_bytes)), 1_500_000)
    assert e.value.file == "memory://open/a"
    files.close(fd)


class Changing(CountingStore):
    """Puts the same bytes again, as another version, at a read."""

    at: int | None = None

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        if self.at is not None and len(self.reads) >= self.at:
            self.at = None
            self.put(key, self._objects[key][1])
        return super().read(key, offset, num_bytes, version=version)


@pytest.mark.parametrize("at", [4, 6, 8])
def test_a_reshard_of_a_source_that_changes(tmp_path: Path, at: int) -> None:
    store = Changing("memory://changing")
    store.forget()
    folder = tiny_llama.save(tmp_path / "hf", vocab_size=4096, hidden_size=512)
    store.upload(folder, "hf")
    store.at = at
    with pytest.raises(SourceChangedError):
        megtool.reshard("memory://changing/hf", tmp_path / "out", to="torch_dist", fsync=False)
    assert not (tmp_path / "out").exists()
    store.forget()


def test_a_change_after_the_last_read_is_noticed(store: CountingStore, tmp_path: Path) -> None:
    store.upload(tiny_llama.save(tmp_path / "hf"), "hf")
    catalogue = open_checkpoint("memory://open/hf")
    catalogue.check_unchanged()
    store.put("hf/model.safetensors", store._objects["hf/model.safetensors"][1])
    with pytest.raises(SourceChangedError, match="the source changed while it was read"):
        catalogue.check_unchanged()
    store.delete(["hf/model.safetensors"])
    with pytest.raises(SourceChangedError, match="disappeared"):
        catalogue.check_unchanged()


def test_a_transposed_tensor_is_read_once(store: CountingStore, tmp_path: Path) -> None:
    folder = tiny_llama.save(tmp_path / "hf", vocab_size=8192, hidden_size=1024)
    store.upload(folder, "hf")
    name = "model.embed_tokens.weight"
    transposed = Placement(
        canonical=name, stored=name, shape=(1024, 8192), dims=(1, 0), mults=(1, 1), base=(0, 0)
    )
    with CheckpointReader(open_checkpoint("memory://open/hf"), Files()) as reader:
        store.reads.clear()
        actual = reader.open_canonical(transposed).read()
        expected = reader.open_stored(name).read()
    assert (actual == expected.T).all()
    assert store.num_bytes_read < 2.05 * expected.nbytes  # once each


def test_headers_are_requested_before_they_are_read(store: CountingStore) -> None:
    paths = [location(f"memory://open/folder/{n}") for n in range(20)]
    for path in paths:
        store.put(path.key, DATA)
    store.awaited = 9
    Files().prefetch([(path, [(0, 100), (-50, 0)]) for path in paths])
    assert store.most_in_flight > 8
    assert len(store.reads) == 40
    store.reads.clear()
    files = Files()
    for path in paths:
        fd = files.open_read(path)
        tail = memoryview(bytearray(50))
        files.pread_into(fd, tail, len(DATA) - 50)
        assert tail == DATA[-50:]
        files.close(fd)
    assert store.reads == []


# ---- as files, maps and copies


def test_an_object_is_a_file(store: CountingStore) -> None:
    text = "".join(f"line {n}\n" for n in range(200_000))
    store.put("text", text.encode())
    path = location("memory://open/text")
    with path.open(encoding="utf-8") as lines:
        assert "".join(lines) == text
    assert len(store.reads) < 20
    with path.open("rb") as file:
        file.seek(-7, 2)
        assert file.read() == text.encode()[-7:]
        file.seek(5)
        assert file.read(3) == text.encode()[5:8]


@pytest.mark.parametrize(("offset", "count"), [(0, None), (4097, 1_000_001), (7, 0)])
def test_a_map_of_an_object(store: CountingStore, offset: int, count: int | None) -> None:
    store.put("a", DATA)
    mapped = map_file(location("memory://open/a"), offset=offset, num_bytes=count)
    assert mapped.tobytes() == DATA[offset : None if count is None else offset + count]


def test_a_copy_of_a_folder(store: CountingStore, tmp_path: Path) -> None:
    store.put("run/x/a", b"a")
    store.put("run/b", b"bb")
    with local_copy(location("memory://open/run")) as copy:
        assert (copy / "x" / "a").read_bytes() == b"a"
        assert (copy / "b").read_bytes() == b"bb"
        assert copy.name == "run"
    assert not copy.exists()
    with local_copy(tmp_path) as same:
        assert same == tmp_path


def test_a_copy_of_the_beginning_of_a_file(store: CountingStore) -> None:
    store.put("a", DATA)
    with local_copy(location("memory://open/a"), head_bytes=1000) as copy:
        content = copy.read_bytes()
    assert content[:1000] == DATA[:1000]
    assert content[1000:] == bytes(len(DATA) - 1000)
    assert store.num_bytes_read <= 1000 + (64 << 10)


def test_a_copy_that_is_too_large(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megtool.storage.local_copy.MAX_COPY_BYTES", 1000)
    store.put("a", DATA)
    with pytest.raises(StorageError, match="too many to copy"):
        map_file(location("memory://open/a"))
    assert store.reads == []


# ---- what listings answer


def test_a_tree_is_one_listing(store: CountingStore) -> None:
    for key in ("run/iter_1/a", "run/iter_1/b/c/d", "run/x"):
        store.put(key, b"1")
    run = location("memory://open/run")
    Files().load_tree(run)
    assert [p.name for p in run.iterdir()] == ["iter_1", "x"]
    assert (run / "iter_1" / "b" / "c").is_dir()
    assert (run / "iter_1" / "b" / "c" / "d").stat().st_size == 1
    assert not (run / "iter_1" / "y").exists()
    assert (run / "x").is_file()
    assert (store.lists, store.heads) == (1, 0)
    store.put("run/iter_1/y", b"2")
    Files().refresh(run)
    assert (run / "iter_1" / "y").exists()


def test_the_bucket_is_its_own_parent() -> None:
    path = location("memory://open/a/b")
    assert [str(p) for p in path.parents] == ["memory://open/a", "memory://open"]
    bucket = StorePath("memory://open")
    assert bucket.parent == bucket
    assert bucket.parents == ()
