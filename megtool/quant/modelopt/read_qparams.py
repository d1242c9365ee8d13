"""Quantization parameters of modules that ModelOpt has calibrated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megtool.errors import CalibrationError
from megtool.quant.algorithms.pre_quant_scale import round_to_pre_quant_scale
from megtool.quant.algorithms.svdquant import subtract_branch
from megtool.quant.algorithms.weight_grid import make_grid
from megtool.quant.fake_quant.learned_scales import smallest_learned_amax
from megtool.quant.fake_quant.rounding_torch import E4M3_LARGEST
from megtool.quant.modelopt.load import silence_output
from megtool.quant.qparams import Floats, KVCacheQParams, QParams, WeightQParams
from megtool.quant.recipes.formats import FORMATS, INPUT_PACKINGS, RecipeFormat, packing_of
from megtool.quant.recipes.match import Decision
from megtool.quant.statistics.activation_sites import ActivationSite


def read_qparams(
    modules: Mapping[str, Any],
    decisions: Mapping[str, Decision],
    sites: Sequence[ActivationSite],
    norm_readers: Mapping[str, Sequence[str]],
    *,
    chose_codes: bool = False,
) -> QParams:
    """Read the quantization parameters of modules that `mtq.quantize` has calibrated.

    Fused siblings share one smoothing scale, as in ModelOpt's export (the mean, with amaxes of the
    weights recomputed), the largest input amax, and for NVFP4 the largest global amax.

    Args:
        modules: ModelOpt's modules by canonical name.
        decisions: the decisions of all modules, by name.
        sites: the sites to read, all of whose quantized modules are in `modules`.
        norm_readers: the readers of each norm (`map_norm_readers`).
        chose_codes: weights hold the values of the codes that were chosen (GPTQ).

    Raises:
        CalibrationError: an amax is missing.
    """
    qparams = QParams()
    for site in sites:
        group = [decisions[m] for m in site.modules if m in modules]
        if not group:
            continue
        members = [(d, modules[d.module.name]) for d in group]
        if site.kind == "kv_cache":
            qparams.kv_caches[group[0].module.name] = _read_kv_cache(*members[0])
            continue
        folds = bool(site.norm) and set(norm_readers[site.norm]) <= set(site.modules)
        _read_site(qparams, site, members, folds=folds)
        if chose_codes:
            for d, module in members:
                qparams.weights[d.module.name] = _with_codes(
                    qparams.weights[d.module.name], module.weight
                )
    return qparams


def _with_codes(qparams: WeightQParams, weight_OI: Any) -> WeightQParams:
    """The parameters with the codes of a weight that has only values of its grid."""
    import torch

    grid = make_grid(qparams.format)
    amax = torch.from_numpy(np.array(qparams.amax, np.float32))
    scale = grid.broadcast(grid.scale(amax, qparams.global_amax or None))
    codes = grid.stored_codes(grid.nearest_codes(weight_OI.detach().float().cpu() / scale))
    return replace(qparams, codes=codes.numpy())


def _read_site(
    qparams: QParams, site: ActivationSite, group: Sequence[tuple[Decision, Any]], *, folds: bool
) -> None:
    """Read the parameters of one site. The smoothing scale is folded into the norm (`folds`) only
    if all readers of the norm share it; else each module stores its own, as with SVDQuant."""
    by_format: dict[tuple[RecipeFormat | None, bool], list[tuple[Decision, Any]]] = defaultdict(
        list
    )
    for d, m in group:
        by_format[d.format, m.input_quantizer.pre_quant_scale is not None].append((d, m))
    groups: list[list[WeightQParams]] = []
    residuals: dict[str, Any] = {}
    for (form, smoothed), members in by_format.items():
        scale = _read_smoothing_scale([m for _, m in members]) if smoothed else None
        if form is not None and form.algo and form.number.has_branch:
            groups.append([_read_branch(d, m, scale, residuals) for d, m in members])
            continue
        into_norm = folds and len(members) == len(site.modules)
        if scale is not None and into_norm:
            qparams.norm_scales[site.norm] = scale
        groups.append([_read_weight(d, m, scale, stores=not into_norm) for d, m in members])
    if not any(smoothed for _, smoothed in by_format):  # all of them read the same inputs
        groups = [[t for weights in groups for t in weights]]
    for weights in groups:
        input_amax = max(t.input_amax for t in weights)
        global_amax = max(t.global_amax for t in weights)
        for t in weights:
            is_shared = packing_of(t.format).startswith("nvfp4")
            qparams.weights[t.module] = replace(
                t, input_amax=input_amax, global_amax=global_amax if is_shared else t.global_amax
            )
    for name, residual_OI in residuals.items():
        t = qparams.weights[name]
        amax, codes = make_grid(t.format).encode(residual_OI, t.global_amax)
        qparams.weights[name] = replace(t, amax=amax.numpy(), codes=codes.numpy())


def _read_branch(
    decision: Decision, module: Any, scale: Floats | None, residuals: dict[str, Any]
) -> WeightQParams:
    """The parameters of a module with SVDQuant's matrices. What these leave of the weight, after
    they and the smoothing scale are rounded to bfloat16, is added to `residuals`."""
    import torch

    quantizer = module.weight_quantizer
    up, down, weight = (
        t.detach().float().cpu()
        for t in (quantizer.svdquant_lora_b, quantizer.svdquant_lora_a, module.weight)
    )
    exact_I = torch.ones(weight.shape[1]) if scale is None else torch.from_numpy(scale)
    scale_I = round_to_pre_quant_scale(exact_I)
    change_I = scale_I / exact_I
    branch, residual = subtract_branch((weight + up @ down) * change_I, up, down * change_I)
    residuals[decision.module.name] = residual
    read = _read_weight(decision, module, scale_I.numpy(), stores=True)
    return replace(read, branch=branch, global_amax=float(residual.abs().max()))


def _read_smoothing_scale(modules: Sequence[Any]) -> Floats:
    """Read the smoothing scale of one site, the same for all its modules."""
    if len(modules) > 1:
        from modelopt.torch.export.quant_utils import preprocess_linear_fusion

        with silence_output():
            preprocess_linear_fusion(modules, resmooth_only=True)
    return np.float32(1) / _to_numpy(modules[0].input_quantizer.pre_quant_scale).reshape(-1)


def _read_weight(
    decision: Decision, module: Any, scale: Floats | None, *, stores: bool
) -> WeightQParams:
    format = decision.format or RecipeFormat(name="")
    quantizer, global_amax, amax = module.weight_quantizer, 0.0, None
    packing = packing_of(format)
    if format.algo == "W4A8_AWQ":
        global_amax = float(_require_amax(quantizer[1].amax, decision))
        quantizer = quantizer[0]
    if packing.startswith("nvfp4") and getattr(quantizer, "global_amax", None) is not None:
        amax = _to_numpy(_stored_amax(quantizer))
        amax = amax.reshape(_amax_shape(packing, decision.module.shape))
        global_amax = float(quantizer.global_amax) * _room_above(quantizer)
        if _is_learned(quantizer):
            amax = np.maximum(amax, smallest_learned_amax(global_amax))
    elif packing.startswith("nvfp4"):
        global_amax = float(_require_amax(quantizer.amax, decision))
    elif not packing.startswith("mxfp"):
        amax = _to_numpy(_require_amax(_stored_amax(quantizer), decision)).reshape(
            _amax_shape(packing, decision.module.shape)
        )
    input_amax = 0.0
    if format.algo in INPUT_PACKINGS and FORMATS[format.algo].calibrates:
        calibrated = module.input_quantizer.amax
        input_amax = format.input_amax or float(_require_amax(calibrated, decision).max())
    return WeightQParams(
        module=decision.module.name,
        format=format,
        smoothing_scale=scale,
        stores_pre_quant_scale=scale is not None and stores,
        amax=amax,
        global_amax=global_amax,
        codes=_learned_codes(format, quantizer, module.weight),
        input_amax=input_amax,
    )


def _is_learned(quantizer: Any) -> bool:
    """Whether the amaxes of blocks are those that training changes (`enable_lsq`)."""
    return bool(getattr(quantizer, "_lsq", False))


def _stored_amax(quantizer: Any) -> Any:
    return quantizer.amax_post if _is_learned(quantizer) else quantizer.amax


def _learned_codes(format: RecipeFormat, quantizer: Any, weight_OI: Any) -> Any:
    """The codes under the pre scale, int8 `[out, in]`; None if they are the nearest ones of the
    scale that is stored."""
    if not _is_learned(quantizer):
        return None
    import torch

    rounds, rounds_pre = quantizer._quantize_scales, quantizer._quantize_pre_scale
    pre = quantizer._block_scale_from_amax(quantizer.amax_pre, rounds and rounds_pre)
    post = quantizer._block_scale_from_amax(quantizer.amax_post, rounds)
    if torch.equal(pre, post):
        return None
    grid, weight = make_grid(format), weight_OI.detach().float()
    values = weight.reshape(pre.numel(), -1) / pre.reshape(-1, 1)
    return grid.stored_codes(grid.nearest_codes(values.view(weight.shape)).cpu()).numpy()


def _room_above(quantizer: Any) -> float:
    """By what the largest scale of NVFP4's blocks is below 448 before any is chosen; not where
    scales are learned (`_block_scale_from_amax`)."""
    if _is_learned(quantizer):
        return 1.0
    from modelopt.torch.quantization.utils.numeric_utils import fp8_max_for_normalization

    return E4M3_LARGEST / float(fp8_max_for_normalization(quantizer))


def _read_kv_cache(decision: Decision, module: Any) -> KVCacheQParams:
    format = decision.format or RecipeFormat(name="")
    if format.constant:
        amax = 448.0 if format.kv_algo == "FP8" else 448.0 * 6
        amaxes = amax, amax
    else:
        keys, values = module.k_bmm_quantizer.amax, module.v_bmm_quantizer.amax
        amaxes = (
            float(_require_amax(keys, decision).max()),
            float(_require_amax(values, decision).max()),
        )
    return KVCacheQParams(
        module=decision.module.name, format=format, key_amax=amaxes[0], value_amax=amaxes[1]
    )


def _amax_shape(packing: str, shape: Sequence[int]) -> tuple[int, ...]:
    granularity = packing.partition(":")[2]
    if granularity == "tensor":
        return ()
    if granularity == "channel":
        return (shape[0],)
    sizes = [int(n) for n in granularity.split("x")]
    rows = shape[0] if len(sizes) == 1 else shape[0] // sizes[0]
    return rows, shape[1] // sizes[-1]


def _require_amax(amax: Any, decision: Decision) -> Any:
    if amax is None:
        raise CalibrationError(
            f"ModelOpt has no amax for {decision.module.name}",
            hint="check that the data reaches it; experts without tokens have no amax",
        )
    return amax


def _to_numpy(tensor: Any) -> Floats:
    out: Floats = np.array(tensor.detach().float().cpu().numpy(), np.float32)
    return out
