"""The compiled part of Transformer Engine, `transformer_engine_torch`, in operations of torch.

`install` puts it where the Python part of release 2.20 looks for it, so that this runs on the
emulated device (`tests.support.emulated.device`): its modules, autograd functions, recipes and
optimizer are its own, and what it calls in C++ is here. Formats are FP8 with one scale for each
tensor (delayed and current scaling), with fp32 scales of 128 elements or 128 x 128, and MXFP8.
Arithmetic is that of the formats, not that of the kernels: products of FP8 are products of fp32.

Signatures are those of `transformer_engine/pytorch/csrc/extensions/pybind.cpp` at release 2.20.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "transformer_engine_torch"
DTYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
DType = enum.IntEnum("DType", DTYPES)  # type: ignore[misc]
TORCH = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}
LARGEST = {7: 448.0, 8: 57344.0}

ENUMS = {
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Mask_Type": "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_QKV_Format": "NVTE_BSHD NVTE_SBHD NVTE_THD NVTE_SBHD_2BSHD NVTE_BSHD_2SBHD "
    "NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD NVTE_QKV_Format_NOT_SET",
    "NVTE_QKV_Layout": "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D "
    "NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D "
    "NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD "
    "NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD "
    "NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD "
    "NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD "
    "NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET",
    "NVTE_Fused_Attn_Backend": "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend",
    "NVTEScalingMode": "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
    "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": "BULK_OVERLAP_AG BULK_OVERLAP_RS",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "NONE",
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
}
GATED = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu", "sreglu": "srelu", "qgeglu": "qgelu"}
CALLS: list[str] = []
"""The names of what was called, in order."""


def plain(x: Any, columns: bool = False) -> Tensor:
    """The fp32 values of a tensor, or of one in FP8 by its rows or its columns."""
    if hasattr(x, "_rowwise_data"):
        return plain_blocks(x, columns)
    if isinstance(x, Tensor) and not hasattr(x, "_scale_inv"):
        return x.float()
    kind = TORCH[int(x._fp8_dtype)]
    has_columns = x._transpose is not None and not x._transpose_invalid
    reads_both = torch.cuda.get_device_capability()[0] >= 10  # products of any layout
    if x._data is None or (columns and not reads_both):
        assert has_columns, "columns of a tensor in FP8 that has none"
        values = x._transpose.view(kind).float() * x._scale_inv
        return values.movedim(0, -1)
    return x._data.view(kind).float() * x._scale_inv  # type: ignore[no-any-return]


def spread(scale: Tensor, rows: int, columns: int, shape: Sequence[int]) -> Tensor:
    """Each block's scale at its elements; blocks at the ends may be cut."""
    whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: shape[0], : shape[1]]


def encode_blocks(x: Tensor, rows: int, columns: int, quantizer: Any) -> tuple[Tensor, Tensor]:
    """The bytes of a matrix in FP8, and each block's scale for the way back: fp32, or its exponent
    (`compute_scale_from_amax` of `common/recipe/recipe_common.cuh`, `float_to_e8m0` of
    `common/util/ptx.cuh`)."""
    limit = LARGEST[int(quantizer.dtype)]
    m, k = x.shape
    padded = F.pad(x, (0, -k % columns, 0, -m % rows)).abs()
    amax = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))
    if hasattr(quantizer, "block_scaling_dim"):
        amax = amax.clamp(min=quantizer.amax_epsilon)
        scale = torch.where((amax == 0) | amax.isinf(), 1.0, limit / amax)
        scale = scale.clamp(max=torch.finfo(torch.float32).max)
        if quantizer.force_pow_2_scales:
            scale = torch.exp2(scale.log2().floor())
        stored = scale.reciprocal()
    else:
        share, exponent = torch.frexp(amax / limit)
        stored = torch.where(share == 0.5, exponent - 1, exponent) + 127
        stored = torch.where(share == 0, 0, stored).clamp(0, 254).to(torch.uint8)
        scale = torch.exp2(127 - stored.float())
    data = (x * spread(scale, rows, columns, x.shape)).clamp(-limit, limit)
    return data.to(TORCH[int(quantizer.dtype)]).view(torch.uint8), stored


