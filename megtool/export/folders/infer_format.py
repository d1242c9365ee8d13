"""Structure: what the stored tensors of a quantized module show of its format by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.formats.header_reader import read_exact
from megtool.checkpoint.formats.quantized_parts import Folded, Stored
from megtool.errors import FormatError
from megtool.number_formats.decode import DIVISOR, SCALE, SCALE_2
from megtool.number_formats.packed_parts import WHOLE, PackedPart
from megtool.quant.qparams import PACKINGS
from megtool.quant.recipes.formats import FORMATS
from megtool.quant.recipes.modules import BLOCKS
from megtool.tensors.sharded import GlobalTensor

DECODE = "export it with --to hf, which decodes it"
"""The way out where a format cannot be kept."""

_POWERS = "float8_e8m0fnu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A quantized weight `[out, in]` of a folder, and what lies beside it."""

    folded: Folded
    stored: Stored

    @classmethod
    def of(cls, folded: Folded, stored: Stored) -> Found:
        """The weight.

        Raises:
            FormatError: it is no matrix of a module, or stacked with others.
        """
        found = cls(folded=folded, stored=stored)
        if folded.codes.endswith(BLOCKS):
            raise found.fault(
                "holds all experts of a layer as MXFP4 blocks, which no other form has",
                hint="engines load the folder as it is (megtool lint); or " + DECODE,
            )
        if len(folded.shape) != 2 or not folded.name.endswith(".weight"):
            raise found.fault(
                f"is quantized as one tensor of shape {list(folded.shape)}, stacked with others or "
                "not called a weight, and other forms have one tensor a module",
                hint=DECODE,
            )
        return found

    @property
    def module(self) -> str:
        """The stored name of the module."""
        return self.folded.name.removesuffix(".weight")

    @property
    def shape(self) -> tuple[int, int]:
        """`[out, in]`."""
        rows, columns = self.folded.shape
        return rows, columns

    @property
    def numbers(self) -> str:
        """The first word of its packing, whatever the size of the weight."""
        name = self.folded.packing.partition(":")[0]
        return "mxfp8" if name == "fp8" and self.scale.dtype == _POWERS else name

    @property
    def scale(self) -> PackedPart:
        """The scale beside the codes."""
        return next(p for p, _ in self.folded.parts if p.role == SCALE)

    @property
    def reach(self) -> tuple[int, int]:
        """Rows and columns under one scale."""
        per = {s.dim: s.per for s in self.scale.spans if s.dim != WHOLE}
        rows, columns = self.shape
        return per.get(0, rows), per.get(1, columns)

    @property
    def has_second(self) -> bool:
        """A second scale multiplies (or divides) the first one."""
        return any(p.role in (SCALE_2, DIVISOR) for p, _ in self.folded.parts)

    def beside(self, *lasts: str) -> GlobalTensor | None:
        """The tensor of the module with one of these last names, counted as used."""
        for name in (f"{self.module}.{last}" for last in lasts):
            if name in self.stored.catalogue:
                self.stored.used.add(name)
                return self.stored.catalogue[name]
        return None

    def single(self, *lasts: str) -> str:
        """The name of a tensor of one element, "" where there is none.

        Raises:
            FormatError: it has several elements.
        """
        found = self.beside(*lasts)
        if found is None:
            return ""
        if found.numel != 1:
            raise self.stored.fault(
                found, f"of shape {list(found.shape)} is more than one scale", hint=DECODE
            )
        return found.name

    def suits(self, algo: str, group: int) -> bool:
        """Whether it can be of a format: its numbers, and what has a scale."""
        name, _, how = PACKINGS[algo].format(group=group).partition(":")
        same = {"int4": "int4rows", "int8words": "int8"}
        if same.get(self.numbers, self.numbers) != name:
            return False
        rows, columns = self.shape
        size = {"tensor": (rows, columns), "channel": (1, columns)}.get(how)
        if size is None:
            sizes = [int(n) for n in how.split("x")]
            size = min(sizes[0] if len(sizes) == 2 else 1, rows), min(sizes[-1], columns)
        return self.reach == size

    def fault(self, message: str, hint: str | None = None) -> FormatError:
        """An error about its codes."""
        catalogue = self.stored.catalogue
        row = catalogue.index[self.folded.codes]
        file = catalogue.path(int(catalogue.extents.file[row]))
        return FormatError(message, file=file, tensor=self.folded.codes, hint=hint)


def is_zero(catalogue: Catalogue, tensor: GlobalTensor) -> bool:
    """All bytes of a small stored tensor are zero."""
    row = catalogue.index[tensor.name]
    path = catalogue.path(int(catalogue.extents.file[row]))
    return not any(read_exact(path, int(catalogue.extents.offset[row]), tensor.num_bytes))


def packing_for(found: Found, algo: str, group: int) -> str:
    """The packing of a weight known to be of a format, as `packing.layout` writes it: by the format
    where one scale serves the whole weight because that is so small."""
    how = PACKINGS[algo].format(group=group).partition(":")[2]
    return f"{found.numbers}:{how}"


def group_for(found: Found, algo: str) -> int:
    """The group size of a format that has one, by what is stored; 0 for the others."""
    if algo == "FP8_PB_WO":
        return 128
    return found.reach[1] if FORMATS[algo].groups else 0
