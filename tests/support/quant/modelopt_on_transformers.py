"""ModelOpt on the model that transformers builds: the peer of ModelOpt on our decoder."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megtool.model.batch import Batch
from megtool.quant.fake_quant.rounding_torch import to_e2m1
from megtool.quant.modelopt.load import import_modelopt, silence_output
from megtool.quant.modelopt.quantizer_config import build_modelopt_config
from megtool.quant.modelopt.read_qparams import read_qparams
from megtool.quant.modelopt.unit_modules import ROUNDING
from megtool.quant.qparams import QParams
from megtool.quant.resolve import ResolvedRecipe
from megtool.quant.statistics.activation_sites import map_norm_readers
from tests.support.quant.loaded import points_of


def calibrate_on_transformers(
    folder: Path,
    decided: ResolvedRecipe,
    batches: Sequence[Batch],
    config: dict[str, Any] | None = None,
    show: Callable[[Any], object] = lambda _: None,
) -> QParams:
    """What `mtq.quantize` finds for the transformers model of a folder, in float32; `config` is
    ModelOpt's own (`own_config`), or what our decisions become. `show` is handed the model."""
    import transformers

    mtq = import_modelopt()
    decisions = decided.matched.decisions
    names = {d.module.name: d.module.names_in("hf")[0] for d in decisions if d.format is not None}
    if config is None:
        config = build_modelopt_config(decided.recipe, decisions, names=names)
    algorithm = config["algorithm"]
    algorithm = {"method": algorithm} if isinstance(algorithm, str) else dict(algorithm)
    algorithm.pop("layerwise", None)
    config = config | {"algorithm": algorithm}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(model: Any) -> None:
        with torch.no_grad():
            for batch in batches:
                model(**transformers_inputs(batch), use_cache=False)

    with silence_output():
        model = mtq.quantize(model, config, run)
    show(model)
    by_name, sites = dict(model.named_modules()), points_of(decided)
    return read_qparams(
        {m: by_name[name] for m, name in names.items()},
        {d.module.name: d for d in decisions},
        sites,
        map_norm_readers(sites, [d.module for d in decisions]),
        chose_codes=algorithm["method"] == "gptq",
    )


@contextlib.contextmanager
def emulated_kernels() -> Iterator[None]:
    """Let ModelOpt round to FP4 on a CPU, where its Triton kernel does not run; all else, and the
    gradients, is ModelOpt's."""
    from types import SimpleNamespace

    from modelopt.torch.quantization import tensor_quant

    def cast(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return to_e2m1(x.float()).to(out_dtype or x.dtype)

    own = tensor_quant.triton_kernel
    tensor_quant.triton_kernel = SimpleNamespace(IS_AVAILABLE=True, static_blockwise_fp4_cast=cast)
    try:
        yield
    finally:
        tensor_quant.triton_kernel = own


def own_config(recipe: str) -> tuple[Path, dict[str, Any]]:
    """A recipe that comes with ModelOpt, and the configuration that ModelOpt reads from it.

    NVFP4 whose block scales follow the values is rounded by our emulation, as in `export_svdquant`.
    """
    import modelopt_recipes
    from modelopt.recipe.loader import load_config, load_recipe
    from modelopt.torch.quantization.config import QuantizeConfig

    if recipe.startswith("general"):
        read = load_recipe(recipe).quantize
    else:
        read = load_config(recipe, schema_type=QuantizeConfig)
    config: dict[str, Any] = read.model_dump(exclude_unset=True)
    for entry in config["quant_cfg"]:
        sizes = (entry.get("cfg") or {}).get("block_sizes") or {}
        if sizes.get("scale_bits") == (4, 3) and sizes.get("type") == "dynamic":
            entry["cfg"] |= {"backend": ROUNDING}
    return Path(modelopt_recipes.__path__[0]) / f"{recipe}.yaml", config


def export_svdquant(
    folder: Path, out: Path, tokens_BS: Tensor, *, rank: int
) -> tuple[Tensor, Path]:
    """SVDQuant by ModelOpt's preset of the transformers model of a folder, in float32: the logits
    of its fake-quantized model, and the folder it exports.

    NVFP4 is rounded by our emulation, since ModelOpt's own needs a GPU.
    """
    import transformers
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    mtq = import_modelopt()
    config = copy.deepcopy(mtq.NVFP4_SVDQUANT_DEFAULT_CFG)
    config["algorithm"] = {"method": "svdquant", "lowrank": rank}
    for entry in config["quant_cfg"]:
        if entry.get("cfg"):
            entry["cfg"] = {k: v for k, v in entry["cfg"].items() if k != "effective_bits"}
            entry["cfg"] |= {"backend": ROUNDING}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with silence_output(), torch.no_grad():
        model = mtq.quantize(model, config, lambda m: m(tokens_BS))
        requantize_resmooth_fused_llm_layers(model)
        want = model(tokens_BS).logits
        export_hf_checkpoint(model, export_dir=out)
    return want, out


def transformers_inputs(batch: Batch) -> dict[str, Any]:
    """A batch for transformers; tokens attend only within their document."""
    out: dict[str, Any] = {"input_ids": batch.tokens_BS}
    if batch.positions_BS is not None:
        out["position_ids"] = batch.positions_BS
    if batch.documents_BS is not None:
        width = batch.documents_BS.shape[1]
        allowed_BSS = batch.documents_BS[:, :, None] == batch.documents_BS[:, None, :]
        allowed_BSS &= torch.ones(width, width, dtype=torch.bool).tril()
        mask = torch.zeros(allowed_BSS.shape).masked_fill(
            ~allowed_BSS, torch.finfo(torch.float32).min
        )
        out["attention_mask"] = mask[:, None]
    return out
