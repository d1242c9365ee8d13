"""Reading faults R1-R5: a damaged checkpoint ends in one typed error, and nothing is written.

What each format refuses is proved beside it; here the same damage goes through whole commands.
"""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.errors import (
    CoverageError,
    DigestError,
    FormatError,
)
from tests.support.checkpoints.damage import (
    DATA_FILES,
    DIGESTED,
    FORMATS,
    SMALL,
    attempt,
    files_of,
    payload,
    put,
    result,
)
from tests.support.folders import stored_tensors
from tests.support.models import tiny_llama

# ---- R1: flipped bits


@pytest.mark.parametrize("kind", DIGESTED)
def test_any_flipped_bit_of_a_tensor_is_found(
    copied: Callable[[str], Path], sound: dict[str, Path], kind: str
) -> None:
    rng = random.Random(kind)
    path = copied(kind)
    padding = ("word_embeddings", "output_layer")
    extents = [x for x in payload(path) if not any(p in x[3] for p in padding)]
    for file, at, length, name in extents * 2:
        whole = file.read_bytes()
        data = bytearray(whole)
        data[at + rng.randrange(length)] ^= 1 << rng.randrange(8)
        put(file, bytes(data))
        error = attempt(path)
        assert isinstance(error, DigestError), (file, at, name)
        assert error.tensor
        assert str(path) in (error.file or "")
        assert error.hint
        report = verify(path)
        assert (report.exit_status, report.verdict) == (7, "different")
        report = verify(sound[kind], path)
        assert report.exit_status == 7
        put(file, whole)
        shutil.rmtree(path.parent / ".result.megtool")
    assert verify(path).verdict == "ok"


@pytest.mark.parametrize(("kind", "verdict"), [("safetensors", "ok"), ("gguf", "unverified")])
def test_a_checkpoint_without_digests_is_unverified_and_never_ok(
    sound: dict[str, Path], kind: str, verdict: str
) -> None:
    """A single file of megtool has its digests in its header; the GGUF is of another tool."""
    report = verify(sound[kind])
    assert (report.verdict, report.exit_status) == (verdict, 0)


def test_a_hugging_face_folder_from_elsewhere_is_unverified(tmp_path: Path) -> None:
    original = tiny_llama.save(tmp_path / "hf", **SMALL)
    assert verify(original).verdict == "unverified"
    report = reshard(original, tmp_path / "out", to="torch_dist", digest="none")
    assert report.unverified == len(stored_tensors(original))
    assert verify(tmp_path / "out").verdict == "unverified"


def harmless(path: Path, want: dict[str, Any], where: object) -> None:
    """What came through in spite of the damage holds exactly the original tensors."""
    assert result(path) == want, where


def check_flips(
    path: Path, want: dict[str, Any], *, every: int, options: dict[str, Any]
) -> tuple[int, int]:
    """Flip a bit of every n-th byte outside tensors; how many were refused and how many harmless.

    A changed value in config.json is not damage that anybody could see, unless the model changes.
    """
    rng = random.Random(every)
    data = {x[0]: set() for x in payload(path)}
    for file, at, length, _ in payload(path):
        data[file] |= set(range(at, at + length))
    refused = passed = 0
    for file in files_of(path):
        whole = file.read_bytes()
        for at in range(rng.randrange(every), len(whole), every):
            if at in data.get(file, ()):
                continue
            changed = bytearray(whole)
            changed[at] ^= 1 << rng.randrange(8)
            put(file, bytes(changed))
            if attempt(path, **options) is None:
                passed += 1
                harmless(path, want, (file.name, at, whole[max(0, at - 20) : at + 20]))
            else:
                refused += 1
            staging = path.parent / ".result.megtool"
            if staging.exists():
                shutil.rmtree(staging)
        put(file, whole)
    return refused, passed


