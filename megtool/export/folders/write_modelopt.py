"""Write ModelOpt: the unified folder that vLLM, SGLang and TensorRT-LLM load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megtool.checkpoint.formats.quantized import QUANT_FILE, QUANT_KEYS
from megtool.export.folders.config_edit import edited
from megtool.export.folders.tensor_specs import Written, tensor
from megtool.export.quantized_module import Coded, CodedFolder
from megtool.number_formats.decode import COLUMNS, SCALE_2
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart
from megtool.quant.packed_tensors.hf_config import Layer, hf_quant_config, inline, quantization
from megtool.quant.packed_tensors.modelopt_tensors import COLUMNS_SCALE, INPUT_SCALE, NAMES, SECONDS
from megtool.quant.qparams import PACKINGS
from megtool.tensors.sharded import GlobalTensor


class ModelOptForm:
    """ModelOpt's names and shapes, as `quant.writing` has them."""

    name = "unified"

    def check(self, folder: CodedFolder) -> None:
        """It says all of our formats."""

    def notes(self, folder: CodedFolder) -> Sequence[str]:
        """See `Form`."""
        if not folder.cache_biases:
            return ()
        return (
            f"{len(folder.cache_biases)} biases of keys and values (affine): no engine has them",
        )

    def written(self, coded: Coded) -> Written:
        """See `Form`."""
        packing = PACKINGS[coded.algo].format(group=coded.group_size)
        held: list[tuple[PackedPart, GlobalTensor]] = []
        for part in layout(packing, coded.shape):
            held.append((part, tensor(f"{coded.name}.{NAMES[part.role]}", part.shape, part.dtype)))
        if coded.algo in SECONDS and all(p.role != SCALE_2 for p, _ in held):
            second = PackedPart(role=SCALE_2, dtype="float32", shape=(), spans=())
            held.append((second, tensor(f"{coded.name}.{NAMES[SCALE_2]}", (), "float32")))
        if (columns := coded.part(COLUMNS)) is not None:
            part, _ = columns
            held.append((part, tensor(f"{coded.name}.{COLUMNS_SCALE}", part.shape, part.dtype)))
        inputs = None
        if coded.input_scale:
            inputs = tensor(f"{coded.name}.{INPUT_SCALE}", (), "float32")
        return Written(coded=coded, packing=packing, held=tuple(held), inputs=inputs)

    def caches(self, folder: CodedFolder) -> Sequence[tuple[GlobalTensor, str]]:
        """See `Form`."""
        out = []
        for attention, names in folder.caches.items():
            for kind, name in zip("kv", names, strict=True):
                made = tensor(f"{attention}.{kind}_proj.{kind}_scale", (), "float32")
                out.append((made, name))
        return out

    def small(self, folder: CodedFolder, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """hf_quant_config.json and config.json say the same."""
        layers = [
            Layer(name=m.name, algo=m.algo, group_size=m.group_size, smoothed=m.is_smoothed)
            for m in folder.modules
        ]
        said = quantization(layers, folder.kept, folder.kv_algo)
        out = {n: d for n, d in files.items() if n != QUANT_FILE}
        if "config.json" in out:
            config = {"quantization_config": inline(said)}
            out["config.json"] = edited(
                out["config.json"], remove=QUANT_KEYS, add=config, untie=folder.has_untied_head
            )
        return out | {QUANT_FILE: hf_quant_config(said)}
