"""Simulated weights, inputs and caches beside what is packed, and beside other projects' own."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megtool.errors import CalibrationError, FormatError, UsageError
from megtool.number_formats.decode import CODES, SCALE, SCALE_2, decode
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout
from megtool.number_formats.scales import modelopt_block, modelopt_exponent, modelopt_scale
from megtool.number_formats.small_floats import E2M1, E4M3
from megtool.quant.fake_quant import fake_quantize
from megtool.quant.fake_quant.fake_quantize import (
    fake_weight,
    rounded_input,
)
from megtool.quant.fake_quant.input_rounding import CacheRounding
from megtool.quant.qparams import KVCacheQParams, WeightQParams
from megtool.quant.recipes.formats import (
    ENGINE_INPUTS,
    FORMATS,
    INPUT_PACKINGS,
    RecipeFormat,
    packing_of,
)
from tests.support.quant.fake_inputs import fake_input

torch.set_num_threads(1)
CASES = [(a, g) for a, f in FORMATS.items() for g in (f.groups or (0,))]


def treated(algo: str, group: int = 0, **more: object) -> WeightQParams:
    group = group or (FORMATS[algo].groups or (0,))[0]
    return WeightQParams(
        module="m", format=RecipeFormat(name="f", algo=algo, group_size=group), **more
    )  # type: ignore[arg-type]


def odd_weight(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """With rows that are zero, minus zero, tiny, large and on the borders of rounding."""
    torch.manual_seed(seed)
    w = torch.randn(rows, width)
    w[0], w[1] = 0, -0.0
    w[2] *= 2.0**-20
    w[3, ::5] *= 64
    w[4] = torch.arange(width) % 57 * 0.25 - 7
    w[5, width // 2 :] = 0
    return w.to(dtype)


def bits(t: Tensor) -> np.ndarray:
    return t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def packed(weight: Tensor, t: WeightQParams, *, twice: bool = False) -> np.ndarray:
    """What `megtool.number_formats` decodes of what it encoded, with the scales of a treatment."""
    packing, shape = packing_of(t.format), tuple(weight.shape)
    parts = layout(packing, shape)
    by_role = {p.role: p for p in parts}
    dtype = str(weight.dtype).removeprefix("torch.")
    scales: dict[str, np.ndarray] = {}
    if SCALE_2 in by_role:
        top = t.global_amax or float(weight.float().abs().max())
        scales[SCALE_2] = np.asarray(fake_quantize.second_scale(t.format.algo, top))
    if t.amax is not None:
        name = packing.partition(":")[0]
        amax = t.amax.reshape(by_role[SCALE].shape)
        if name == "nvfp4":
            scales[SCALE] = modelopt_block(amax, scales[SCALE_2])
        elif name.startswith("mx"):
            scales[SCALE] = modelopt_exponent(amax, E4M3 if name == "mxfp8" else E2M1)
        else:
            largest = {"int8": 127.0, "int4rows": 7.0}.get(name, 448.0)
            scales[SCALE] = np.asarray(modelopt_scale(amax, largest))
    found = encode(packing, parts, bits(weight), dtype, (0, 0), shape, scales=scales, twice=twice)
    return decode(packing, parts, found, (0, 0), shape)


def same_bits(a: Tensor, b: np.ndarray) -> bool:
    return a.numpy().tobytes() == np.ascontiguousarray(b, np.float32).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("algo", "group"), CASES)
def test_weights_are_what_is_packed(
    algo: str, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_quantize, "CHUNK_INPUT", 512)  # many chunks
    w = odd_weight(384, 256, dtype)
    t = treated(algo, group)
    name = str(dtype).removeprefix("torch.")
    want = packed(w, t)
    assert same_bits(fake_weight(w, t, dtype=name), want)
    assert same_bits(fake_weight(w.float(), t, dtype=name), want)


def test_rounded_twice_as_modelopt_does() -> None:
    w = odd_weight(384, 256, torch.bfloat16)
    once, twice = treated("FP8"), treated("FP8")
    twice = replace(twice, format=replace(twice.format, round_twice=True))
    found = fake_weight(w, twice, dtype="bfloat16")
    assert same_bits(found, packed(w, twice, twice=True))
    better = fake_weight(w, once, dtype="bfloat16")
    errors = [(x - w.float()).abs() for x in (better, found)]
    assert bool((errors[0] <= errors[1] + 1e-6).all())  # the nearest is never farther
    assert errors[0].square().sum() < 0.995 * errors[1].square().sum()


@pytest.mark.parametrize(("algo", "group"), CASES)
def test_clipped_and_shared_scales(algo: str, group: int) -> None:
    w = odd_weight(256, 256, torch.float32)
    packing = packing_of(treated(algo, group).format)
    scale = next(p for p in layout(packing, (256, 256)) if p.role == SCALE)
    how = packing.partition(":")[2]
    view = fake_quantize._blocks(w, how)
    amax = view.abs().amax(fake_quantize._reduced(how)).numpy() * np.float32(0.7)
    t = treated(
        algo,
        group,
        amax=amax,
        global_amax=9.0 if SCALE_2 in str(layout(packing, (256, 256))) else 0.0,
    )
    assert amax.size == np.prod(scale.shape, dtype=int)
    assert same_bits(fake_weight(w, t), packed(w, t))


@pytest.mark.parametrize("algo", FORMATS)
def test_columns_are_taken_off_again(algo: str) -> None:
    w = odd_weight(256, 256, torch.bfloat16)
    columns = np.exp2(np.random.default_rng(0).normal(size=256)).astype(np.float32)
    t = treated(algo, smoothing_scale=columns)
    want = packed(w.float() * torch.from_numpy(columns), t) / columns
    assert same_bits(fake_weight(w, t, dtype="bfloat16"), want)


@pytest.mark.parametrize("algo", FORMATS)
def test_chosen_codes(algo: str) -> None:
    """Codes that are the nearest ones anyway change nothing."""
    w = torch.randn(256, 256)
    t = treated(algo)
    packing = packing_of(t.format)
    parts = layout(packing, (256, 256))
    top = float(w.abs().max())
    second = {SCALE_2: np.asarray(fake_quantize.second_scale(algo, top))}
    given = second if any(p.role == SCALE_2 for p in parts) else {}
    found = encode(packing, parts, w.numpy(), "float32", (0, 0), (256, 256), scales=given)
    stored = found[CODES]
    if packing.startswith("int4rows"):
        codes = np.empty((256, 256), np.int8)
        codes[1::2], codes[0::2] = stored.view(np.int8) >> 4, (stored << 4).view(np.int8) >> 4
    elif "fp4" in packing:
        codes = np.stack([stored & 15, stored >> 4], -1).reshape(256, 256).view(np.int8)
    else:
        codes = stored.view(np.int8)
    chosen = fake_weight(w, treated(algo, codes=codes))
    assert torch.equal(chosen, fake_weight(w, t))
    codes[7] = 0
    assert not fake_weight(w, treated(algo, codes=codes))[7].any()


def test_two_levels_of_w4a8_awq() -> None:
    w = odd_weight(128, 256, torch.float32)
    t = treated("W4A8_AWQ")
    stored = fake_weight(w, t)
    scale = w.abs().max() / 448
    run = fake_weight(w, t, as_run=True)
    assert torch.equal(run, (stored / scale).to(torch.float8_e4m3fn).float() * scale)
    assert not torch.equal(run, stored)
    assert torch.equal(fake_weight(w, treated("FP8"), as_run=True), fake_weight(w, treated("FP8")))


def test_faults_of_weights() -> None:
    w = torch.randn(4, 128)
    with pytest.raises(UsageError, match="blocks of 32 do not divide 100 columns"):
        fake_weight(w[:, :100], treated("MXFP8"))
    w[1, 5] = torch.nan
    for algo in ("FP8", "W4A16_AWQ", "NVFP4"):
        with pytest.raises(FormatError, match="weight of m is NaN"):
            fake_weight(w, treated(algo))


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31), st.floats(-30, 30))
@settings(max_examples=60, deadline=None)
def test_groups_of_inputs_are_what_is_packed(
    rows: int, width: int, seed: int, power: float
) -> None:
    """Ragged rows are those with zeros behind them."""
    torch.manual_seed(seed)
    x = torch.randn(rows, width) * 2.0**power
    for kind, per in (("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16)):
        padded = torch.nn.functional.pad(x, (0, -width % per))
        packing, shape = f"{kind}:{per}", tuple(padded.shape)
        parts = layout(packing, shape)
        # Ties of activations go to even, as the hardware's do.
        scales: dict[str, np.ndarray] = {}
        second = np.float32(0.01)
        top = padded.view(rows, -1, per).abs().amax(-1).numpy()
        if kind == "nvfp4":
            scales = {SCALE_2: np.asarray(second), SCALE: modelopt_block(top, second)}
        else:
            scales = {SCALE: modelopt_exponent(top, E4M3 if kind == "mxfp8" else E2M1)}
        parts = tuple(p for p in parts)
        style = "modelopt" if kind == "nvfp4" else "compressed-tensors"
        found = encode(
            packing, parts, padded.numpy(), "float32", (0, 0), shape, scales=scales, style=style
        )
        want = decode(packing, parts, found, (0, 0), shape)[:, :width]
        got = rounded_input(x, packing, scale=float(second))
        assert torch.equal(got, torch.from_numpy(want.copy())), kind


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_fp8_inputs_by_torchs_own_cast(algo: str) -> None:
    x = odd_weight(16, 40, torch.float32)
    t = treated(algo, input_amax=3.0 if algo == "FP8" else 0.0)
    top = torch.tensor(3.0) if algo == "FP8" else x.abs().amax(1, keepdim=True)
    scale = torch.where(top == 0, 448, top) / 448
    want = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    got = fake_input(x, t)
    assert (got != want).float().mean() < 0.01  # ties, by the rounding of the reciprocal
    torch.testing.assert_close(got, want, rtol=0.13, atol=0)
    assert torch.equal(fake_input(got, t), got) or algo == "FP8"


def test_many_rows_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 3, 48)
    scale, columns = torch.rand(150, 1) + 0.1, torch.rand(150, 48) + 0.1
    for kind in (*set(INPUT_PACKINGS.values()), "nvfp4:16"):
        for more in ({"scale": 0.01}, {"scale": 0.01, "smoothing_scale": columns[0]}):
            whole = rounded_input(x, kind, **more)
            with monkeypatch.context() as patch:
                patch.setattr(fake_quantize, "CHUNK_INPUT", 96)
                assert torch.equal(rounded_input(x, kind, **more), whole)
        rows, each = x.view(150, 48), {"scale": scale, "smoothing_scale": columns}
        whole = rounded_input(rows, kind, **each)
        one = rounded_input(rows[7:8], kind, scale=float(scale[7]), smoothing_scale=columns[7])
        torch.testing.assert_close(whole[7:8], one)
        with monkeypatch.context() as patch:
            patch.setattr(fake_quantize, "CHUNK_INPUT", 96)
            assert torch.equal(rounded_input(rows, kind, **each), whole)


def test_inputs_as_they_are() -> None:
    x = torch.randn(3, 32)
    for algo in set(FORMATS) - set(ENGINE_INPUTS):
        assert fake_input(x, treated(algo)) is x


@pytest.mark.parametrize("algo", INPUT_PACKINGS)
def test_inputs_with_columns_in_any_type(algo: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 96)
    columns = np.exp2(np.random.default_rng(1).normal(size=96)).astype(np.float32)
    amax = float((x / torch.from_numpy(columns)).abs().max())
    t = treated(algo, smoothing_scale=columns, input_amax=amax)
    plain = treated(algo, input_amax=amax)
    by = torch.from_numpy(columns)
    assert torch.equal(fake_input(x, t), fake_input(x / by, plain) * by)
    half = fake_input(x.bfloat16(), t)
    assert half.dtype == torch.bfloat16
    y = x / by
    error = (fake_input(y, plain) - y).square().mean() / y.square().mean()
    assert 0 < error < (0.03 if "fp4" in INPUT_PACKINGS[algo] else 0.002)


def test_inputs_without_calibration() -> None:
    for algo in ("FP8", "NVFP4", "W8A8_SQ_PER_CHANNEL"):
        with pytest.raises(CalibrationError, match=f"{algo} needs a static input scale"):
            fake_input(torch.randn(2, 32), treated(algo))


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["fp8:tensor", "int8:tensor"])
def test_inputs_as_modelopt_fakes_them(kind: str) -> None:
    pytest.importorskip("modelopt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization.config import QuantizerAttributeConfig
        from modelopt.torch.quantization.nn import TensorQuantizer
        from modelopt.torch.quantization.tensor_quant import fp8_eager
    x = torch.randn(64, 512) * 3
    if kind == "fp8:tensor":
        quantizer = TensorQuantizer(
            QuantizerAttributeConfig(num_bits=(4, 3)), amax=torch.tensor(5.0)
        )
        want, scale = quantizer(x), np.float32(5) / np.float32(448)
        assert torch.equal(want, fp8_eager(x, torch.tensor(5.0)))
    else:
        want = torch.fake_quantize_per_tensor_affine(x, 5.0 / 127, 0, -128, 127)
        scale = np.float32(5) / np.float32(127)
    got = rounded_input(x, kind, scale=float(scale))
    differing = (got - want).abs() > 1e-5
    assert differing.float().mean() < 1e-4


def test_caches() -> None:
    key, value = torch.randn(2, 3, 2, 24), torch.randn(2, 3, 2, 24)
    fp8 = KVCacheQParams(
        module="kv", format=RecipeFormat(name="c", kv_algo="FP8"), key_amax=2.0, value_amax=9.0
    )
    k, v = CacheRounding.of(fp8).hook(key, value)
    assert k.abs().max() == 2.0  # what is beyond is cut
    for found, x, amax in ((k, key, 2.0), (v, value, 9.0)):
        want = (x * (448 / amax)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (amax / 448)
        torch.testing.assert_close(found, want, rtol=0.13, atol=0)
        assert (found - want).abs().mean() < 1e-3
    nvfp4 = KVCacheQParams(
        module="kv", format=RecipeFormat(name="c", kv_algo="NVFP4"), key_amax=4.0, value_amax=4.0
    )
    k, _ = CacheRounding.of(nvfp4).hook(key.bfloat16(), value.bfloat16())
    assert k.dtype == torch.bfloat16
    assert k.shape == key.shape
    assert 0.05 < (k - key).norm() / key.norm() < 0.15
    with pytest.raises(CalibrationError, match="amax of the KV cache kv is unknown"):
        CacheRounding.of(
            KVCacheQParams(module="kv", format=fp8.format, key_amax=0.0, value_amax=1.0)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("algo", FORMATS)
def test_a_gpu_rounds_alike(algo: str) -> None:
    w, x = odd_weight(384, 256, torch.float32), odd_weight(64, 256, torch.float32, seed=1)
    columns = np.exp2(np.random.default_rng(0).normal(size=256)).astype(np.float32)
    for t in (
        treated(algo, input_amax=3.0),
        treated(algo, input_amax=3.0, smoothing_scale=columns),
    ):
        assert torch.equal(fake_weight(w.cuda(), t).cpu(), fake_weight(w, t))
        assert torch.equal(fake_input(x.cuda(), t).cpu(), fake_input(x, t))
        graph, there = torch.cuda.CUDAGraph(), x.cuda()
        factors = None if t.smoothing_scale is None else torch.from_numpy(columns).cuda()
        with torch.cuda.graph(graph):  # nothing waits for the host
            out = fake_input(there, t, smoothing_scale=factors)
        there.mul_(0.5)
        graph.replay()
        assert torch.equal(out.cpu(), fake_input(x * 0.5, t))
