"""Infer the format of a quantized module from its stored tensors alone."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.errors import FormatError
from megtool.formats.header_reader import read_exact
from megtool.formats.safetensors.quantized_parts import PackedWeight, PartFinder
from megtool.number_formats.decode import DIVISOR, SCALE, SCALE_2
from megtool.number_formats.packed_parts import WHOLE, PackedPart
from megtool.quant.recipes.formats import FORMATS, PACKINGS
from megtool.quant.recipes.modules import BLOCKS
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor

DECODE_HINT = "export it with --to hf, which decodes it"
"""The hint if a format cannot be kept."""

_POWERS = "float8_e8m0fnu"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A quantized weight `[out, in]` of a folder, with the other tensors of its module."""

    packed: PackedWeight
    finder: PartFinder

    @classmethod
    def of(cls, packed: PackedWeight, finder: PartFinder) -> QuantizedWeight:
        """The weight.

        Raises:
            FormatError: it is no matrix of a module, or stacked with others.
        """
        weight = cls(packed=packed, finder=finder)
        if packed.codes.endswith(BLOCKS):
            raise weight.error(
                "holds all experts of a layer as MXFP4 blocks, which no other form has",
                hint="engines load the folder as it is (megtool lint); or " + DECODE_HINT,
            )
        if len(packed.shape) != 2 or not packed.name.endswith(".weight"):
            raise weight.error(
                f"is quantized as one tensor of shape {list(packed.shape)}, stacked with others or "
                "not called a weight, and other forms have one tensor a module",
                hint=DECODE_HINT,
            )
        return weight

    @property
    def module(self) -> str:
        """The stored name of the module."""
        return self.packed.name.removesuffix(".weight")

    @property
    def shape(self) -> tuple[int, int]:
        """`[out, in]`."""
        rows, columns = self.packed.shape
        return rows, columns

    @property
    def numbers(self) -> str:
        """The first word of its packing, whatever the size of the weight."""
        name = self.packed.packing.partition(":")[0]
        return "mxfp8" if name == "fp8" and self.scale.dtype == _POWERS else name

    @property
    def scale(self) -> PackedPart:
        """The scale beside the codes."""
        return next(p for p, _ in self.packed.parts if p.role == SCALE)

    @property
    def scale_block(self) -> tuple[int, int]:
        """Rows and columns under one scale."""
        per = {s.dim: s.per for s in self.scale.spans if s.dim != WHOLE}
        rows, columns = self.shape
        return per.get(0, rows), per.get(1, columns)

    @property
    def has_second(self) -> bool:
        """A second scale multiplies (or divides) the first one."""
        return any(p.role in (SCALE_2, DIVISOR) for p, _ in self.packed.parts)

    def find_tensor(self, *lasts: str) -> GlobalTensor | None:
        """The tensor of the module with one of these last names, counted as used."""
        for name in (f"{self.module}.{last}" for last in lasts):
            if name in self.finder.catalogue:
                self.finder.used.add(name)
                return self.finder.catalogue[name]
        return None

    def find_single(self, *lasts: str) -> str:
        """The name of a tensor of one element, "" where there is none.

        Raises:
            FormatError: it has several elements.
        """
        tensor = self.find_tensor(*lasts)
        if tensor is None:
            return ""
        if tensor.numel != 1:
            raise self.finder.error(
                tensor, f"of shape {list(tensor.shape)} is more than one scale", hint=DECODE_HINT
            )
        return tensor.name

    def fits(self, algo: str, group: int) -> bool:
        """Whether it can be of a format: its numbers, and what has a scale."""
        name, _, scaling = PACKINGS[algo].format(group=group).partition(":")
        stored_as = {"int4": "int4rows", "int8words": "int8"}
        if stored_as.get(self.numbers, self.numbers) != name:
            return False
        rows, columns = self.shape
        size = {"tensor": (rows, columns), "channel": (1, columns)}.get(scaling)
        if size is None:
            sizes = [int(n) for n in scaling.split("x")]
            size = min(sizes[0] if len(sizes) == 2 else 1, rows), min(sizes[-1], columns)
        return self.scale_block == size

    def error(self, message: str, hint: str | None = None) -> FormatError:
        """An error about its codes."""
        catalogue = self.finder.catalogue
        row = catalogue.index[self.packed.codes]
        file = catalogue.path(int(catalogue.extents.file[row]))
        return FormatError(message, file=file, tensor=self.packed.codes, hint=hint)


def is_zero(catalogue: Catalogue, tensor: GlobalTensor) -> bool:
    """All bytes of a small stored tensor are zero."""
    row = catalogue.index[tensor.name]
    path = catalogue.path(int(catalogue.extents.file[row]))
    return not any(read_exact(path, int(catalogue.extents.offset[row]), tensor.num_bytes))


def infer_packing(weight: QuantizedWeight, algo: str, group: int) -> str:
    """The packing of a weight known to be of a format, as `packing.layout` writes it: by the format
    where one scale serves the whole weight because that is so small."""
    scaling = PACKINGS[algo].format(group=group).partition(":")[2]
    return f"{weight.numbers}:{scaling}"


def infer_group_size(weight: QuantizedWeight, algo: str) -> int:
    """The group size of a format that has one, by what is stored; 0 for the others."""
    if algo == "FP8_PB_WO":
        return 128
    return weight.scale_block[1] if FORMATS[algo].groups else 0
