"""Backend: NVIDIA ModelOpt calibrates instead, on the model as transformers builds it.

Decisions become ModelOpt's quantizer settings by exact names, it is run over the same batches, and
its amaxes and factors are read back as treatments before it would export them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool.console import Progress, silent
from megtool.errors import CalibrationError, RecipeError, UsageError
from megtool.quant.calibration.activation_sites import Point, readers_of
from megtool.quant.modelopt_import import no_bars, packages, quiet
from megtool.quant.qparams import INPUTS, Cache, Floats, Settlement, Treatment, packing_of
from megtool.quant.recipes.formats import FORMATS, Format
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
"""Our algorithms, and its own, by its names."""


def calibrate_with_modelopt(
    folder: Path,
    recipe: Recipe,
    decisions: Sequence[Decision],
    points: Sequence[Point],
    batches: Sequence[Batch],
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> Settlement:
    """What ModelOpt makes of the model in a Hugging Face folder, shown all batches.

    Raises:
        MissingPackageError: it is not installed.
        RecipeError: it cannot do what the recipe asks for, or not to this model.
        UsageError: it needs a GPU for it.
        CalibrationError: it found no amax where one is needed.
    """
    config = modelopt_config(recipe, decisions, device=str(device))
    model = quantized_model(folder, config, batches, dtype=dtype, device=device, progress=progress)
    return read_settlement(model, decisions, points)


def modelopt_config(
    recipe: Recipe, decisions: Sequence[Decision], *, device: str = "cpu"
) -> dict[str, Any]:
    """ModelOpt's configuration for decisions: everything off, then each module by its name.

    Raises:
        RecipeError: algorithms that it does not have, or several at once; amaxes by rows of weights
            that transformers has in one module.
        UsageError: what it can calibrate on a GPU alone.
    """
    taken = [d for d in decisions if d.format is not None]
    if waiting := [d for d in taken if d.format and d.format.choose]:
        raise RecipeError(
            f"the format of {waiting[0].module.name} is still to be chosen",
            hint="an automatic recipe is decided before it is calibrated",
        )
    methods = dict.fromkeys((d.format.method if d.format else "") or recipe.method for d in taken)
    if len(methods) > 1:
        raise RecipeError(
            f"recipe {recipe.name} asks for {' and '.join(methods)}, and ModelOpt runs one "
            "algorithm over the whole model",
            hint="--backend megtool runs several",
        )
    algorithm = _algorithm(recipe, next(iter(methods), "none"))
    if device == "cpu" and algorithm["method"] != "max":
        for d in taken:
            if d.format and d.format.algo and packing_of(d.format).startswith(("nvfp4", "mxfp")):
                raise UsageError(
                    f"ModelOpt runs {algorithm['method']} for {d.format.algo} on a GPU alone",
                    hint="--backend megtool does it on any device",
                )
    _check_apart(taken)
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for d in taken:
        entries += _entries(d)
    return {"quant_cfg": entries, "algorithm": algorithm}


def _check_apart(taken: Sequence[Decision]) -> None:
    """Refuse weights that transformers has in one module, where rows have amaxes of their own:
    which of ModelOpt's are whose is not known here."""
    found: dict[str, Decision] = {}
    for d in taken:
        packing = packing_of(d.format) if d.format and d.format.algo else "tensor"
        if packing.startswith(("nvfp4", "mxfp")) or packing.endswith("tensor"):
            continue
        if (first := found.setdefault(_hf_name(d), d)).module.name != d.module.name:
            raise RecipeError(
                f"{first.module.name} and {d.module.name} are rows of {_hf_name(d)}, and "
                f"ModelOpt's amaxes of {d.label} are by rows",
                hint="--backend megtool calibrates each",
            )


def _algorithm(recipe: Recipe, method: str) -> dict[str, Any]:
    options = dict(recipe.algorithm) if recipe.method == method else {}
    if method not in _METHODS:
        known = ", ".join(m for m in _METHODS if m != "none")
        raise RecipeError(
            f"ModelOpt is not asked for {method!r}",
            hint=f"--backend megtool, or one of {known}",
        )
    if recipe.folds:
        raise RecipeError(
            f"recipe {recipe.name} stores no factors of columns, and ModelOpt does",
            hint="--backend megtool, or `fold: false`",
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
    found, name = decision.format, _hf_name(decision)
    if found is None:
        return
    if found.kv_algo:
        cfg = _FP8 if found.kv_algo == "FP8" else _blocks((2, 1), 16, (4, 3))
        cfg = {**cfg, "use_constant_amax": True} if found.constant else cfg
        yield {"quantizer_name": f"{name}.[kv]_bmm_quantizer", "cfg": cfg}
        return
    weights: Any = _setting(packing_of(found))
    if found.algo == "W4A8_AWQ":
        weights = [weights, dict(_FP8)]
    yield {"quantizer_name": f"{name}.weight_quantizer", "cfg": weights}
    if found.algo in INPUTS:
        yield {"quantizer_name": f"{name}.input_quantizer", "cfg": _setting(INPUTS[found.algo])}


def _hf_name(decision: Decision) -> str:
    names = decision.module.called("hf")
    if not names:
        raise RecipeError(
            f"{decision.module.name} has no name in transformers",
            hint="--backend megtool needs none",
        )
    return names[0]


def _blocks(bits: tuple[int, int], size: int, scale: tuple[int, int]) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "block_sizes": {-1: size, "type": "dynamic", "scale_bits": scale},
    }