def quantize_blocks(tensor: Tensor, quantizer: Any, output: Any) -> Any:
    """In FP8 by blocks, of the rows and of the columns; scales lie as the kernels need them."""
    x = tensor.detach().float().reshape(-1, tensor.shape[-1])
    made: dict[str, Tensor | None] = {}
    for way, used in (("row", quantizer.rowwise_usage), ("column", quantizer.columnwise_usage)):
        data = scale = None
        if used:
            specs = quantizer.get_scale_shape(tensor.shape, columnwise=way == "column")
            if hasattr(quantizer, "block_scaling_dim"):  # columns are transposed
                rows = 128 if quantizer.block_scaling_dim == 2 else 1
                given = x if way == "row" else x.t().contiguous()
                data, stored = encode_blocks(given, rows, 128, quantizer)
                shape = tuple(tensor.shape)
                if way == "column":
                    shape = quantizer.get_columnwise_shape(tensor.shape)
                data = data.view(shape)
                stored = stored.t() if rows == 1 else stored
            else:
                sides = (1, 32) if way == "row" else (32, 1)
                data, stored = encode_blocks(x, *sides, quantizer)
                data = data.view(tensor.shape)
            scale = stored.new_zeros(specs)
            scale[: stored.shape[0], : stored.shape[1]] = stored
        made |= {f"{way}wise_data": data, f"{way}wise_scale_inv": scale}
    if output is not None:
        for name, value in made.items():
            if (old := getattr(output, f"_{name}")) is not None:
                old.copy_(value)
        return output
    kept = quantizer.storage_metadata(tensor.dtype)
    facts = made | kept["nontensor_kwargs"]
    if quantizer.internal:
        return kept["cls"](**facts)
    facts.pop("fake_dtype")
    return kept["cls"](shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, **facts)


def plain_blocks(x: Any, columns: bool) -> Tensor:
    """The values of a tensor in FP8 by blocks."""
    columns = columns or x._rowwise_data is None
    data = x._columnwise_data if columns else x._rowwise_data
    scale = x._columnwise_scale_inv if columns else x._rowwise_scale_inv
    assert data is not None, "columns of a tensor in FP8 that has none"
    values = data.view(TORCH[int(x._fp8_dtype)]).float()
    if hasattr(x, "_is_2D_scaled"):
        flat = values.flatten(1) if columns else values.flatten(0, -2)
        rows = 128 if x._is_2D_scaled else 1
        by_block = scale if x._is_2D_scaled else scale.t()
        flat = flat * spread(by_block, rows, 128, flat.shape)
        return flat.view(data.shape).movedim(0, -1) if columns else flat.view(data.shape)
    flat = values.flatten(0, -2)
    sides = (32, 1) if columns else (1, 32)
    return (flat * spread(torch.exp2(scale.float() - 127), *sides, flat.shape)).view(data.shape)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """In FP8, by the scale that a quantizer has, or by that of the largest magnitude."""
    if type(quantizer).__name__ in ("Float8BlockQuantizer", "MXFP8Quantizer"):
        return quantize_blocks(tensor, quantizer, output)
    kind = int(quantizer.dtype)
    largest = tensor.detach().float().abs().amax() if tensor.numel() else tensor.new_zeros(())
    largest = largest.float().reshape(1)
    if hasattr(quantizer, "amax"):  # delayed scaling
        quantizer.amax.copy_(torch.maximum(quantizer.amax, largest))
        scale = quantizer.scale.reshape(1).clone()
    else:
        scale = torch.where(largest > 0, LARGEST[kind] / largest, torch.ones_like(largest))
        if quantizer.force_pow_2_scales:
            scale = torch.exp2(scale.log2().floor())
    limit = LARGEST[kind]
    data = (tensor.detach().float() * scale).clamp(-limit, limit).to(TORCH[kind])
    data = data.contiguous().view(torch.uint8)
    turned = data.movedim(-1, 0).contiguous()
    if output is None:
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import (
            Float8TensorStorage,
        )

        facts: dict[str, Any] = {
            "data": data if quantizer.rowwise_usage else None,
            "fp8_scale_inv": scale.reciprocal(),
            "fp8_dtype": quantizer.dtype,
            "data_transpose": turned if quantizer.columnwise_usage else None,
            "quantizer": quantizer,
        }
        if quantizer.internal:
            return Float8TensorStorage(fake_dtype=tensor.dtype, **facts)
        return Float8Tensor(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, **facts)
    output._scale_inv.copy_(scale.reciprocal())
    if output._data is not None:
        output._data.copy_(data)
    if output._transpose is not None:
        output._transpose.copy_(turned)
        output._transpose_invalid = False
    return output


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """The values of a tensor in FP8."""
    return plain(tensor).to(TORCH[int(dtype)])


