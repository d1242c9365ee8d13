"""Codes and scales in other forms: moved byte for byte, there and back, cut and joined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.dtypes import dtype
from megtool.errors import CoverageError, FormatError, UsageError
from megtool.export.hf.read_quantized import read_quantized_modules
from megtool.export.quantized_module import QuantizedModule
from megtool.export.repack import WeightSlice, plan_repack
from megtool.export.repack_region import encode_scales
from megtool.export.small_tensors import reciprocal
from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart, PartSpan
from megtool.quant.recipes.formats import FORMATS
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed
from tests.support.checkpoints.module_folders import (
    KINDS,
    ModuleSpec,
    PartTensors,
    carried_out,
    decoded,
    make_modelopt,
    modelopt_held,
    planned,
    tensors_in,
    to_compressed,
    to_modelopt,
)
from tests.support.errors import raises

WHOLE = [a for a in FORMATS if not FORMATS[a].has_branch]
BRIDGED = [a for a in WHOLE if a != "W4A8_AWQ"]
"""compressed-tensors has no second scale for INT4."""


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


@settings(max_examples=12)
@given(
    algo=st.sampled_from(BRIDGED),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    group=st.sampled_from([32, 64]),
    smoothed=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_there_and_back_is_the_identity(
    algo: str, blocks: tuple[int, int], group: int, smoothed: bool, seed: int
) -> None:
    unit = {"FP8_PB_WO": (128, 128)}.get(algo, (2, 64))
    wanted = ModuleSpec(
        name="model.layers.0.mlp.up_proj",
        shape=(blocks[0] * unit[0], blocks[1] * unit[1]),
        algo=algo,
        group=group if len(FORMATS[algo].groups) > 2 else 0,
        smoothed=smoothed and FORMATS[algo].smooths,
    )
    with TemporaryDirectory() as name:
        here = Path(name)
        first = make_modelopt(here / "a", [wanted], seed=seed)
        middle = to_compressed(read_quantized_modules(first), here / "b")
        last = to_modelopt(read_quantized_modules(middle), here / "c")
        again = to_compressed(read_quantized_modules(last), here / "d")
        before, after = tensors_in(first), tensors_in(last)
        assert set(before) == set(after)
        for key, t in before.items():
            if "NVFP4" in algo and key.endswith(("scale_2", "input_scale")):
                want = reciprocal(reciprocal(t.numpy()))
                assert after[key].numpy() == want
                assert abs(int(want.view("<i4")) - int(t.numpy().view("<i4"))) <= 1
                continue
            assert (t.dtype, t.shape) == (after[key].dtype, after[key].shape), key
            assert bits(t) == bits(after[key]), key
        once, twice = tensors_in(middle), tensors_in(again)
        assert {n: bits(t) for n, t in once.items()} == {n: bits(t) for n, t in twice.items()}
        one, two, three = decoded(first), decoded(middle), decoded(last)
        for key, value in one.items():
            rtol = 5 * 2.0**-24 if "NVFP4" in algo else 0  # a divisor is a rounded reciprocal
            np.testing.assert_allclose(two[key], value, rtol=rtol, atol=0)
            np.testing.assert_allclose(three[key], value, rtol=rtol, atol=0)


@settings(max_examples=12)
@given(
    algo=st.sampled_from(WHOLE),
    cut=st.sampled_from(["rows", "columns"]),
    seed=st.integers(0, 1 << 16),
)
def test_cut_and_joined_is_the_identity(algo: str, cut: str, seed: int) -> None:
    """Weights are cut in two, and made of both halves again."""
    shape = (256, 256)
    wanted = ModuleSpec(name="m", shape=shape, algo=algo)
    with TemporaryDirectory() as name:
        here = Path(name)
        folder = read_quantized_modules(make_modelopt(here / "a", [wanted], seed=seed))
        coded = folder.modules[0]
        made = []
        dim = 0 if cut == "rows" else 1
        half = (128, 256) if cut == "rows" else (256, 128)
        for number in range(2):
            box = [(0, 256), (0, 256)]
            box[dim] = (128 * number, 128 * number + 128)
            piece = replace(coded, name=f"half{number}", shape=half)
            packing, held = modelopt_held(piece)
            made.append((plan_repack([WeightSlice(coded, box[0], box[1])], packing, held), held))
        halves = carried_out(folder, made, here / "b")
        want = decoded(here / "a")["m.weight"]
        parts = _decoded_parts(halves, coded, half)
        assert np.array_equal(np.concatenate(parts, axis=dim), want)


def _decoded_parts(
    folder: Path, coded: QuantizedModule, shape: tuple[int, int]
) -> list[np.ndarray[Any, Any]]:
    from megtool.number_formats.decode import decode
    from tests.support.checkpoints.module_folders import NAMES

    held, out = tensors_in(folder), []
    parts = layout(coded.packing, shape)
    for number in range(2):
        windows = {}
        for part in parts:
            t = held[f"half{number}.{NAMES[part.role]}"]
            array = np.frombuffer(bits(t), dtype(part.dtype).view).reshape(part.shape)
            windows[part.role] = array
        out.append(decode(coded.packing, parts, windows, (0, 0), shape))
    return out


def joined(
    names: tuple[str, ...], folder: Path, algo: str, **given: Any
) -> tuple[list[Any], PartTensors, str]:
    """Siblings of a folder as one weight."""
    source = read_quantized_modules(folder)
    by_name = {c.name: c for c in source.modules}
    slices, row = [], 0
    for name in names:
        slices.append(WeightSlice.of_module(by_name[name], (row, 0)))
        row += by_name[name].shape[0]
    first = by_name[names[0]]
    whole = replace(first, name="joined", shape=(row, first.shape[1]))
    packing, held = modelopt_held(whole)
    return plan_repack(slices, packing, held, **given), held, packing


@pytest.mark.parametrize("algo", ["FP8_PER_CHANNEL_PER_TOKEN", "W4A16_AWQ", "MXFP4", "FP8_PB_WO"])
def test_siblings_are_joined_as_they_are(tmp_path: Path, algo: str) -> None:
    wanted = [ModuleSpec(name=n, shape=(128, 128), algo=algo) for n in ("q", "k")]
    folder = make_modelopt(tmp_path / "a", wanted)
    feeds, held, _ = joined(("q", "k"), folder, algo)
    out = tensors_in(carried_out(read_quantized_modules(folder), [(feeds, held)], tmp_path / "b"))
    before = tensors_in(folder)
    for last in ("weight", "weight_scale"):
        want = torch.cat([before[f"{n}.{last}"].view(torch.uint8) for n in ("q", "k")])
        assert torch.equal(out[f"joined.{last}"].view(torch.uint8), want)


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_siblings_are_brought_to_one_scale(tmp_path: Path, algo: str) -> None:
    wanted = [ModuleSpec(name=n, shape=(64, 64), algo=algo) for n in ("q", "k", "v")]
    folder = make_modelopt(tmp_path / "a", wanted)
    source, before = read_quantized_modules(folder), tensors_in(folder)
    last, role = ("weight_scale", SCALE) if algo == "FP8" else ("weight_scale_2", SCALE_2)
    top = max(before[f"{n}.{last}"] for n in ("q", "k", "v")).numpy()
    feeds, held, packing = joined(("q", "k", "v"), folder, algo, scales={role: top})
    out = carried_out(source, [(feeds, held)], tmp_path / "b")
    after = tensors_in(out)
    assert after[f"joined.{last}"].numpy() == top
    was = decoded(folder)
    for row, name in zip((0, 64, 128), ("q", "k", "v"), strict=True):
        codes = after["joined.weight"][row : row + 64]
        if before[f"{name}.{last}"].numpy() == top:
            assert bits(codes) == bits(before[f"{name}.weight"])
            continue
        one = _decode_all(after, packing)[row : row + 64]
        error = np.linalg.norm(one - was[f"{name}.weight"]) / np.linalg.norm(one)
        assert 0 < error < (0.05 if algo == "FP8" else 0.15)
    if algo == "FP8":  # engines do just so: each element over the larger scale
        for row, name in zip((0, 64, 128), ("q", "k", "v"), strict=True):
            values = torch.from_numpy(was[f"{name}.weight"]) / torch.from_numpy(top)
            want = values.to(torch.float8_e4m3fn).view(torch.uint8)
            assert torch.equal(after["joined.weight"][row : row + 64].view(torch.uint8), want)


def _decode_all(held: dict[str, torch.Tensor], packing: str) -> np.ndarray[Any, Any]:
    from megtool.number_formats.decode import decode
    from tests.support.checkpoints.module_folders import NAMES

    parts = layout(packing, (192, 64))
    windows = {
        p.role: np.frombuffer(bits(held[f"joined.{NAMES[p.role]}"]), dtype(p.dtype).view).reshape(
            p.shape
        )
        for p in parts
    }
    return decode(packing, parts, windows, (0, 0), (192, 64))


def test_different_scales_are_not_made_one_silently(tmp_path: Path) -> None:
    folder = make_modelopt(
        tmp_path / "a", [ModuleSpec(name=n, shape=(32, 32), algo="FP8") for n in ("q", "k")]
    )
    feeds, held, _ = joined(("q", "k"), folder, "FP8")
    with pytest.raises(FormatError, match="has another scale"):
        carried_out(read_quantized_modules(folder), [(feeds, held)], tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_single_scales_become_one_a_row(tmp_path: Path) -> None:
    folder = make_modelopt(
        tmp_path / "a", [ModuleSpec(name=n, shape=(32, 48), algo="FP8") for n in ("q", "k")]
    )
    source, before = read_quantized_modules(folder), tensors_in(folder)
    parts = layout("fp8:channel", (64, 48))
    names = {CODES: "joined.weight", SCALE: "joined.weight_scale"}
    held = [
        (p, GlobalTensor(name=names[p.role], shape=p.shape, dtype=dtype(p.dtype))) for p in parts
    ]
    slices = [WeightSlice.of_module(c, (32 * i, 0)) for i, c in enumerate(source.modules)]
    order = [c.name for c in source.modules]
    out = tensors_in(
        carried_out(source, [(plan_repack(slices, "fp8:channel", held), held)], tmp_path / "b")
    )
    want = torch.cat([before[f"{n}.weight_scale"].expand(32) for n in order])
    assert torch.equal(out["joined.weight_scale"], want)
    codes = torch.cat([before[f"{n}.weight"].view(torch.uint8) for n in order])
    assert torch.equal(out["joined.weight"].view(torch.uint8), codes)


@pytest.mark.parametrize(
    ("algo", "rows", "columns", "said"),
    [
        ("W4A16_AWQ", (1, 33), (0, 128), None),
        ("W4A16_AWQ", (0, 32), (64, 128), "scales are for 128 columns"),
        ("FP8_PB_WO", (64, 192), (0, 128), "scales are for 128 rows"),
        ("NVFP4", (0, 32), (8, 40), "scales are for 16 columns"),
    ],
)
def test_cuts_through_groups_and_blocks(
    tmp_path: Path, algo: str, rows: tuple[int, int], columns: tuple[int, int], said: str | None
) -> None:
    folder = make_modelopt(tmp_path / "a", [ModuleSpec(name="m", shape=(256, 256), algo=algo)])
    source = read_quantized_modules(folder)
    coded = source.modules[0]
    shape = rows[1] - rows[0], columns[1] - columns[0]
    group = 64 if algo == "W4A16_AWQ" and shape[1] == 64 else coded.group_size
    piece = replace(coded, name="cut", shape=shape, group_size=group)
    packing, held = modelopt_held(piece)
    if said is None:
        feeds = plan_repack([WeightSlice(coded, rows, columns)], packing, held)
        out = carried_out(source, [(feeds, held)], tmp_path / "b")
        assert tensors_in(out)["cut.weight"].shape == (shape[0] // 2, shape[1])
        return
    if group == 64:  # half a group is served by one scale
        plan_repack([WeightSlice(coded, rows, columns)], packing, held)
        columns = (32, 224)
        piece = replace(coded, name="cut", shape=(32, 192), group_size=64)
        packing, held = modelopt_held(piece)
    with pytest.raises(UsageError, match=said):
        plan_repack([WeightSlice(coded, rows, columns)], packing, held)


def test_odd_rows_cannot_be_joined_in_pairs(tmp_path: Path) -> None:
    folder = make_modelopt(tmp_path / "a", [ModuleSpec(name="m", shape=(8, 128), algo="W4A16_AWQ")])
    source = read_quantized_modules(folder)
    coded = source.modules[0]
    packing, held = modelopt_held(coded)
    slices = [WeightSlice(coded, (0, 3), (0, 128)), WeightSlice(coded, (3, 8), (0, 128), (3, 0))]
    with raises(UsageError, "2 rows", "uint8"):
        plan_repack(slices, packing, held)


def test_what_is_to_be_quantized_again_is_refused(tmp_path: Path) -> None:
    folder = make_modelopt(tmp_path / "a", [ModuleSpec(name="m", shape=(32, 128), algo="FP8")])
    coded = read_quantized_modules(folder).modules[0]
    parts = layout("int8:channel", coded.shape)
    held = [(p, GlobalTensor(name=p.role, shape=p.shape, dtype=dtype(p.dtype))) for p in parts]
    with pytest.raises(FormatError, match="quantize it again"):
        plan_repack([WeightSlice.of_module(coded)], "int8:channel", held)


def test_a_hole_is_found_before_any_byte(tmp_path: Path) -> None:
    folder = make_modelopt(tmp_path / "a", [ModuleSpec(name="m", shape=(32, 128), algo="MXFP8")])
    source = read_quantized_modules(folder)
    coded = source.modules[0]
    packing, held = modelopt_held(coded)
    feeds = plan_repack([WeightSlice(coded, (0, 16), (0, 128))], packing, held)
    with pytest.raises(CoverageError, match="claimed 0 times"):
        planned(source, [(feeds, held)])


def test_strips_take_little_memory_and_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megtool.export.repack as repack

    wanted = [
        ModuleSpec(name="a", shape=(768, 1024), algo="W4A16_AWQ"),
        ModuleSpec(name="b", shape=(512, 1024), algo="FP8_PB_WO"),
        ModuleSpec(name="c", shape=(768, 1024), algo="NVFP4"),
    ]
    folder = read_quantized_modules(make_modelopt(tmp_path / "a", wanted))
    want = tensors_in(to_compressed(folder, tmp_path / "b"))
    monkeypatch.setattr(repack, "UNIT_BYTES", 100_000)
    found = tensors_in(to_compressed(folder, tmp_path / "c", memory_bytes=1 << 20))
    assert {n: bits(t) for n, t in want.items()} == {n: bits(t) for n, t in found.items()}


def test_a_killed_run_is_resumed_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megtool.export.repack as repack

    monkeypatch.setattr(repack, "UNIT_BYTES", 20_000)
    wanted = [ModuleSpec(name=n, shape=(256, 512), algo="W4A16_AWQ") for n in "ab"]
    folder = read_quantized_modules(make_modelopt(tmp_path / "a", wanted))
    want = tensors_in(to_compressed(folder, tmp_path / "b"))
    with pytest.raises(Killed):
        to_compressed(folder, tmp_path / "c", files=FaultyFiles(at=60, fault="kill"))
    found = tensors_in(to_compressed(folder, tmp_path / "c"))
    assert {n: bits(t) for n, t in want.items()} == {n: bits(t) for n, t in found.items()}
    assert KINDS["int32"] == found["a.weight_packed"].dtype


def test_scales_that_a_dtype_does_not_hold_are_refused() -> None:
    part = PackedPart(role=SCALE, dtype="bfloat16", shape=(2,), spans=(PartSpan(0),))
    tensor = GlobalTensor(name="w.weight_scale", shape=(2,), dtype=dtype("bfloat16"))
    held = encode_scales(np.array([0.5, 1.25], np.float32), part, tensor)
    assert held.shape == (2,)
    with raises(FormatError, "does not hold its scale exactly", tensor="w.weight_scale"):
        encode_scales(np.array([0.5, 1.0 / 3.0], np.float32), part, tensor)
