"""The tensors of quantized modules: names, types, shapes, and the values known beforehand."""

from __future__ import annotations

import numpy as np
import pytest

from megtool.dtypes import dtype
from megtool.errors import CalibrationError, UsageError
from megtool.quant.packed_tensors.modelopt_tensors import (
    compute_input_scale,
    list_kv_scale_specs,
    list_module_specs,
    needs_amax,
)
from megtool.quant.qparams import KVCacheQParams, WeightQParams
from megtool.quant.recipes.formats import RecipeFormat
from megtool.transport.constant_feed import round_to_dtype

BF16 = dtype("bfloat16")
O, I = 128, 256  # noqa: E741

# What ModelOpt's unified export holds: codes, scales, whether a second scale and one of inputs.
TABLE = [
    ("FP8", 0, ("float8_e4m3fn", (O, I)), ("float32", ()), False, True),
    ("FP8_PER_CHANNEL_PER_TOKEN", 0, ("float8_e4m3fn", (O, I)), ("float32", (O,)), False, False),
    ("FP8_PB_WO", 128, ("float8_e4m3fn", (O, I)), ("float32", (1, 1, 2, 1)), False, False),
    ("W8A8_SQ_PER_CHANNEL", 0, ("int8", (O, I)), ("float32", (O,)), False, True),
    ("W8A16", 0, ("int8", (O, I)), ("float32", (O,)), False, False),
    ("W4A16_AWQ", 128, ("uint8", (O // 2, I)), ("float32", (O, 2)), False, False),
    ("W4A8_AWQ", 64, ("uint8", (O // 2, I)), ("float32", (O, 4)), True, True),
    ("MXFP8", 32, ("float8_e4m3fn", (O, I)), ("uint8", (O, 8)), False, False),
    ("MXFP4", 32, ("uint8", (O, I // 2)), ("uint8", (O, 8)), False, False),
    ("W4A8_MXFP4_FP8", 32, ("uint8", (O, I // 2)), ("uint8", (O, 8)), False, False),
    ("NVFP4", 16, ("uint8", (O, I // 2)), ("float8_e4m3fn", (O, 16)), True, True),
    ("W4A16_NVFP4", 32, ("uint8", (O, I // 2)), ("float8_e4m3fn", (O, 8)), True, False),
    ("W4A8_NVFP4_FP8", 32, ("uint8", (O, I // 2)), ("float8_e4m3fn", (O, 8)), True, True),
]


def treatment(algo: str, group: int = 0, **more: object) -> WeightQParams:
    form = RecipeFormat(name="f", algo=algo, group_size=group)
    return WeightQParams(module="layers.0.mlp.up", format=form, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", TABLE, ids=lambda r: r[0])
def test_as_the_table_has_it(row: tuple[object, ...]) -> None:
    algo, group, codes, scale, second, inputs = row
    t = treatment(str(algo), int(str(group)), input_amax=2.0)
    found = list_module_specs("m", (O, I), t.format, BF16, amax=1.0, inputs=compute_input_scale(t))
    shapes = {h.tensor.name: (h.tensor.dtype.name, h.tensor.shape) for h in found}
    want = {"m.weight": codes, "m.weight_scale": scale}
    want |= {"m.weight_scale_2": ("float32", ())} if second else {}
    want |= {"m.input_scale": ("float32", ())} if inputs else {}
    assert shapes == want


@pytest.mark.parametrize(
    ("algo", "group", "scale"),
    [
        ("FP8", 0, 2 / 448),
        ("W8A8_SQ_PER_CHANNEL", 0, 2 / 127),
        ("W4A8_AWQ", 128, 2 / 448),
        ("NVFP4", 16, 2 / (6 * 448)),
        ("W4A8_NVFP4_FP8", 32, 2 / 448),
    ],
)
def test_scales_of_inputs(algo: str, group: int, scale: float) -> None:
    assert compute_input_scale(treatment(algo, group, input_amax=2.0)) == np.float32(scale)
    for amax in (0.0, float("nan"), float("inf")):
        with pytest.raises(CalibrationError, match=r"layers\.0\.mlp\.up"):
            compute_input_scale(treatment(algo, group, input_amax=amax))


@pytest.mark.parametrize(
    ("algo", "group", "second"),
    [
        ("NVFP4", 16, 1.5 / (6 * 448)),
        ("W4A8_AWQ", 128, 1.5 / 448),
        ("W4A8_NVFP4_FP8", 32, 1.5 / 448),
    ],
)
def test_second_scales(algo: str, group: int, second: float) -> None:
    found = {
        h.tensor.name: h.value
        for h in list_module_specs("m", (O, I), treatment(algo, group).format, BF16, amax=1.5)
    }
    assert found["m.weight_scale_2"] == np.float32(second)


def test_which_formats_need_the_amax_of_whole_weights() -> None:
    needy = [row[0] for row in TABLE if needs_amax(treatment(str(row[0]), int(str(row[1]))))]
    assert needy == ["FP8", "W4A8_AWQ", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"]
    assert not needs_amax(treatment("FP8", amax=np.ones((), np.float32)))
    assert not needs_amax(treatment("NVFP4", 16, global_amax=2.0))


def test_factors_of_columns_are_stored_as_what_inputs_are_multiplied_by() -> None:
    columns = np.full(I, 4.0, np.float32)
    form = treatment("W4A16_AWQ", 128).format
    last = list_module_specs("m", (O, I), form, BF16, columns=columns)[-1]
    assert (last.tensor.name, last.tensor.dtype) == ("m.pre_quant_scale", BF16)
    assert last.value is not None
    assert set(last.value.tolist()) == {0x3E80}  # 0.25


def test_scales_of_caches() -> None:
    def values(algo: str, **more: bool) -> dict[str, float]:
        form = RecipeFormat(name="kv", kv_algo=algo, **more)  # type: ignore[arg-type]
        cache = KVCacheQParams(module="c", format=form, key_amax=896.0, value_amax=4.48)
        return {h.tensor.name: float(h.value or 0) for h in list_kv_scale_specs("a", cache)}  # type: ignore[arg-type]

    names = ["a.k_proj.k_scale", "a.v_proj.v_scale"]
    assert list(values("FP8")) == names
    assert values("FP8")[names[0]] == 2.0
    assert values("FP8")[names[1]] == pytest.approx(0.01)
    assert values("NVFP4")[names[0]] == pytest.approx(896 / 2688)
    assert set(values("FP8", constant=True).values()) == {1.0}


def test_what_groups_do_not_divide_is_told() -> None:
    with pytest.raises(UsageError, match="blocks of 128 do not divide 96"):
        list_module_specs("m", (O, 96), treatment("W4A16_AWQ", 128).format, BF16)
    with pytest.raises(UsageError, match="two a byte"):
        list_module_specs("m", (O + 1, I), treatment("W4A16_AWQ", 128).format, BF16)


def test_floats_are_rounded_once() -> None:
    x = np.array([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -0.0], np.float32)
    assert round_to_dtype(x, BF16).tolist() == [0x3F80, 0x3F81, 0x8000]
    assert round_to_dtype(x, dtype("float16")).dtype == np.float16
    assert round_to_dtype(x, dtype("float32")).tolist() == x.tolist()
