"""Write folders of the method `fp8`, as DeepSeek, GLM and Qwen publish their FP8 checkpoints.

A weight has one float32 scale for each block of 128 x 128 elements, `weight_scale_inv` (which is
multiplied, whatever its name says); the last blocks of rows and columns may be smaller. Inputs are
rounded as they come. DeepSeek-V4 calls the scale `scale`, and says in `expert_dtype` that experts
are in FP8 too, as its base models do. Sources: DeepSeek-V3's `inference/kernel.py` and config.json,
vLLM's and SGLang's `fp8.py`, transformers' `FineGrainedFP8Config`; vLLM's
`models/deepseek_v4/quant_config.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.errors import MappingError, listed
from megtool.export.hf.tensor_specs import (
    ModuleTensors,
    edit_config,
    tensor,
    transforms_of,
)
from megtool.export.quantized_module import QuantizedModule, QuantizedModules
from megtool.formats.safetensors.quantization_config import (
    QUANT_FILE,
    QUANT_KEYS,
    quantization_config,
)
from megtool.lint.engines import load_engines
from megtool.number_formats.decode import CODES, SCALE
from megtool.number_formats.layout import layout
from megtool.tensors.sharded import GlobalTensor

_ALGO, _PACKING = "FP8_PB_WO", "fp8:128x128"
_BLOCK = [128, 128]
_SCALE_NAME, _V4_SCALE_NAME = "weight_scale_inv", "scale"


@dataclass(frozen=True, slots=True)
class Fp8BlocksForm:
    """DeepSeek's names and shapes, as a model of this type (`model_type`) has them."""

    model_type: str = ""
    name: str = "fp8-blocks"

    @classmethod
    def of(cls, folder: QuantizedModules) -> Fp8BlocksForm:
        """The form of a folder's model."""
        config = folder.catalogue.metadata.get("config")
        return cls(str(config.get("model_type", "")) if isinstance(config, dict) else "")

    @property
    def is_deepseek_v4(self) -> bool:
        """Whether names are those of DeepSeek-V4."""
        return self.model_type == "deepseek_v4"

    def check(self, folder: QuantizedModules) -> None:
        others: dict[str, list[str]] = defaultdict(list)
        for m in folder.modules:
            if m.algo != _ALGO or m.is_smoothed:
                others[m.algo].append(m.name)
        for algo, names in others.items():
            raise MappingError(
                f"the form has FP8 in blocks of 128 x 128 alone, and {listed(names)} are {algo}",
                file=folder.catalogue.root,
                tensor=names[0],
                hint="quantize with fp8_block128, or export with --to compressed-tensors",
                error_id="unsupported-by-engine",
            )
        if not folder.modules or folder.kv_algo is not None:
            what = "scales of a KV cache" if folder.kv_algo else "a folder without FP8 weights"
            raise MappingError(
                f"the form has no place for {what}",
                file=folder.catalogue.root,
                hint="quantize with fp8_block128, or export with --to unified",
                error_id="unsupported-by-engine",
            )

    def notes(self, folder: QuantizedModules) -> Sequence[str]:
        return ()

    def plan_module(self, module: QuantizedModule) -> ModuleTensors:
        names = {CODES: "weight", SCALE: _V4_SCALE_NAME if self.is_deepseek_v4 else _SCALE_NAME}
        parts = tuple(
            (part, tensor(f"{module.name}.{names[part.role]}", part.shape, part.dtype))
            for part in layout(_PACKING, module.shape, "compressed-tensors")
        )
        return ModuleTensors(module=module, packing=_PACKING, parts=parts)

    def plan_kv_cache(self, folder: QuantizedModules) -> Sequence[tuple[GlobalTensor, str]]:
        """There are none."""
        return ()

    def edit_files(self, folder: QuantizedModules, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """config.json alone says it: as it did before, where the folder had this form."""
        out = {n: d for n, d in files.items() if n != QUANT_FILE}
        more = {"expert_dtype": "fp8"} if self.is_deepseek_v4 else {}
        if "config.json" in out:
            out["config.json"] = edit_config(
                out["config.json"],
                remove=QUANT_KEYS,
                add={"quantization_config": _section(folder), **more},
                untie=folder.has_untied_head,
            )
        return out


def _section(folder: QuantizedModules) -> dict[str, Any]:
    """The `quantization_config`.

    Modules that no engine quantizes are not listed, as in the folders that are published: engines
    look for names in names, where `mlp.gate` is a part of `mlp.gate_proj`.
    """
    stored = quantization_config(folder.catalogue.metadata) or {}
    if folder.form == "fp8" and stored.get("weight_block_size") == _BLOCK:
        return stored
    names = load_engines().modules
    plain = [n for n in folder.unquantized if not names.is_never_quantized(n)]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": _BLOCK,
        **({"modules_to_not_convert": plain} if plain else {}),
        **transforms_of(folder),
    }
