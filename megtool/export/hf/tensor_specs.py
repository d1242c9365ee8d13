"""The tensors that a quantized module becomes in another form, and the interface of a form."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype as named_dtype
from megtool.export.quantized_module import QuantizedModule, QuantizedModules
from megtool.formats.safetensors.quantization_config import quantization_config
from megtool.number_formats.packed_parts import PackedPart
from megtool.quant.packed_tensors.modelopt_tensors import stored_type
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTensors:
    """One module: `held` are the parts of its weight in `packing`, codes first, filled from the
    source's by `repack.repacked`; `inputs` is the scale of its inputs, as its reciprocal where
    `divides`; `values` are tensors whose values are known (a shape)."""

    module: QuantizedModule
    packing: str
    parts: tuple[tuple[PackedPart, GlobalTensor], ...]
    input_scale: GlobalTensor | None = None
    divides: bool = False
    values: tuple[tuple[GlobalTensor, NDArray[Any]], ...] = ()

    @property
    def tensors(self) -> tuple[GlobalTensor, ...]:
        """All of them, codes first."""
        more = () if self.input_scale is None else (self.input_scale,)
        return (*(t for _, t in self.parts), *more, *(t for t, _ in self.values))


class FolderForm(Protocol):
    """A form of quantized Hugging Face folders, as it is written."""

    @property
    def name(self) -> str:
        """What `--to` calls it."""

    def check(self, folder: QuantizedModules) -> None:
        """Refuse what it cannot say, with all modules it is about.

        Raises:
            MappingError: formats, factors of columns or caches it has no place for.
        """

    def notes(self, folder: QuantizedModules) -> Sequence[str]:
        """What engines or libraries make otherwise of it in this form, for people."""

    def plan_module(self, module: QuantizedModule) -> ModuleTensors:
        """The tensors of a module.

        Raises:
            UsageError: groups do not divide it.
        """

    def plan_kv_cache(self, folder: QuantizedModules) -> Sequence[tuple[GlobalTensor, str]]:
        """Scales of the KV cache, with the source's tensor that each is the value of."""

    def edit_files(self, folder: QuantizedModules, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """The small files of the folder, of those of the source."""


def transforms_of(folder: QuantizedModules) -> dict[str, Any]:
    """What a folder says of rotations in its weights, to be said in any form."""
    config = quantization_config(folder.catalogue.metadata) or {}
    transforms = config.get("transform_config")
    return {"transform_config": transforms} if transforms else {}


def tensor(name: str, shape: tuple[int, ...], kind: str) -> GlobalTensor:
    """A tensor of the folder for a part of type `kind`."""
    return GlobalTensor(name=name, shape=shape, dtype=named_dtype(stored_type(kind)))


def weight_shape(module: QuantizedModule) -> NDArray[np.int64]:
    """A weight's `[out, in]` as numbers."""
    return np.array(module.shape, np.int64)


def edit_config(
    config: bytes, *, remove: Collection[str] = (), add: Mapping[str, Any], untie: bool = False
) -> bytes:
    """A config.json without some keys, there or in its `text_config`, and with others; where it is
    to `untie`, it no longer says that the output layer is the embedding."""
    value = json.loads(config)
    text = value.get("text_config")
    for place in (value, text if isinstance(text, dict) else {}):
        for key in remove:
            place.pop(key, None)
        if untie and place.get("tie_word_embeddings"):
            place["tie_word_embeddings"] = False
    return (json.dumps(value | dict(add), indent=2, ensure_ascii=False) + "\n").encode()
