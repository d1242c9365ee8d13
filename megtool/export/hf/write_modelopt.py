"""Write ModelOpt's unified folder, which vLLM, SGLang and TensorRT-LLM load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megtool.export.hf.tensor_specs import (
    ModuleTensors,
    edit_config,
    tensor,
    transforms_of,
)
from megtool.export.quantized_module import QuantizedModule, QuantizedModules
from megtool.formats.safetensors.quantization_config import QUANT_FILE, QUANT_KEYS
from megtool.number_formats.decode import COLUMNS, SCALE_2
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart
from megtool.quant.packed_tensors.hf_config import (
    QuantizedLayer,
    hf_quant_config,
    inline,
    quantization,
)
from megtool.quant.packed_tensors.modelopt_tensors import (
    COLUMNS_SCALE,
    GLOBAL_SCALE_DIVISORS,
    INPUT_SCALE,
    NAMES,
)
from megtool.quant.recipes.formats import PACKINGS
from megtool.tensors.sharded import GlobalTensor


class ModelOptForm:
    """ModelOpt's names and shapes, as `quant.writing` has them."""

    name = "unified"

    def check(self, folder: QuantizedModules) -> None:
        """It says all of our formats."""

    def notes(self, folder: QuantizedModules) -> Sequence[str]:
        if not folder.kv_cache_biases:
            return ()
        return (
            f"{len(folder.kv_cache_biases)} biases of keys and values (affine): no engine has them",
        )

    def plan_module(self, module: QuantizedModule) -> ModuleTensors:
        packing = PACKINGS[module.algo].format(group=module.group_size)
        parts: list[tuple[PackedPart, GlobalTensor]] = []
        for part in layout(packing, module.shape):
            parts.append(
                (part, tensor(f"{module.name}.{NAMES[part.role]}", part.shape, part.dtype))
            )
        if module.algo in GLOBAL_SCALE_DIVISORS and all(p.role != SCALE_2 for p, _ in parts):
            second = PackedPart(role=SCALE_2, dtype="float32", shape=(), spans=())
            parts.append((second, tensor(f"{module.name}.{NAMES[SCALE_2]}", (), "float32")))
        if (columns := module.part(COLUMNS)) is not None:
            part, _ = columns
            parts.append((part, tensor(f"{module.name}.{COLUMNS_SCALE}", part.shape, part.dtype)))
        inputs = None
        if module.input_scale:
            inputs = tensor(f"{module.name}.{INPUT_SCALE}", (), "float32")
        return ModuleTensors(module=module, packing=packing, parts=tuple(parts), input_scale=inputs)

    def plan_kv_cache(self, folder: QuantizedModules) -> Sequence[tuple[GlobalTensor, str]]:
        out = []
        for attention, names in folder.kv_cache_scales.items():
            for kind, name in zip("kv", names, strict=True):
                scale = tensor(f"{attention}.{kind}_proj.{kind}_scale", (), "float32")
                out.append((scale, name))
        return out

    def edit_files(self, folder: QuantizedModules, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """hf_quant_config.json and config.json say the same."""
        layers = [
            QuantizedLayer(
                name=m.name,
                algo=m.algo,
                group_size=m.group_size,
                smoothed=m.is_smoothed,
                rank=m.rank,
            )
            for m in folder.modules
        ]
        section = quantization(layers, folder.unquantized, folder.kv_algo)
        out = {n: d for n, d in files.items() if n != QUANT_FILE}
        if "config.json" in out:
            config = {"quantization_config": inline(section) | transforms_of(folder)}
            out["config.json"] = edit_config(
                out["config.json"], remove=QUANT_KEYS, add=config, untie=folder.has_untied_head
            )
        return out | {QUANT_FILE: hf_quant_config(section)}