@pytest.mark.parametrize("every", [131, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["hf", "torch_dist", "dcp"])
def test_a_flipped_bit_anywhere_else_is_refused_or_harmless(
    copied: Callable[[str], Path], kind: str, every: int
) -> None:
    path = copied(kind)
    options = {"to": "hf"}
    assert attempt(path, **options) is None
    want = result(path)
    refused, passed = check_flips(path, want, every=every, options=options)
    assert refused > 10
    assert passed > 0


def test_a_flipped_bit_in_a_gguf_header_ends_well(copied: Callable[[str], Path]) -> None:
    """GGUF keeps nothing twice, so a changed type or offset may pass; it never crashes."""
    path = copied("gguf")
    whole = path.read_bytes()
    outcomes = set()
    for at in range(3, min(len(whole), 1500), 31):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        put(path, bytes(changed))
        error = attempt(path, to="hf")
        outcomes.add(error is None)
        if error is None:
            result(path)
        staging = path.parent / ".result.megtool"
        if staging.exists():
            shutil.rmtree(staging)
    assert False in outcomes


# ---- R2: truncation


def cuts(size: int, header: int, every: int) -> Iterator[int]:
    """Where to cut a file: in its header, at every 4 KiB, and at its last bytes."""
    yield from range(0, min(header, size), every)
    yield from range(0, size, 4096)
    yield from range(max(0, size - 3), size)


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*FORMATS, "gguf"])
def test_every_truncation_is_refused(copied: Callable[[str], Path], kind: str, every: int) -> None:
    path = copied(kind)
    for file in files_of(path):
        if file.name == "latest_checkpointed_iteration.txt":
            continue
        whole = file.read_bytes()
        for size in sorted(set(cuts(len(whole), 2000, every))):
            put(file, whole[:size])
            error = attempt(path)
            if error is None:
                assert whole[size:].isspace(), (file.name, size)
                result(path)
            else:
                assert error.file or error.tensor, (file.name, size)
        put(file, whole)
    assert attempt(path) is None


# ---- R4: files that are missing, too many, swapped or old


@pytest.mark.parametrize("kind", DIGESTED)
def test_a_missing_file_is_named(copied: Callable[[str], Path], kind: str) -> None:
    path = copied(kind)
    for file in files_of(path):
        if not file.name.endswith(DATA_FILES):
            continue
        file.rename(path.parent / "away")
        error = attempt(path)
        assert isinstance(error, FormatError)
        assert file.name in str(error)
        (path.parent / "away").rename(file)
    assert attempt(path) is None


@pytest.mark.parametrize("kind", ["hf", "torch_dist", "dcp"])
def test_an_extra_shard_changes_nothing(
    copied: Callable[[str], Path], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = copied(kind)
    assert attempt(path, to="hf") is None
    want = result(path)
    one = next(f for f in files_of(path) if f.name.endswith(DATA_FILES))
    name = "__9_0.distcp" if one.suffix == ".distcp" else "extra.safetensors"
    shutil.copy(one, one.with_name(name))
    caplog.set_level("WARNING")
    assert attempt(path, to="hf") is None
    assert result(path) == want
    assert name in caplog.text


@pytest.mark.parametrize("kind", DIGESTED)
def test_swapped_files_are_refused(copied: Callable[[str], Path], kind: str) -> None:
    path = copied(kind)
    one, two, *_ = [f for f in files_of(path) if f.name.endswith(DATA_FILES)]
    a, b = one.read_bytes(), two.read_bytes()
    put(one, b)
    put(two, a)
    assert isinstance(attempt(path), FormatError | DigestError)


@pytest.mark.parametrize("kind", DIGESTED)
def test_a_shard_of_an_older_iteration_is_refused(
    copied: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    path = copied(kind)
    older = tiny_llama.save(tmp_path / "older", seed=3, dtype="float16", **SMALL)
    reshard(older, tmp_path / "old", **FORMATS[kind])
    stale = next(f for f in files_of(path) if f.name.endswith(DATA_FILES))
    put(stale, (tmp_path / "old" / stale.relative_to(path)).read_bytes())
    assert isinstance(attempt(path), DigestError)
    assert verify(path).verdict == "different"


def test_an_unfinished_save_is_refused(copied: Callable[[str], Path]) -> None:
    path = copied("torch_dist")
    (path / "release" / "metadata.json").unlink()
    error = attempt(path)
    assert isinstance(error, FormatError)
    assert "unfinished" in error.message


# ---- R5: coverage


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    """Edit the metadata that torch reads."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def drop_chunk(metadata: Any) -> None:
    key = next(k for k in metadata.storage_data if k.fqn.endswith("linear_proj.weight"))
    del metadata.storage_data[key]
    chunks = metadata.state_dict_metadata[key.fqn].chunks
    chunks[:] = [c for c in chunks if c.offsets != key.offset]


def move_chunk(metadata: Any) -> None:
    import torch

    key = next(
        k
        for k in metadata.storage_data
        if k.fqn.endswith("linear_proj.weight") and k.offset[-1] > 0
    )
    at = torch.Size([*key.offset[:-1], key.offset[-1] - 1])
    metadata.storage_data[type(key)(key.fqn, at, key.index)] = metadata.storage_data.pop(key)
    for chunk in metadata.state_dict_metadata[key.fqn].chunks:
        if chunk.offsets == key.offset:
            chunk.offsets = at


@pytest.mark.parametrize("change", [drop_chunk, move_chunk])
def test_holes_and_overlaps_are_refused(
    copied: Callable[[str], Path], change: Callable[[Any], None]
) -> None:
    path = copied("torch_dist")
    change_metadata(path / "release", change)
    error = attempt(path)
    assert isinstance(error, CoverageError)
    assert "linear_proj.weight" in (error.tensor or "")
