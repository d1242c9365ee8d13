"""The ModelOpt backend: NVIDIA ModelOpt calibrates the transformers model.

Decisions become ModelOpt quantizer settings with exact names. ModelOpt runs over the same batches,
and its amaxes and `pre_quant_scale`s are read back as quantization parameters.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool.console import Progress, silent
from megtool.errors import CalibrationError, MissingPackageError, RecipeError, UsageError
from megtool.quant.calibration.activation_sites import ActivationSite, map_norm_readers
from megtool.quant.qparams import Floats, KVCacheQParams, QParams, WeightQParams
from megtool.quant.recipes.formats import FORMATS, INPUT_PACKINGS, RecipeFormat, packing_of
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from megtool.model.batch import Batch

_FP8: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
_METHODS: Mapping[str, str] = {
    "none": "max",
    "max": "max",
    "mse": "mse",
    "smoothquant": "smoothquant",
    "awq": "awq_lite",
    "awq_lite": "awq_lite",
    "awq_full": "awq_full",
    "awq_clip": "awq_clip",
}
"""Our algorithms and ModelOpt's, by ModelOpt's names."""


def calibrate_with_modelopt(
    folder: Path,
    recipe: Recipe,
    decisions: Sequence[Decision],
    sites: Sequence[ActivationSite],
    batches: Sequence[Batch],
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> QParams:
    """Calibrate the model in a Hugging Face folder with ModelOpt on all batches.

    Raises:
        MissingPackageError: ModelOpt is not installed.
        RecipeError: ModelOpt does not support the recipe, or not for this model.
        UsageError: ModelOpt needs a GPU for it.
        CalibrationError: an amax is missing.
    """
    config = build_modelopt_config(recipe, decisions, device=str(device))
    model = quantize_model(folder, config, batches, dtype=dtype, device=device, progress=progress)
    return read_qparams(model, decisions, sites)


def build_modelopt_config(
    recipe: Recipe, decisions: Sequence[Decision], *, device: str = "cpu"
) -> dict[str, Any]:
    """Build ModelOpt's configuration: everything disabled, then each module by name.

    Raises:
        RecipeError: an algorithm that ModelOpt does not have, or several at once; per-row amaxes of
            weights that are one module in transformers.
        UsageError: something that ModelOpt can only calibrate on a GPU.
    """
    quantized = [d for d in decisions if d.format is not None]
    if undecided := [d for d in quantized if d.format and d.format.choose]:
        raise RecipeError(
            f"the format of {undecided[0].module.name} is not chosen yet",
            hint="choose formats before calibrating",
        )
    methods = dict.fromkeys(
        (d.format.method if d.format else "") or recipe.method for d in quantized
    )
    if len(methods) > 1:
        raise RecipeError(
            f"recipe {recipe.name} asks for {' and '.join(methods)}, and ModelOpt runs one "
            "algorithm for the whole model",
            hint="--backend megtool supports several",
        )
    algorithm = _algorithm(recipe, next(iter(methods), "none"))
    if device == "cpu" and algorithm["method"] != "max":
        for d in quantized:
            if d.format and d.format.algo and packing_of(d.format).startswith(("nvfp4", "mxfp")):
                raise UsageError(
                    f"ModelOpt runs {algorithm['method']} for {d.format.algo} only on a GPU",
                    hint="--backend megtool supports any device",
                )
    _check_shared_tensors(quantized)
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for d in quantized:
        entries += _entries(d)
    return {"quant_cfg": entries, "algorithm": algorithm}


def _check_shared_tensors(quantized: Sequence[Decision]) -> None:
    """Reject per-row amaxes of weights that are one module in transformers: their rows cannot be
    separated."""
    by_name: dict[str, Decision] = {}
    for d in quantized:
        packing = packing_of(d.format) if d.format and d.format.algo else "tensor"
        if packing.startswith(("nvfp4", "mxfp")) or packing.endswith("tensor"):
            continue
        if (first := by_name.setdefault(_hf_name(d), d)).module.name != d.module.name:
            raise RecipeError(
                f"{first.module.name} and {d.module.name} are rows of {_hf_name(d)}, and "
                f"ModelOpt's amaxes of {d.label} are by rows",
                hint="--backend megtool calibrates each of them",
            )


def _algorithm(recipe: Recipe, method: str) -> dict[str, Any]:
    options = dict(recipe.algorithm) if recipe.method == method else {}
    if method not in _METHODS:
        names = ", ".join(m for m in _METHODS if m != "none")
        raise RecipeError(
            f"the ModelOpt backend does not support {method!r}",
            hint=f"use --backend megtool, or one of {names}",
        )
    if recipe.folds_scales:
        raise RecipeError(
            f"recipe {recipe.name} has `fold: true`, and ModelOpt stores pre_quant_scale",
            hint="use --backend megtool, or `fold: false`",
        )
    for option in ("four_over_six", "scale_search", "cast"):
        if options.get(option):
            raise RecipeError(
                f"recipe {recipe.name} has `{option}: true`, and the ModelOpt backend takes the "
                "scales of the largest elements",
                hint=f"use --backend megtool, or `{option}: false`",
            )
    out: dict[str, Any] = {"method": _METHODS[method]}
    if method == "awq" and options.get("clip"):
        out["method"] = "awq_full"
    if "alpha" in options and out["method"] == "smoothquant":
        out["alpha"] = float(options["alpha"])
    if "alpha_step" in options and out["method"] in ("awq_lite", "awq_full"):
        out["alpha_step"] = float(options["alpha_step"])
    return out


def _entries(decision: Decision) -> Iterator[dict[str, Any]]:
    format, name = decision.format, _hf_name(decision)
    if format is None:
        return
    if format.kv_algo:
        cfg = _FP8 if format.kv_algo == "FP8" else _block_config((2, 1), 16, (4, 3))
        cfg = {**cfg, "use_constant_amax": True} if format.constant else cfg
        yield {"quantizer_name": f"{name}.[kv]_bmm_quantizer", "cfg": cfg}
        return
    weights: Any = _quantizer_config(packing_of(format))
    if format.algo == "W4A8_AWQ":
        weights = [weights, dict(_FP8)]
    yield {"quantizer_name": f"{name}.weight_quantizer", "cfg": weights}
    if format.algo in INPUT_PACKINGS:
        yield {
            "quantizer_name": f"{name}.input_quantizer",
            "cfg": _quantizer_config(INPUT_PACKINGS[format.algo]),
        }


def _hf_name(decision: Decision) -> str:
    names = decision.module.names_in("hf")
    if not names:
        raise RecipeError(
            f"{decision.module.name} has no module name in transformers",
            hint="use --backend megtool",
        )
    return names[0]


def _block_config(bits: tuple[int, int], size: int, scale: tuple[int, int]) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "block_sizes": {-1: size, "type": "dynamic", "scale_bits": scale},
    }


def _quantizer_config(packing: str) -> dict[str, Any]:
    """The quantizer settings for a packing such as `fp8:tensor` or `int4rows:128`."""
    name, _, granularity = packing.partition(":")
    if name == "nvfp4":
        return _block_config((2, 1), int(granularity), (4, 3))
    if name in ("mxfp4", "mxfp8"):
        return _block_config((2, 1) if name == "mxfp4" else (4, 3), int(granularity), (8, 0))
    bits: Any = {"fp8": (4, 3), "int8": 8, "int4rows": 4}[name]
    if granularity == "token":
        return {"num_bits": bits, "type": "dynamic", "block_sizes": {-1: None}}
    if granularity in ("tensor", "channel"):
        return {"num_bits": bits, "axis": 0 if granularity == "channel" else None}
    sizes = [int(n) for n in granularity.split("x")]
    if len(sizes) == 2:
        return {"num_bits": bits, "block_sizes": {-1: sizes[1], -2: sizes[0]}}
    return {"num_bits": bits, "block_sizes": {-1: sizes[0], "type": "static"}}


def quantize_model(
    folder: Path,
    config: Mapping[str, Any],
    batches: Sequence[Batch],
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> Any:
    """Load the transformers model of a folder and run `mtq.quantize` (fake quantization).

    Raises:
        MissingPackageError: ModelOpt or transformers is not installed.
    """
    mtq, transformers = import_modelopt()
    import torch

    with silence_output(), without_progress_bars(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
        ).to(device)
        model.eval()

        def run(model: Any) -> None:
            with torch.no_grad():
                for number, batch in enumerate(batches):
                    model(**_transformers_inputs(batch, model.dtype, device), use_cache=False)
                    progress("calibrate", number + 1, len(batches))

        # A copy, because mtq.quantize modifies its argument.
        return mtq.quantize(model, {**config, "quant_cfg": list(config["quant_cfg"])}, run)


def _transformers_inputs(
    batch: Batch, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Any]:
    """Convert a batch to transformers inputs; tokens attend only within their document."""
    import torch

    valid_BS, documents_BS = batch.valid_BS, batch.documents_BS
    out: dict[str, Any] = {"input_ids": batch.tokens_BS.to(device)}
    if batch.positions_BS is not None:
        out["position_ids"] = batch.positions_BS.to(device)
    if documents_BS is not None:
        tokens = documents_BS.shape[1]
        allowed_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
        allowed_BSS &= torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if valid_BS is not None:
            allowed_BSS &= valid_BS[:, None, :] | torch.eye(tokens, dtype=torch.bool)
        mask = torch.zeros(allowed_BSS.shape, dtype=dtype)
        mask.masked_fill_(~allowed_BSS, torch.finfo(dtype).min)
        out["attention_mask"] = mask[:, None].to(device)
    elif valid_BS is not None:
        out["attention_mask"] = valid_BS.long().to(device)
    return out


def read_qparams(
    model: Any, decisions: Sequence[Decision], sites: Sequence[ActivationSite]
) -> QParams:
    """Read the quantization parameters of a model that `mtq.quantize` has calibrated.

    Fused siblings share one smoothing scale, as in ModelOpt's export (the mean, with amaxes of the
    weights recomputed), the largest input amax, and for NVFP4 the largest global amax.

    Raises:
        RecipeError: a module has no quantizer in ModelOpt, as with fused experts.
        CalibrationError: an amax is missing.
    """
    by_name = {d.module.name: d for d in decisions if d.format is not None}
    modules = dict(model.named_modules())
    qparams = QParams()
    readers = map_norm_readers(sites, [d.module for d in decisions])
    for site in sites:
        group = [by_name[m] for m in site.modules if m in by_name]
        if not group:
            continue
        if site.kind == "kv_cache":
            qparams.kv_caches[group[0].module.name] = _read_kv_cache(
                group[0], find_quantizer_module(modules, group[0], "k_bmm")
            )
            continue
        folds = bool(site.norm) and set(readers[site.norm]) <= set(site.modules)
        _read_site(
            qparams,
            site,
            [(d, find_quantizer_module(modules, d, "weight")) for d in group],
            folds=folds,
        )
    return qparams


def find_quantizer_module(modules: Mapping[str, Any], decision: Decision, quantizer: str) -> Any:
    """Find the module of a decision by name.

    Raises:
        RecipeError: it has no such quantizer in ModelOpt.
    """
    module = modules.get(_hf_name(decision))
    if module is None or not hasattr(module, f"{quantizer}_quantizer"):
        raise RecipeError(
            f"ModelOpt has no quantizer for {_hf_name(decision)}, as transformers builds the model",
            hint="use --backend megtool, or add a rule that keeps this module",
        )
    return module


def _read_site(
    qparams: QParams, site: ActivationSite, group: Sequence[tuple[Decision, Any]], *, folds: bool
) -> None:
    """Read the parameters of one site. The smoothing scale is folded into the norm (`folds`) only
    if all readers of the norm share it; else each module stores its own."""
    by_format: dict[tuple[RecipeFormat | None, bool], list[tuple[Decision, Any]]] = defaultdict(
        list
    )
    for d, m in group:
        by_format[d.format, m.input_quantizer.pre_quant_scale is not None].append((d, m))
    groups: list[list[WeightQParams]] = []
    for (_, smoothed), members in by_format.items():
        scale = _read_smoothing_scale([m for _, m in members]) if smoothed else None
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
    if packing.startswith("nvfp4"):
        global_amax = float(_require_amax(quantizer.amax, decision))
    elif not packing.startswith("mxfp"):
        amax = _to_numpy(_require_amax(quantizer.amax, decision)).reshape(
            _amax_shape(packing, decision.module.shape)
        )
    input_amax = 0.0
    if format.algo in INPUT_PACKINGS and FORMATS[format.algo].calibrates:
        input_amax = float(_require_amax(module.input_quantizer.amax, decision).max())
    return WeightQParams(
        module=decision.module.name,
        format=format,
        smoothing_scale=scale,
        stores_pre_quant_scale=scale is not None and stores,
        amax=amax,
        global_amax=global_amax,
        input_amax=input_amax,
    )


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


def check_quantizers(
    hf_config: bytes,
    config: Mapping[str, Any],
    decisions: Sequence[Decision],
    sites: Sequence[ActivationSite],
) -> None:
    """Check that ModelOpt has a quantizer for every module; fused experts have none.

    The model of `hf_config`, a config.json, is built on torch's meta device, and ModelOpt inserts
    quantizers by `config` (see `build_modelopt_config`), as for the real model.

    Raises:
        MissingPackageError: ModelOpt or transformers is not installed.
        RecipeError: a module has no quantizer; says which.
        UsageError: transformers cannot build the model.
    """
    mtq, transformers = import_modelopt()
    import torch

    with (
        tempfile.TemporaryDirectory(prefix="megtool-") as folder,
        silence_output(),
        without_progress_bars(transformers),
    ):
        (Path(folder) / "config.json").write_bytes(hf_config)
        try:
            model_config = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(
                    model_config, trust_remote_code=False
                )
        except (ValueError, KeyError, OSError) as e:
            first = next(iter(str(e).splitlines()), type(e).__name__)
            raise UsageError(
                f"--backend modelopt needs a transformers model, which failed to build: {first}",
                hint="--backend megtool does not need transformers",
            ) from e
        entries = list(config["quant_cfg"])  # a copy: it changes what it is given
        model = mtq.quantize(model, {**config, "quant_cfg": entries, "algorithm": None}, None)
    modules = dict(model.named_modules())
    by_name = {d.module.name: d for d in decisions if d.format is not None}
    for site in sites:
        for module in site.modules:
            if module in by_name:
                quantizer = "k_bmm" if site.kind == "kv_cache" else "weight"
                find_quantizer_module(modules, by_name[module], quantizer)


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Suppress what the packages print and warn about."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def without_progress_bars(transformers: Any) -> Iterator[None]:
    """Turn off the progress bars of transformers."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def import_modelopt() -> tuple[Any, Any]:
    """Import `modelopt.torch.quantization` and transformers.

    Raises:
        MissingPackageError: one is not installed.
    """
    try:
        with silence_output():
            import modelopt.torch.quantization as mtq
            import transformers
    except ImportError as e:
        raise MissingPackageError(
            f"--backend modelopt needs a package that is not installed: {e}",
            hint="pip install 'megtool[modelopt]'",
        ) from e
    return mtq, transformers