def _setting(packing: str) -> dict[str, Any]:
    """The settings of a quantizer for numbers packed so, as `fp8:tensor` or `int4rows:128`."""
    name, _, how = packing.partition(":")
    if name == "nvfp4":
        return _blocks((2, 1), int(how), (4, 3))
    if name in ("mxfp4", "mxfp8"):
        return _blocks((2, 1) if name == "mxfp4" else (4, 3), int(how), (8, 0))
    bits: Any = {"fp8": (4, 3), "int8": 8, "int4rows": 4}[name]
    if how == "token":
        return {"num_bits": bits, "type": "dynamic", "block_sizes": {-1: None}}
    if how in ("tensor", "channel"):
        return {"num_bits": bits, "axis": 0 if how == "channel" else None}
    sizes = [int(n) for n in how.split("x")]
    if len(sizes) == 2:
        return {"num_bits": bits, "block_sizes": {-1: sizes[1], -2: sizes[0]}}
    return {"num_bits": bits, "block_sizes": {-1: sizes[0], "type": "static"}}


def quantized_model(
    folder: Path,
    config: Mapping[str, Any],
    batches: Sequence[Batch],
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> Any:
    """The transformers model of a folder after `mtq.quantize`: its forward pass is simulated.

    Raises:
        MissingPackageError: ModelOpt or transformers is not installed.
    """
    mtq, transformers = packages()
    import torch

    with quiet(), no_bars(transformers):
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
                    model(**_inputs(batch, model.dtype, device), use_cache=False)
                    progress("calibrate", number + 1, len(batches))

        # A copy: it changes what it is given.
        return mtq.quantize(model, {**config, "quant_cfg": list(config["quant_cfg"])}, run)


def _inputs(batch: Batch, dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """A batch as transformers takes it; tokens attend within their documents alone."""
    import torch

    valid_BS, documents_BS = batch.valid_BS, batch.documents_BS
    out: dict[str, Any] = {"input_ids": batch.tokens_BS.to(device)}
    if batch.positions_BS is not None:
        out["position_ids"] = batch.positions_BS.to(device)
    if documents_BS is not None:
        tokens = documents_BS.shape[1]
        may_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
        may_BSS &= torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if valid_BS is not None:
            may_BSS &= valid_BS[:, None, :] | torch.eye(tokens, dtype=torch.bool)
        mask = torch.zeros(may_BSS.shape, dtype=dtype)
        mask.masked_fill_(~may_BSS, torch.finfo(dtype).min)
        out["attention_mask"] = mask[:, None].to(device)
    elif valid_BS is not None:
        out["attention_mask"] = valid_BS.long().to(device)
    return out


def read_settlement(
    model: Any, decisions: Sequence[Decision], points: Sequence[Point]
) -> Settlement:
    """Treatments, caches and norms of a model that `mtq.quantize` has calibrated.

    Siblings get one factor for each column as ModelOpt's export gives it to them (the mean, weights
    and their amax made anew), the largest amax of inputs, and under NVFP4 of whole weights.

    Raises:
        RecipeError: a module has no quantizer in ModelOpt, as fused experts have none by expert.
        CalibrationError: an amax is missing.
    """
    by_name = {d.module.name: d for d in decisions if d.format is not None}
    held = dict(model.named_modules())
    done = Settlement()
    readers = readers_of(points, [d.module for d in decisions])
    for point in points:
        some = [by_name[m] for m in point.modules if m in by_name]
        if not some:
            continue
        if point.what == "kv_cache":
            done.caches[some[0].module.name] = _cache(some[0], held_module(held, some[0], "k_bmm"))
            continue
        folds = bool(point.norm) and set(readers[point.norm]) <= set(point.modules)
        _read_point(done, point, [(d, held_module(held, d, "weight")) for d in some], folds=folds)
    return done


def held_module(held: Mapping[str, Any], decision: Decision, what: str) -> Any:
    """The module of a decision among a model's, by name.

    Raises:
        RecipeError: it has no quantizer of `what` in ModelOpt.
    """
    module = held.get(_hf_name(decision))
    if module is None or not hasattr(module, f"{what}_quantizer"):
        raise RecipeError(
            f"ModelOpt has no quantizer for {_hf_name(decision)}, as transformers builds the model",
            hint="--backend megtool knows every module; or keep it by a rule",
        )
    return module


def _read_point(
    done: Settlement, point: Point, some: Sequence[tuple[Decision, Any]], *, folds: bool
) -> None:
    """Take over what was found of one input. Its factors go into the norm before (`folds`) only if
    all that the norm feeds has the same ones; else each module stores its own."""
    alike: dict[tuple[Format | None, bool], list[tuple[Decision, Any]]] = defaultdict(list)
    for d, m in some:
        alike[d.format, m.input_quantizer.pre_quant_scale is not None].append((d, m))
    made: list[list[Treatment]] = []
    for (_, smoothed), members in alike.items():
        columns = _columns([m for _, m in members]) if smoothed else None
        into_norm = folds and len(members) == len(point.modules)
        if columns is not None and into_norm:
            done.norms[point.norm] = columns
        made.append([_treatment(d, m, columns, stores=not into_norm) for d, m in members])
    if not any(smoothed for _, smoothed in alike):  # all of them multiply the same numbers
        made = [[t for treatments in made for t in treatments]]
    for treatments in made:
        inputs = max(t.input_amax for t in treatments)
        second = max(t.second_amax for t in treatments)
        for t in treatments:
            shares = packing_of(t.format).startswith("nvfp4")
            done.treatments[t.module] = replace(
                t, input_amax=inputs, second_amax=second if shares else t.second_amax
            )


def _columns(modules: Sequence[Any]) -> Floats:
    """What ModelOpt divides the columns of one input by, the same for all its modules."""
    if len(modules) > 1:
        from modelopt.torch.export.quant_utils import preprocess_linear_fusion

        with quiet():
            preprocess_linear_fusion(modules, resmooth_only=True)
    return np.float32(1) / _numbers(modules[0].input_quantizer.pre_quant_scale).reshape(-1)


def _treatment(
    decision: Decision, module: Any, columns: Floats | None, *, stores: bool
) -> Treatment:
    found = decision.format or Format(name="")
    quantizer, second, amax = module.weight_quantizer, 0.0, None
    packing = packing_of(found)
    if found.algo == "W4A8_AWQ":
        second = float(_known(quantizer[1].amax, decision))
        quantizer = quantizer[0]
    if packing.startswith("nvfp4"):
        second = float(_known(quantizer.amax, decision))
    elif not packing.startswith("mxfp"):
        amax = _numbers(_known(quantizer.amax, decision)).reshape(
            _amax_shape(packing, decision.module.shape)
        )
    inputs = 0.0
    if found.algo in INPUTS and FORMATS[found.algo].calibrates:
        inputs = float(_known(module.input_quantizer.amax, decision).max())
    return Treatment(
        module=decision.module.name,
        format=found,
        columns=columns,
        stores_columns=columns is not None and stores,
        amax=amax,
        second_amax=second,
        input_amax=inputs,
    )


def _cache(decision: Decision, module: Any) -> Cache:
    found = decision.format or Format(name="")
    if found.constant:
        top = 448.0 if found.kv_algo == "FP8" else 448.0 * 6
        amaxes = top, top
    else:
        keys, values = module.k_bmm_quantizer.amax, module.v_bmm_quantizer.amax
        amaxes = float(_known(keys, decision).max()), float(_known(values, decision).max())
    return Cache(
        module=decision.module.name, format=found, key_amax=amaxes[0], value_amax=amaxes[1]
    )


def _amax_shape(packing: str, shape: Sequence[int]) -> tuple[int, ...]:
    how = packing.partition(":")[2]
    if how == "tensor":
        return ()
    if how == "channel":
        return (shape[0],)
    sizes = [int(n) for n in how.split("x")]
    rows = shape[0] if len(sizes) == 1 else shape[0] // sizes[0]
    return rows, shape[1] // sizes[-1]


def _known(amax: Any, decision: Decision) -> Any:
    if amax is None:
        raise CalibrationError(
            f"ModelOpt has found no largest magnitude for {decision.module.name}",
            hint="did the data reach it? experts that no token goes to have none",
        )
    return amax


def _numbers(tensor: Any) -> Floats:
    out: Floats = np.array(tensor.detach().float().cpu().numpy(), np.float32)
    return out
