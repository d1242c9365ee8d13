"""Folders of zarr arrays: what zarr-python and Megatron wrote is read element by element."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.errors import CheckpointError, FormatError, SourceChangedError
from megtool.formats import detect_format, open_checkpoint
from megtool.formats.zarr.layout import DTYPE_ATTRIBUTE
from megtool.pickles.zip_writer import encode_object
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.transport.encoded_chunks import SourceFiles
from tests.support.checkpoints.reads import contents

zarr = pytest.importorskip("zarr")
pytest.importorskip("numcodecs")
from numcodecs import LZ4, Blosc, Shuffle, Zlib, Zstd  # noqa: E402

from tests.support.errors import raises  # noqa: E402

KINDS = ("float32", "float64", "float16", "int64", "int32", "int8", "uint8", "bool", "complex64")


def numbers(shape, kind="float32", seed=0):
    """Random bytes of a type, without the zeros that a library might leave out."""
    size = int(np.prod(shape, dtype=int)) * np.dtype(kind).itemsize
    raw = np.random.default_rng(seed).integers(1, 255, size, np.uint8)
    if kind == "bool":
        raw &= 1
    return raw.view(kind).reshape(shape)


def check(root: Path, wanted: dict[str, np.ndarray]) -> Catalogue:
    found = open_checkpoint(root)
    held = contents(found)
    assert held.keys() == wanted.keys()
    for name, array in wanted.items():
        assert held[name].shape == array.shape
        assert held[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
    return found


def cells(catalogue: Catalogue) -> int:
    return int(catalogue.encoded_chunks.mask.sum()) if catalogue.encoded_chunks else 0


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("zarr")


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def arrays(draw):
    """How one array is created: the keywords of `create_array`, for v2 or v3."""
    shape, version = draw(shapes), draw(st.sampled_from([2, 3]))
    chunks = tuple(draw(st.integers(1, 4)) for _ in shape)
    out = {"shape": shape, "chunks": chunks, "dtype": draw(st.sampled_from(KINDS))}
    out["order"] = draw(st.sampled_from("CF")) if version == 2 else None
    if version == 3 and shape and draw(st.booleans()):
        out["shards"] = tuple(c * draw(st.integers(1, 3)) for c in chunks)
    if version == 2:
        compressors = [None, Zstd(), Blosc(), Zlib(), LZ4()]
        out["filters"] = draw(st.sampled_from([None, [Shuffle(np.dtype(out["dtype"]).itemsize)]]))
        out["chunk_key_encoding"] = {"name": "v2", "separator": draw(st.sampled_from("./"))}
        if out["dtype"] != "bool" and np.dtype(out["dtype"]).itemsize > 1 and draw(st.booleans()):
            out["dtype"] = np.dtype(out["dtype"]).newbyteorder(">")
    else:
        from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

        compressors = [None, ZstdCodec(), BloscCodec(), GzipCodec()]
        name = draw(st.sampled_from(["default", "v2"]))
        out["chunk_key_encoding"] = {"name": name, "separator": draw(st.sampled_from("./"))}
    out["compressors"] = draw(st.sampled_from(compressors))
    return version, {k: v for k, v in out.items() if v is not None or k == "compressors"}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=st.lists(arrays(), min_size=1, max_size=3), seed=st.integers(0, 999), fill=st.data())
def test_whatever_zarr_writes_is_read(scratch, made, seed, fill):
    root = scratch / "any"
    shutil.rmtree(root, ignore_errors=True)
    zarr.open_group(root, mode="w", zarr_format=made[0][0])
    wanted = {}
    for k, (version, how) in enumerate(made):
        name = f"layer.{k}/weight"
        value = fill.draw(st.sampled_from([0, 1])) if how["dtype"] != "bool" else 0
        zarr.open_group(root / f"layer.{k}", mode="w", zarr_format=version)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = zarr.create_array(root / name, zarr_format=version, fill_value=value, **how)
        data = numbers(how["shape"], np.dtype(how["dtype"]).newbyteorder("<").name, seed)
        part = tuple(slice(fill.draw(st.integers(0, n)), None) for n in data.shape)
        if data.size:
            array[part] = data[part]
        whole = np.full(data.shape, value, data.dtype)
        whole[part] = data[part]
        wanted[name] = whole if data.size else data
    check(root, wanted)


def test_raw_chunks_are_extents_and_encoded_ones_cells(tmp_path):
    group = zarr.open_group(tmp_path, mode="w", zarr_format=3)
    wanted = {}
    for name, how, num in (
        ("plain", {"chunks": (4, 3), "compressors": None}, 0),
        ("sharded", {"chunks": (2, 3), "shards": (4, 6), "compressors": None}, 0),
        ("packed", {"chunks": (4, 3)}, 9),
    ):
        wanted[name] = numbers((10, 8))
        group.create_array(name, shape=(10, 8), dtype="float32", **how)[:] = wanted[name]
        one = open_checkpoint(tmp_path).select(lambda n, name=name: n == name)
        assert cells(one) == num
    found = check(tmp_path, wanted)
    some = found.select(lambda n: n != "sharded")
    assert cells(some) == 9
    assert {n: x.tobytes() for n, x in contents(some).items()} == {
        n: x.tobytes() for n, x in wanted.items() if n != "sharded"
    }


def test_missing_chunks_hold_the_fill_value(tmp_path):
    for version, value in ((2, -1.5), (3, float("nan"))):
        root = tmp_path / str(version)
        array = zarr.create_array(
            root,
            shape=(5, 5),
            chunks=(2, 2),
            dtype="float64",
            fill_value=value,
            zarr_format=version,
        )
        array[:2, :2] = 7
        wanted = np.full((5, 5), value)
        wanted[:2, :2] = 7
        check(root, {str(version): wanted})


def test_decoded_cells_are_held_within_their_bound(tmp_path):
    array = zarr.create_array(tmp_path / "t", shape=(64, 64), chunks=(8, 8), dtype="float64")
    array[:] = numbers((64, 64), "float64")
    found = open_checkpoint(tmp_path / "t")
    times = []
    decode = found.encoded_chunks.read
    found.encoded_chunks = type(found.encoded_chunks)(
        found.encoded_chunks.mask, lambda i: times.append(i) or decode(i)
    )
    with SourceFiles(Files(), [found], cache_bytes=20 * 512) as readers:
        for shard in [*range(64), 63, 62, 0]:
            with readers.use(found.encoded_chunk_path(shard)):
                pass
        assert len(readers._entries) == 20
    assert times == [*range(64), 0]


# ---- Megatron's zarr back end


def megatron_save(root: Path, iteration: int = 10, folder: str = "") -> dict[str, np.ndarray]:
    """What Megatron-Core before 0.16 leaves behind with `--dist-ckpt-format zarr`."""
    home = root / f"iter_{iteration:07d}" / folder
    home.mkdir(parents=True)
    wanted = {}
    for name, kind, shape, chunks in (
        ("decoder.layers.self_attention.linear_qkv.weight", "bfloat16", (4, 12, 8), (1, 6, 8)),
        ("embedding.word_embeddings.weight", "bfloat16", (10, 8), (5, 8)),
        ("optimizer.state.exp_avg.output_layer.weight", "float32", (10, 8), (5, 4)),
    ):
        data = numbers(shape, "uint16" if kind == "bfloat16" else kind, len(name))
        zarr.create_array(
            home / name,
            shape=shape,
            chunks=chunks,
            dtype=data.dtype,
            compressors=None,
            fill_value=None,
            zarr_format=2,
        )[...] = data
        if kind == "bfloat16":
            file = home / name / ".zarray"
            held = json.loads(file.read_text())
            file.write_text(json.dumps(held | {"dtype": "bfloat16", "fill_value": None}))
        wanted[name] = data
    (home / "rng_state").mkdir()
    torch.save({"seed": 7}, home / "rng_state/shard_0.0_1.2.pt")
    torch.save({"iteration": iteration, "checkpoint_version": 3.0}, home / "common.pt")
    backends = {"sharded_backend": "zarr", "sharded_backend_version": 1, "common_backend": "torch"}
    (home / "metadata.json").write_text(json.dumps(backends))
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return wanted


def test_megatrons_zarr_back_end(tmp_path):
    wanted = megatron_save(tmp_path)
    assert "zarr" in detect_format(tmp_path).names
    found = check(tmp_path, wanted)
    assert found.format == "zarr"
    assert not cells(found)
    assert found["embedding.word_embeddings.weight"].dtype.name == "bfloat16"
    assert found.metadata["iteration"] == 10
    assert found.metadata["common"]["checkpoint_version"] == 3.0
    (held,) = found.objects.values()
    assert (held.name, held.kind) == ("rng_state/shard_0.0_1.2", "object")
    assert check(tmp_path / "iter_0000010", wanted).metadata["iteration"] == 10


def test_bfloat16_without_a_name_and_nemos_folder(tmp_path):
    wanted = megatron_save(tmp_path, folder="weights")
    home = tmp_path / "iter_0000010/weights"
    file = home / "embedding.word_embeddings.weight/.zarray"
    file.write_text(file.read_text().replace('"bfloat16"', '"|V2"'))
    change(file, fill_value="AAA=")
    check(tmp_path / "iter_0000010", wanted)
    check(home, wanted)


def test_a_chunk_that_megatron_must_have_written_is_missed(tmp_path):
    megatron_save(tmp_path)
    (tmp_path / "iter_0000010/embedding.word_embeddings.weight/1.0").unlink()
    with raises(
        FormatError, match="1 chunk files are missing", tensor="embedding.word_embeddings.weight"
    ):
        open_checkpoint(tmp_path)


def test_an_unfinished_save_is_called_that(tmp_path):
    megatron_save(tmp_path)
    folder = tmp_path / "iter_0000010"
    (folder / "metadata.json").unlink()
    with raises(FormatError, id="unfinished-save"):
        open_checkpoint(folder)


# ---- bad input


@pytest.fixture
def sharded(tmp_path):
    root = tmp_path / "ckpt"
    zarr.open_group(root, mode="w", zarr_format=3)
    how = {"shape": (6, 4), "chunks": (2, 2), "shards": (4, 4), "dtype": "float32"}
    zarr.create_array(root / "raw", compressors=None, **how)[:] = numbers((6, 4))
    zarr.create_array(root / "zst", **how)[:] = numbers((6, 4))
    zarr.create_array(root / "old", shape=(4,), chunks=(2,), dtype="i4", zarr_format=2)[:] = 5
    return root


def change(file: Path, **what) -> None:
    held = json.loads(file.read_text())
    file.write_text(json.dumps(held | what))


REGULAR = {"name": "regular", "configuration": {"chunk_shape": [4, 4]}}
SHARDING = {"name": "sharding_indexed", "configuration": {"chunk_shape": [3, 3]}}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"shape": [-1, 4]}, "the shape is"),
        ({"shape": "6,4"}, "not a list"),
        ({"shape": [1 << 40, 1 << 40]}, "too many elements"),
        ({"shape": [1 << 30, 4]}, "into .* parts"),
        ({"shape": [1] * 40}, "the shape is"),
        ({"shape": [True, 4]}, "the shape is"),
        ({"shape": [6]}, "does not fit the shape"),
        ({"chunk_grid": {"name": "rectangular"}}, "the chunk grid"),
        ({"chunk_grid": 3}, "not a JSON object"),
        ({"chunk_grid": REGULAR | {"configuration": {"chunk_shape": [0, 4]}}}, "chunk shape"),
        ({"chunk_grid": REGULAR | {"configuration": {"chunk_shape": [5, 4]}}}, "do not divide"),
        ({"data_type": "string"}, "not supported"),
        ({"data_type": {"name": "r16"}}, "not supported"),
        ({"codecs": []}, "no codec"),
        ({"codecs": [{"name": "numcodecs.pickle"}]}, "unknown"),
        ({"codecs": [SHARDING]}, "do not divide"),
        ({"chunk_key_encoding": {"name": "hilbert"}}, "chunk key encoding"),
        ({"fill_value": "much"}, "fill value"),
        ({"attributes": {DTYPE_ATTRIBUTE: "bfloat16"}}, "declared as"),
        ({"storage_transformers": [{"name": "x"}]}, "transformer"),
        ({"node_type": "tree"}, "node_type"),
        ({"zarr_format": 4}, "zarr_format"),
    ],
)
def test_metadata_that_makes_no_sense(sharded, what, says):
    change(sharded / "raw/zarr.json", **what)
    with pytest.raises(FormatError, match=says) as e:
        open_checkpoint(sharded)
    assert "raw" in e.value.file


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"filters": [{"id": "pickle"}]}, "codec 'pickle' is unknown"),
        ({"compressor": {"id": "evil"}}, "is unknown"),
        ({"compressor": "zstd"}, "not a JSON object"),
        ({"dtype": "|O"}, "not supported"),
        ({"dtype": [["a", "<f4"]]}, "not supported"),
        ({"order": "Z"}, "the order"),
        ({"dimension_separator": "../"}, "separator"),
        ({"zarr_format": 3}, "zarr_format"),
    ],
)
def test_old_metadata_that_makes_no_sense(sharded, what, says):
    change(sharded / "old/.zarray", **what)
    with pytest.raises(FormatError, match=says):
        open_checkpoint(sharded)


def test_a_shard_that_contradicts_its_index(sharded):
    file = sharded / "raw/c/0/0"
    good = file.read_bytes()
    for bad, says in (
        (good[:20], "lacks an index"),
        (good[:-70] + good[-68:], "has a chunk of"),
        (good[:-9] + b"\7" + good[-8:], "checksum"),
        (good[:-1] + b"\0", "checksum"),
    ):
        file.write_bytes(bad)
        with pytest.raises(FormatError, match=says):
            open_checkpoint(sharded)


def test_a_damaged_cell_is_named(sharded):
    file = sharded / "zst/c/1/0"
    good = file.read_bytes()
    file.write_bytes(b"damaged" + good[7:])
    found = open_checkpoint(sharded)
    with raises(FormatError, match="cannot be decoded", tensor="zst", file=file):
        contents(found)
    file.write_bytes(good[:-30] + b"damaged" * 10)
    with raises(FormatError, match="an index with a wrong checksum", tensor="zst", file=file):
        open_checkpoint(sharded)


def test_truncated_raw_chunks_and_links(tmp_path):
    root = tmp_path / "ckpt"
    array = zarr.create_array(root, shape=(4,), chunks=(2,), dtype="i4", compressors=None)
    array[:] = numbers((4,), "int32")
    (root / "c/0").write_bytes(b"123")
    with pytest.raises(FormatError, match="holds 3 bytes"):
        open_checkpoint(root)
    (root / "c/0").unlink()
    (tmp_path / "secret").write_bytes(b"12345678")
    (root / "c/0").symlink_to(tmp_path / "secret")
    with raises(FormatError, id="unsafe-path"):
        open_checkpoint(root)


def test_huge_compressed_chunks_are_refused(sharded):
    grid = {"name": "regular", "configuration": {"chunk_shape": [1 << 30, 1 << 10]}}
    change(sharded / "zst/zarr.json", shape=[1 << 30, 1 << 10], chunk_grid=grid)
    held = json.loads((sharded / "zst/zarr.json").read_text())
    change(sharded / "zst/zarr.json", codecs=held["codecs"][0]["configuration"]["codecs"])
    with pytest.raises(FormatError, match="too large to decode"):
        open_checkpoint(sharded)


def test_a_folder_without_arrays_and_a_source_that_changes(sharded, tmp_path):
    zarr.open_group(tmp_path / "empty", mode="w")
    with raises(FormatError, id="not-a-checkpoint"):
        open_checkpoint(tmp_path / "empty")
    found = open_checkpoint(sharded)
    (sharded / "raw/c/0/0").write_bytes(b"")
    with pytest.raises(SourceChangedError):
        found.check_unchanged()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bytes_never_crash(sharded, data):
    files = sorted(p for p in sharded.rglob("*") if p.is_file() and "zst" not in p.parts)
    file = data.draw(st.sampled_from(files))
    good = file.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    value = data.draw(st.integers(0, 255))
    file.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
    try:
        contents(open_checkpoint(sharded))
    except CheckpointError:
        pass
    finally:
        file.write_bytes(good)


def test_a_hostile_common_state_runs_nothing(tmp_path):
    megatron_save(tmp_path)
    path = tmp_path / "iter_0000010/common.pt"
    path.write_bytes(encode_object([1]))
    with pytest.raises(FormatError, match="not a dict"):
        open_checkpoint(tmp_path)
