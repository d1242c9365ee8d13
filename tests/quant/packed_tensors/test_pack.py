"""Feeds of weights: the same windows as the whole weight encoded at once, however it is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megtool.dtypes import dtype
from megtool.errors import FormatError
from megtool.formats.safetensors.reader import open_checkpoint
from megtool.number_formats.decode import SCALE, SCALE_2
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout
from megtool.quant.packed_tensors import pack
from megtool.quant.packed_tensors.modelopt_tensors import compute_global_scale, list_module_specs
from megtool.quant.packed_tensors.pack import WeightToPack, find_amaxes, grain_of, make_pack_feeds
from megtool.quant.qparams import WeightQParams
from megtool.quant.recipes.formats import FORMATS, RecipeFormat, packing_of
from megtool.storage.files import Files
from megtool.tensors.placement import Placement
from megtool.transport.computed_tensors import RegionReader
from megtool.transport.encoded_chunks import SourceFiles
from megtool.transport.shard_locator import ShardLocator
from megtool.transport.strided import Buffers
from tests.support.errors import raises

ROWS, COLUMNS = 256, 384


def weight(folder: Path, algo: str, columns: np.ndarray | None = None) -> WeightToPack:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS).to(torch.bfloat16)
    save_file({"w": x}, folder / "model.safetensors")
    groups = FORMATS[algo].groups
    form = RecipeFormat(name="f", algo=algo, group_size=groups[0] if groups else 0)
    return WeightToPack(
        placement=Placement.identity("w", (ROWS, COLUMNS)),
        shape=(ROWS, COLUMNS),
        dtype=dtype("bfloat16"),
        qparams=WeightQParams(module="m", format=form, smoothing_scale=columns),
    )


def made(
    folder: Path, w: WeightToPack, amax: float, tile_bytes: int, at: int = 0
) -> dict[str, np.ndarray]:
    """All that the feeds of a weight write, into arrays of twice its rows."""
    catalogue, files = open_checkpoint(folder), Files()
    held = list_module_specs("m", (2 * ROWS, COLUMNS), w.qparams.format, w.dtype, amax=amax)
    computed = [(h.part.role, h.tensor) for h in held if h.part is not None and h.value is None]
    out = {role: np.zeros(t.shape, f"<u{t.dtype.itemsize}") for role, t in computed}
    with SourceFiles(files, [catalogue]) as readers:
        taking = RegionReader(
            ShardLocator(catalogue), files, readers, Buffers(), tile_bytes=tile_bytes
        )
        for feed in make_pack_feeds(w, computed, row_offset=at, amax=amax):
            total = 0
            for number, lo, tile in feed.generate(taking):
                region = feed.writes[number]
                index = tuple(
                    slice(a + b, a + b + n)
                    for a, b, n in zip(region.lo, lo, tile.shape, strict=True)
                )
                out[computed[number][0]][index] = tile
                total += tile.nbytes
            assert total == feed.num_bytes
    return out


@pytest.mark.parametrize("algo", FORMATS)
@pytest.mark.parametrize(("tile_bytes", "at"), [(3000, ROWS), (50_000, 0), (1 << 20, ROWS)])
def test_cut_anyhow_it_is_the_whole_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str, tile_bytes: int, at: int
) -> None:
    monkeypatch.setattr(pack, "UNIT_BYTES", 100_000)
    w = weight(tmp_path / "in", algo)
    catalogue = open_checkpoint(tmp_path / "in")
    (amax,) = find_amaxes(catalogue, [w], Files(), threads=2)
    found = made(tmp_path / "in", w, amax, tile_bytes, at)
    packing = packing_of(w.qparams.format)
    parts = layout(packing, (ROWS, COLUMNS))
    given = {p.role: compute_global_scale(algo, amax) for p in parts if p.role == SCALE_2}
    if algo == "FP8":
        given[SCALE] = np.asarray(np.float32(amax) / np.float32(448))
    with SourceFiles(Files(), [catalogue]) as readers:
        taking = RegionReader(
            ShardLocator(catalogue), Files(), readers, Buffers(), tile_bytes=1 << 20
        )
        with taking.open(w.placement, w.dtype) as run:
            x = run.read(0, ROWS * COLUMNS).reshape(ROWS, COLUMNS).copy()
    want = encode(packing, parts, x, "bfloat16", (0, 0), (ROWS, COLUMNS), scales=given)
    for role, array in found.items():
        middle = len(array) // 2
        half, other = (array[middle:], array[:middle]) if at else (array[:middle], array[middle:])
        assert half.tobytes() == np.ascontiguousarray(want[role]).tobytes(), role
        assert not other.any()


def test_amax_is_of_the_weight_after_its_factors(tmp_path: Path) -> None:
    columns = np.ones(COLUMNS, np.float32)
    columns[7] = 100
    w = weight(tmp_path / "in", "NVFP4", columns)
    catalogue = open_checkpoint(tmp_path / "in")
    with SourceFiles(Files(), [catalogue]) as readers:
        taking = RegionReader(
            ShardLocator(catalogue), Files(), readers, Buffers(), tile_bytes=1 << 20
        )
        with taking.open(w.placement, dtype("float32")) as run:
            x = run.read(0, ROWS * COLUMNS).reshape(ROWS, COLUMNS) * columns
    assert find_amaxes(catalogue, [w], Files(), threads=1) == [float(np.abs(x).max())]


def test_blocks_are_not_cut() -> None:
    for algo, rows in (("FP8_PB_WO", 128), ("W4A16_AWQ", 2), ("NVFP4", 1)):
        groups = FORMATS[algo].groups
        w = WeightToPack(
            placement=Placement.identity("w", (256, 256)),
            shape=(256, 256),
            dtype=dtype("bfloat16"),
            qparams=WeightQParams(
                module="m", format=RecipeFormat(name="f", algo=algo, group_size=groups[0])
            ),
        )
        assert grain_of(w) == rows


def test_no_numbers_are_found_in_either_pass(tmp_path: Path) -> None:
    w = weight(tmp_path / "in", "W8A16")
    file = tmp_path / "in" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2:] = b"\x80\x7f"  # infinity
    file.write_bytes(data)
    with raises(FormatError, id="nan-weights"):
        made(tmp_path / "in", w, 1.0, 1 << 20)
    with raises(FormatError, id="nan-weights"):
        find_amaxes(open_checkpoint(tmp_path / "in"), [w], Files(), threads=1)
