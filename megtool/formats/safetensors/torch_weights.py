"""The files of a folder in which transformers saved weights before it wrote safetensors.

`pytorch_model.bin`, or shards with an index; a variant has its name before the suffix
(`pytorch_model.fp16.bin`). accelerate's full state dict of FSDP is `pytorch_model_fsdp.bin`, and
AutoGPTQ's weights are `gptq_model-4bit-128g.bin`. Of several, `pytorch_model.bin` is taken, as
`from_pretrained` does. Source: transformers 4.57, `utils/hub.py` and `modeling_utils.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megtool.errors import FormatError, listed
from megtool.formats.header_reader import NUMBERED, check_numbered, list_names

TORCH_INDEX = ".bin.index.json"
_SINGLE = "pytorch_model.bin"
_WEIGHTS = re.compile(
    r"pytorch_model(?:_fsdp)?(?:\.[\w-]+?)?(?:-\d{5}-of-\d{5})?\.bin|gptq_model-[\w.-]+\.bin"
)
_INDEX = re.compile(r"pytorch_model(?:\.bin\.index(?:\.[\w-]+)?|(?:\.[\w-]+)?\.bin\.index)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchWeights:
    """The files to read: those of `index`, or `names`; `all_names` are all that hold weights."""

    names: list[str]
    all_names: list[str]
    index: Path | None


def is_torch_weights(name: str) -> bool:
    """Return whether a file of this name has weights of a model, or is the index of such files."""
    return _WEIGHTS.fullmatch(name) is not None or _INDEX.fullmatch(name) is not None


def find_torch_weights(folder: Path, index: Path | None = None) -> TorchWeights | None:
    """Return the files to read, of `index` if it is given; None if there are none.

    Raises:
        FormatError: there are several, none of which comes first, or shards are missing.
    """
    names = list_names(folder, ".bin", ".json")
    weights = [n for n in names if _WEIGHTS.fullmatch(n)]
    if index is not None:
        return TorchWeights(names=[], all_names=weights, index=index)
    if _SINGLE in weights:
        return TorchWeights(names=[_SINGLE], all_names=weights, index=None)
    indexes = [n for n in names if _INDEX.fullmatch(n)]
    if f"{_SINGLE}.index.json" in indexes:
        indexes = [f"{_SINGLE}.index.json"]
    if len(indexes) == 1:
        return TorchWeights(names=[], all_names=weights, index=folder / indexes[0])
    if indexes:
        raise FormatError(
            f"there are {len(indexes)} indexes: {listed(indexes)}",
            file=folder,
            hint=f"name the one to open, for example {folder / indexes[0]}",
        )
    if not weights:
        return None
    sets: dict[str, list[str]] = {}
    for name in weights:
        match = NUMBERED.fullmatch(name)
        sets.setdefault(f"{match[1]} of {match[3]}" if match else name, []).append(name)
    if len(sets) > 1:
        raise FormatError(
            f"there are weights in {len(sets)} variants: {listed(weights)}",
            file=folder,
            hint=f"name the file to open, for example {folder / weights[0]}",
        )
    if match := NUMBERED.fullmatch(weights[0]):
        check_numbered(folder, weights, match, index=f"{_SINGLE}.index.json")
    return TorchWeights(names=weights, all_names=weights, index=None)