def bgrad_quantize(tensor: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The sum of rows, and the tensor in FP8."""
    return tensor.sum(0), quantize(tensor, quantizer)


def split_quantize(
    tensor: Tensor, sizes: Sequence[int], quantizers: Sequence[Any], **_: Any
) -> list[Any]:
    """Parts of rows, each in FP8 by its own quantizer."""
    parts = tensor.split(list(sizes))
    return [quantize(part, q) for part, q in zip(parts, quantizers, strict=True)]


def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """Bytes of FP8, transposed."""
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def multiply(a: Any, transa: bool, b: Any, transb: bool) -> Tensor:
    """cuBLAS's product of matrices that it sees by columns: `op(b) op(a)` by rows, in fp32."""
    left = plain(b, columns=transb).flatten(0, -2)
    right = plain(a, columns=not transa).flatten(0, -2)
    is_plain = not hasattr(a, "_scale_inv") and not hasattr(a, "_rowwise_data")
    if isinstance(a, Tensor) and isinstance(b, Tensor) and is_plain:
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
    return (left.t() if transb else left) @ (right.t() if transa else right)


def put(total: Tensor | None, product: Tensor, dtype: torch.dtype, accumulate: bool) -> Tensor:
    """A product where it belongs, or as a new tensor."""
    if total is None:
        return product.to(dtype)
    shaped = product.view(total.shape)
    return total.add_(shaped) if accumulate else total.copy_(shaped)


def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **more: Any,
) -> tuple[Any, Tensor | None, Tensor | None, None]:
    """One product."""
    CALLS.append("generic_gemm")
    assert not gelu
    assert more.get("comm_overlap") is None
    product = multiply(a, transa, b, transb)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = plain(b, columns=transb).flatten(0, -2).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.float()
    if out_dtype is not None:
        dtype = TORCH[int(out_dtype)]
    else:
        dtype = b.dtype if isinstance(b, Tensor) else b._dtype
    lead = (b.shape if isinstance(b, Tensor) else b.size())[:-1]
    if not transb and out is None:
        product = product.view(*lead, -1)
    result = put(out, product, dtype, accumulate)
    return (result if quantizer is None else quantize(result, quantizer)), bias_grad, None, None


def te_general_grouped_gemm(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor],
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> Sequence[Tensor]:
    """As many products as there are splits, into one tensor or into one each."""
    CALLS.append("te_general_grouped_gemm")
    outs = out[0].split(list(m_splits)) if single_output else out
    for i, (one, other, result) in enumerate(zip(a, b, outs, strict=True)):
        product = multiply(one, transa, other, transb)
        if bias[i].numel() and grad:
            bias[i].copy_(plain(other, columns=transb).flatten(0, -2).sum(0))
        elif bias[i].numel():
            product = product + bias[i].float()
        put(result, product, result.dtype, accumulate)
    return bias


def fused_multi_row_padding(
    given: Tensor, out: Tensor, sizes: Sequence[int], padded: Sequence[int]
) -> None:
    """Each part's rows, and zeros up to its padded size."""
    for part, whole, size in zip(
        given.split(list(sizes)), out.split(list(padded)), sizes, strict=True
    ):
        whole[:size].copy_(part)
        whole[size:].zero_()


def fused_multi_row_unpadding(
    given: Tensor, out: Tensor, padded: Sequence[int], sizes: Sequence[int]
) -> None:
    """The way back."""
    for whole, part, size in zip(
        given.split(list(padded)), out.split(list(sizes)), sizes, strict=True
    ):
        part.copy_(whole[:size])


def fused_amax_and_scale_update_after_reduction(
    amaxes: Tensor,
    histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    algorithm: str,
    dtype: Any,
    margin: float,
) -> None:
    """The end of a step of delayed scaling, in place."""
    start = 0
    for history, scale in zip(histories, scales, strict=True):
        seen = amaxes[start : start + scale.numel()]
        start += scale.numel()
        history[0].copy_(seen)
        amax = history.amax(0) if algorithm == "max" else history[0].clone()
        new = LARGEST[int(dtype)] / amax / 2**margin
        new = torch.where((amax > 0) & amax.isfinite(), new, scale)
        scale.copy_(torch.where(new.isinf(), torch.finfo(torch.float32).max, new))
        history.copy_(history.roll(-1, 0))
        history[0].zero_()


