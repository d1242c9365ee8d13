"""A checkpoint that is replaced by another while a verb reads it, at every request in turn.

What comes out is all of the one, all of the other, or an error; never a mixture of both.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import megtool
from megtool.errors import SourceChangedError
from megtool.storage.location.path import StorePath
from megtool.storage.objects.cache import object_cache
from megtool.storage.objects.index import store_index
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.third_party import FsspecStore
from tests.support.folders import contents
from tests.support.models import tiny_text
from tests.support.quant.quantize_sizes import SIZES, SMALL

Verb = Callable[[str, Path], Any]


def _folder(result: Any, folder: Path) -> Any:
    return contents(folder)


VERBS: dict[str, Verb] = {
    "reshard": lambda source, out: _folder(
        megtool.reshard(source, out, to="torch_dist", tp=2, fsync=False), out
    ),
    "reshard-one-thread": lambda source, out: _folder(
        megtool.reshard(source, out, to="megatron", tp=2, pp=2, threads=1, fsync=False), out
    ),
    "quantize": lambda source, out: _folder(
        megtool.quantize(source, out, "fp8", fsync=False, **SMALL), out
    ),
    "export": lambda source, out: _folder(megtool.export(source, out, "gguf", fsync=False), out),
    "statistics": lambda source, out: megtool.inspect(source, stats=True).tensors,
}


class Source:
    """A checkpoint in a store; `swap` puts another with files of the same sizes in its place."""

    def __init__(self, kind: type[Any], url: str, put: Callable[[str, bytes], object]) -> None:
        self.kind, self.url, self.put = kind, url, put
        self.num_requests = 0
        self.at: int | None = None
        self.swap: Callable[[], None] = lambda: None

    def count(self) -> None:
        """A request is about to be made."""
        if self.num_requests == self.at:
            self.at = None
            self.swap()
        self.num_requests += 1

    def forget(self) -> None:
        """Begin again, as a new process does."""
        store_index().forget(StorePath(self.url))
        object_cache().clear()
        self.num_requests = 0


@pytest.fixture(params=["store", "fsspec"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    name = f"bucket{secrets.token_hex(4)}"
    if request.param == "fsspec":
        fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
        memory = fsspec.filesystem("memory")
        made = Source(
            FsspecStore,
            f"fsspec+memory://{name}",
            lambda key, data: memory.pipe_file(f"/{name}/{key}", data),
        )
    else:
        store = MemoryStore(f"memory://{name}")
        register_store(store)
        made = Source(MemoryStore, store.url, store.put)
    for method in ("head", "list", "read"):
        actual = getattr(made.kind, method)

        def counted(*args: Any, actual: Any = actual, **named: Any) -> Any:
            made.count()
            return actual(*args, **named)

        monkeypatch.setattr(made.kind, method, counted)
    yield made
    made.forget()
    if request.param == "fsspec":
        memory.store.clear()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints with other values in files of the same names and sizes."""
    root = tmp_path_factory.mktemp("made")
    first = tiny_text.save(root / "first", dtype="bfloat16", **SIZES)
    second = tiny_text.save(root / "second", dtype="bfloat16", **SIZES)
    for file in second.glob("*.safetensors"):
        save_file({n: t * 0.5 for n, t in load_file(file).items()}, file, {"format": "pt"})
    assert {n: len(d) for n, d in contents(first).items()} == {
        n: len(d) for n, d in contents(second).items()
    }
    return first, second


@pytest.mark.parametrize(
    "verb", [pytest.param(v, marks=pytest.mark.slow) if v == "quantize" else v for v in VERBS]
)
def test_a_source_that_is_replaced_at_any_request(
    verb: str, source: Source, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    def upload(folder: Path) -> None:
        for name, data in contents(folder).items():
            source.put(f"hf/{name}", data)

    def run(folder: Path, at: int | None) -> Any:
        upload(folder)
        source.forget()
        source.at = at
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}" / "out"
        out.parent.mkdir()
        try:
            return VERBS[verb](f"{source.url}/hf", out)
        except SourceChangedError as e:
            assert not out.exists()
            assert e.file is not None
            assert e.file.startswith(source.url)
            return SourceChangedError

    before, after = folders
    source.swap = lambda: upload(after)
    replaced = run(after, None)
    expected = run(before, None)
    num_requests = source.num_requests
    assert num_requests > 3
    assert expected != replaced
    endings = [run(before, at) for at in range(num_requests)]
    assert endings[0] == replaced
    assert endings[-1] in (SourceChangedError, expected)
    assert all(ending in (SourceChangedError, expected, replaced) for ending in endings)
    assert SourceChangedError in endings
