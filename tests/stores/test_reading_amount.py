"""What is read of a store: hardly more bytes than are needed, in many requests at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megtool
from megtool.storage.objects.cache import CACHE_BYTES, object_cache
from tests.support.models import tiny_llama
from tests.support.stores.read_counts import CountingStore

SIZES = {
    "vocab_size": 8192,
    "num_hidden_layers": 3,
    "hidden_size": 1024,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
}
SOURCES = {
    "hf": {"to": "hf", "max_shard_size": "20MB"},
    "torch_dist": {"to": "torch_dist", "tp": 2},
    "dcp": {"to": "dcp", "dp": 2},
    "torch_checkpointing": {"to": "torch_checkpointing", "dp": 2},
    "megatron": {"to": "megatron", "tp": 2},
    "zarr": {"to": "zarr"},
}
VERBS: dict[str, Callable[[str, Path, Path], object]] = {
    "stats": lambda url, _out, _original: megtool.inspect(url, stats=True),
    "verify": lambda url, _out, _original: megtool.verify(url),
    "compare": lambda url, _out, original: megtool.verify(url, original),
    "rows": lambda url, out, _: megtool.reshard(url, out, to="hf", fsync=False),
    "columns": lambda url, out, _: megtool.reshard(url, out, to="torch_dist", tp=4, fsync=False),
    "digests": lambda url, out, _: megtool.reshard(
        url, out, to="megatron", tp=2, digest="all", fsync=False
    ),
    "export": lambda url, out, _: megtool.export(url, out, to="trtllm-legacy", tp=2, fsync=False),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 80 MB in several formats."""
    root = tmp_path_factory.mktemp("amount") / "sources"
    root.mkdir()
    tiny_llama.save(root / "original", **SIZES)
    for name, options in SOURCES.items():
        megtool.reshard(root / "original", root / name, fsync=False, **options)
    return root


@pytest.fixture(scope="module")
def store(sources: Path) -> Iterator[CountingStore]:
    made = CountingStore("memory://amount", latency=0.005)
    for name in SOURCES:
        made.upload(sources / name, name)
    yield made
    made.forget()


def num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("verb", VERBS)
def test_hardly_more_is_read_than_is_needed(
    sources: Path, store: CountingStore, name: str, verb: str, tmp_path: Path
) -> None:
    store.forget()
    is_parallel = verb in ("stats", "compare")
    store.awaited = 9 if is_parallel else 0
    VERBS[verb](f"{store.url}/{name}", tmp_path / "out", sources / "original")
    assert store.num_bytes_read <= 1.02 * num_bytes(sources / name)
    assert object_cache().peak_bytes <= CACHE_BYTES
    if is_parallel:
        assert store.most_in_flight > 8


@pytest.mark.parametrize("name", SOURCES)
def test_headers_take_few_requests(sources: Path, store: CountingStore, name: str) -> None:
    files = [file for file in (sources / name).rglob("*") if file.is_file()]
    store.forget()
    megtool.inspect(f"{store.url}/{name}")
    tensors = 30  # a header of `torch.save` has one for each tensor
    is_pickled = name in ("megatron", "torch_checkpointing")
    assert len(store.reads) <= 2 * len(files) + (2 * tensors if is_pickled else 0)
    assert store.lists + store.heads <= 10
    assert store.num_bytes_read < 0.02 * num_bytes(sources / name)


def test_a_part_of_a_checkpoint_reads_its_part(
    sources: Path, store: CountingStore, tmp_path: Path
) -> None:
    store.forget()
    out = tmp_path / "part"
    megtool.reshard(f"{store.url}/hf", out, to="hf", select=["model.layers.1.*"], fsync=False)
    assert store.num_bytes_read < 0.4 * num_bytes(sources / "hf")