def norm_forward(kind: str) -> Callable[..., tuple[Any, Tensor | None, Tensor]]:
    """`rmsnorm_fwd` or `layernorm_fwd`."""

    def run(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, Tensor | None, Tensor]:
        CALLS.append(f"{kind}_fwd")
        bias = None
        if kind == "layernorm":
            bias, *rest = rest  # type: ignore[assignment]
        eps, out, quantizer, dtype, _, zero_centered = rest
        wide = x.float()
        mean = wide.mean(-1) if kind == "layernorm" else None
        centered = wide if mean is None else wide - mean.unsqueeze(-1)
        inverse = torch.rsqrt(centered.square().mean(-1) + eps)
        scale = weight.float() + 1 if zero_centered else weight.float()
        normal = centered * inverse.unsqueeze(-1) * scale
        normal = (normal if bias is None else normal + bias.float()).to(TORCH[int(dtype)])
        if quantizer is not None:
            return quantize(normal, quantizer, out), mean, inverse
        return (normal if out is None else out.copy_(normal)), mean, inverse

    return run


def norm_backward(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    """`rmsnorm_bwd` or `layernorm_bwd`."""

    def run(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        CALLS.append(f"{kind}_bwd")
        mean = None
        if kind == "layernorm":
            mean, *rest = rest  # type: ignore[assignment]
        inverse, weight, _, zero_centered = rest
        wide, g = x.float(), grad.float()
        centered = wide if mean is None else wide - mean.unsqueeze(-1)
        unit = centered * inverse.unsqueeze(-1)
        scale = weight.float() + 1 if zero_centered else weight.float()
        d_weight = (g * unit).flatten(0, -2).sum(0).to(weight.dtype)
        pulled = g * scale
        dx = pulled - unit * (pulled * unit).mean(-1, keepdim=True)
        if mean is not None:
            dx = dx - pulled.mean(-1, keepdim=True)
        dx = (dx * inverse.unsqueeze(-1)).to(x.dtype)
        if mean is None:
            return dx, d_weight
        return dx, d_weight, g.flatten(0, -2).sum(0).to(weight.dtype)

    return run


def apply_activation(name: str, x: Tensor) -> Tensor:
    """An activation in fp32, plain or gated."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name](x.float())
    gate, up = x.float().chunk(2, -1)
    return ACTIVATIONS[GATED[name]](gate) * up


def activation(name: str) -> Callable[..., Any]:
    """An activation's forward pass."""

    def run(x: Tensor, quantizer: Any = None) -> Any:
        CALLS.append(name)
        out = apply_activation(name, x).to(x.dtype)
        return out if quantizer is None else quantize(out, quantizer)

    return run


def activation_backward(name: str) -> Callable[..., Any]:
    """Its backward pass."""

    def run(grad: Tensor, x: Tensor, quantizer: Any = None) -> Any:
        CALLS.append(f"d{name}")
        with torch.enable_grad():
            leaf = x.detach().float().requires_grad_()
            (dx,) = torch.autograd.grad(apply_activation(name, leaf), leaf, grad.float())
        dx = dx.to(x.dtype)
        return dx if quantizer is None else quantize(dx, quantizer)

    return run


def bias_activation_backward(name: str) -> Callable[..., Any]:
    """The gradient of the bias before an activation too."""
    run = activation_backward(name)

    def both(grad: Tensor, x: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
        dx = run(grad, x)
        bias = dx.float().flatten(0, -2).sum(0).to(dx.dtype)
        return bias, dx if quantizer is None else quantize(dx, quantizer)

    return both


def adam(
    main: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    facts: tuple[float, float, float, float, int, int, bool, float],
) -> Tensor:
    """The updated fp32 values; moments are updated in place."""
    lr, beta1, beta2, eps, step, mode, corrects, decay = facts
    assert mode == 1, "AdamW"
    g, wide_m, wide_v = grad.float(), m.float(), v.float()
    wide_m = beta1 * wide_m + (1 - beta1) * g
    wide_v = beta2 * wide_v + (1 - beta2) * g * g
    first, second = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
    update = wide_m / first / ((wide_v / second).sqrt() + eps) + decay * main
    m.copy_(wide_m)
    v.copy_(wide_v)
    return main - lr * update


def multi_tensor_adam(
    chunk_size: int, noop: Tensor, lists: list[list[Tensor]], *facts: Any
) -> None:
    """Adam's update of parameters, and of main parameters where there is a fifth list."""
    CALLS.append("multi_tensor_adam")
    for grad, param, m, v, *main in zip(*lists, strict=True):
        assert m.dtype == v.dtype
        assert m.dtype in (torch.float32, torch.bfloat16)
        new = adam((main or [param])[0].float(), grad, m, v, facts)  # type: ignore[arg-type]
        for one in (param, *main):
            one.copy_(new)


def multi_tensor_adam_param_remainder(
    chunk_size: int, noop: Tensor, lists: list[list[Tensor]], *facts: Any
) -> None:
    """The same of bf16 parameters and int16 remainders, which are fp32 values together."""
    CALLS.append("multi_tensor_adam_param_remainder")
    for grad, param, m, v, low in zip(*lists, strict=True):
        assert param.dtype == torch.bfloat16
        assert low.dtype == torch.int16
        high = param.view(torch.int16).int() - (low < 0).int()
        bits = (high << 16) | (low.int() & 0xFFFF)
        new = adam(bits.view(torch.float32), grad, m, v, facts).view(torch.int32)  # type: ignore[arg-type]
        rest = (new & 0xFFFF).to(torch.int16)
        low.copy_(rest)
        param.view(torch.int16).copy_(((new >> 16) + (rest < 0).int()).to(torch.int16))


def convert_thd_to_bshd(rows: Tensor, ends: Tensor, num: int, longest: int) -> Tensor:
    """Sequences one after the other, as rows with zeros behind them."""
    out = rows.new_zeros(num, longest, *rows.shape[1:])
    for i, (start, stop) in enumerate(itertools.pairwise(ends.tolist())):
        out[i, : stop - start] = rows[start:stop]
    return out


def convert_bshd_to_thd(padded: Tensor, ends: Tensor, num: int) -> Tensor:
    """The way back."""
    spans = itertools.pairwise(ends.tolist())
    parts = [padded[i, : stop - start] for i, (start, stop) in enumerate(spans)]
    whole = torch.cat(parts)
    return torch.cat((whole, whole.new_zeros(num - whole.shape[0], *whole.shape[1:])))


def get_fused_attn_backend(*_: Any, **__: Any) -> tuple[Any, str]:
    """No kernel of cuDNN is here."""
    return _module().NVTE_Fused_Attn_Backend.NVTE_No_Backend, "none is emulated"


def _missing(name: str) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} is not emulated")

    return run


def _module() -> Any:
    return sys.modules[NAME]


class _Extension(types.ModuleType):
    """What is not emulated fails where it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name[0].isupper() or name.startswith("NVTE"):
            return type(name, (), {})
        return _missing(name)


class _Anything(types.ModuleType):
    """A module of whatever is asked for, that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getitem__(self, key: Any) -> Any:
        return self


def make() -> types.ModuleType:
    """The module."""
    module: Any = _Extension(NAME)
    module.DType = DType
    for name, members in ENUMS.items():
        kind = enum.IntEnum(name, [(m, i) for i, m in enumerate(members.split())])  # type: ignore[misc]
        setattr(module, name, kind)
    for function in (
        *(quantize, dequantize, bgrad_quantize, split_quantize, fp8_transpose, generic_gemm),
        *(te_general_grouped_gemm, fused_multi_row_padding, fused_multi_row_unpadding),
        *(fused_amax_and_scale_update_after_reduction, multi_tensor_adam),
        *(multi_tensor_adam_param_remainder, get_fused_attn_backend),
        *(convert_thd_to_bshd, convert_bshd_to_thd),
    ):
        setattr(module, function.__name__, function)
    for kind in ("rmsnorm", "layernorm"):
        setattr(module, f"{kind}_fwd", norm_forward(kind))
        setattr(module, f"{kind}_bwd", norm_backward(kind))
    for name in (*ACTIVATIONS, *GATED):
        setattr(module, name, activation(name))
        setattr(module, f"d{name}", activation_backward(name))
    for name in ACTIVATIONS:
        setattr(module, f"dbias_d{name}", bias_activation_backward(name))
    facts: dict[str, Any] = {
        "get_cublasLt_version": 130200,
        "get_cudnn_version": 91200,
        "get_num_cublas_streams": 4,
        "get_stream_priority_range": (0, -5),
        "ubuf_built_with_mpi": False,
        "device_supports_multicast": False,
    }
    for name, value in facts.items():
        setattr(module, name, lambda *_, value=value, **__: value)
    return module


def install(folder: Path) -> None:
    """Let the release of Transformer Engine in `folder` be imported, with this extension."""
    sys.path.insert(0, str(folder))
    # It loads no shared libraries then, and compiles nothing.
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
    os.environ |= {"NVTE_MASKED_SOFTMAX_FUSION": "0"}
    torch.version.cuda = "12.9"  # from which on FP8 goes by blocks
    sys.modules[NAME] = make()
    # Needed by its export to ONNX and its caches alone.
    for name in ("transformer_engine.pytorch.onnx_extensions", "einops"):
        sys.modules[name] = _Anything(name)
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = package = importlib.util.module_from_spec(spec)
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    spec.loader.exec_module(package)
    importlib.import_module("transformer_engine.pytorch")
