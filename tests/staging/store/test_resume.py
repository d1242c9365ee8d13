"""What a run that was killed has put into a store is taken up only if it is what it put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from megtool import reshard
from megtool.errors import DestinationError, MegtoolError
from megtool.storage.location.path import StorePath
from megtool.storage.objects.cache import object_cache
from megtool.storage.objects.index import store_index
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.protocol import MIN_PART_BYTES, ObjectInfo
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.stores.memory_stores import CountedStore

URL = "memory://resumed"
OPTIONS = {"to": "torch_dist", "tp": 2, "threads": 1, "digest": "all"}
OBJECTS = ("release/__0_0.distcp", "release/__1_0.distcp")
LAST = "run/latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of the same sizes and other bytes."""
    root = tmp_path_factory.mktemp("sources")
    return tiny_llama.save(root / "a"), tiny_llama.save(root / "b", seed=1)


@pytest.fixture(scope="module")
def expected(sources: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    root = tmp_path_factory.mktemp("expected")
    for source in sources:
        reshard(source, root / source.name, **OPTIONS)
    return [contents(root / source.name) for source in sources]


class PlainStore(CountedStore):
    """Objects of a single part each; a bucket of its own."""

    def __init__(self) -> None:
        super().__init__(URL, min_part_bytes=MIN_PART_BYTES)

    def versions(self) -> dict[str, str]:
        """The version of each data object that is at the destination."""
        infos = (self.head(f"run/{name}") for name in OBJECTS)
        return {info.key: info.version for info in infos if info is not None}


class UnversionedStore(MemoryStore):
    """One whose objects have neither a version nor a time, as those of some web servers."""

    def _store(self, key: str, data: bytes) -> ObjectInfo:
        info = replace(super()._store(key, data), version="", modified_ns=0)
        self._objects[key] = info, data
        return info


def copy(folder: Path, store: MemoryStore) -> None:
    for path in folder.iterdir():
        store.put(f"source/{path.name}", path.read_bytes())
    store_index().forget(StorePath(store.url))
    object_cache.cache_clear()  # as in a new process


def killed(sources: tuple[Path, Path]) -> Iterator[PlainStore]:
    """A store after a run that was killed at every third call, if it had put data objects."""
    number = 0
    while True:
        number += 3
        store = PlainStore()
        register_store(store)
        copy(sources[0], store)
        store.dies_at = store.num_calls + number
        with suppress(MegtoolError):
            reshard(f"{URL}/source", f"{URL}/run", **OPTIONS)
            return
        store.revive()
        if store.versions():
            yield store


def test_a_source_that_has_changed_is_copied_anew(
    sources: tuple[Path, Path], expected: list[object]
) -> None:
    number = 0
    for number, store in enumerate(killed(sources), 1):
        copy(sources[1], store)
        if store.head(LAST) is not None:  # it was complete
            continue
        reshard(f"{URL}/source", f"{URL}/run", **OPTIONS)
        assert store.objects("run") == expected[1], number
    assert number > 2


def test_what_it_put_is_not_put_again(sources: tuple[Path, Path], expected: list[object]) -> None:
    for number, store in enumerate(killed(sources), 1):
        before = store.versions()
        with suppress(DestinationError):  # it was complete
            reshard(f"{URL}/source", f"{URL}/run", **OPTIONS)
        assert store.objects("run") == expected[0], number
        assert before.items() <= store.versions().items(), number


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_of_another_program_is_not_taken_for_its_size(
    sources: tuple[Path, Path], expected: list[object], name: str
) -> None:
    refused = 0
    for number, store in enumerate(killed(sources), 1):
        info = store.head(f"run/{name}")
        if info is None or store.head(LAST) is not None:
            continue
        store.put(f"run/{name}", b"\1" * info.size)
        with pytest.raises(DestinationError, match="another program has written"):
            reshard(f"{URL}/source", f"{URL}/run", **OPTIONS)
        assert store.head(LAST) is None, number
        refused += 1
    assert refused > 2


def test_without_a_note_of_its_plan_nothing_is_taken_up(
    sources: tuple[Path, Path], expected: list[object]
) -> None:
    for number, store in enumerate(killed(sources), 1):
        if store.head(LAST) is not None:
            continue
        store.delete([".run.megtool/run"])
        copy(sources[1], store)
        reshard(f"{URL}/source", f"{URL}/run", **OPTIONS)
        assert store.objects("run") == expected[1], number


def test_a_source_without_versions_is_read_again(
    sources: tuple[Path, Path], expected: list[object]
) -> None:
    source = UnversionedStore("memory://unversioned")
    register_store(source)
    for number in range(20, 60, 4):
        store = PlainStore()
        register_store(store)
        copy(sources[0], source)
        store.dies_at = number
        with suppress(MegtoolError):
            reshard(f"{source.url}/source", f"{URL}/run", **OPTIONS)
        store.revive()
        if store.head(LAST) is None:
            copy(sources[1], source)
            reshard(f"{source.url}/source", f"{URL}/run", **OPTIONS)
            assert store.objects("run") == expected[1], number
