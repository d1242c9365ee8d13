"""Read small stored tensors, mostly single scales, while a plan is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.errors import FormatError
from megtool.export.quantized_module import QuantizedModule
from megtool.number_formats.decode import DIVISOR, SCALE, SCALE_2
from megtool.number_formats.small_floats import single
from megtool.transport.constant_feed import round_to_dtype
from megtool.transport.reading.stored_numbers import StoredNumbers

Floats = NDArray[np.float32]


class SmallTensorReader(StoredNumbers):
    """Reads the scales of quantized modules as numbers. Use in `with`."""

    def read_tiles(self, name: str) -> Iterator[Floats]:
        """The elements of any stored tensor as numbers, some at a time; bytes of uint8 are powers
        of two (E8M0), as scales have them."""
        kind = self._reader.catalogue[name].dtype.name
        with closing(self._reader.open_stored(name).tiles()) as tiles:
            for _, tile in tiles:
                yield single(tile, "float8_e8m0fnu" if kind == "uint8" else kind)

    def read_single(self, module: QuantizedModule, role: str) -> Floats | None:
        """The one number of a part (`scale`, `scale_2`), None where it has none or several.

        A stored divisor is given as the `scale_2` it stands for, and the other way round.
        """
        for candidate in dict.fromkeys([role, *_SWAPPED.get(role, ())]):
            part = module.part(candidate)
            if part is not None and np.prod(part[0].shape) == 1:
                value = self.read(part[1]).reshape(())
                return value if candidate == role else reciprocal(value)
        return None

    def read_number(self, name: str) -> Floats:
        """The one number of a stored tensor, whether it has no dimensions or those of size 1.

        Raises:
            FormatError: it has several, or none.
        """
        values = self.read(name)
        if values.size != 1:
            raise FormatError(
                f"it has {values.size} numbers, where one scale is expected",
                file=self._reader.catalogue.root,
                tensor=name,
                hint="the folder is of another method, or damaged: export it again",
            )
        return values.reshape(())

    def read_input_scale(self, module: QuantizedModule) -> Floats | None:
        """What the inputs of a module are divided by, None where they have no stored scale."""
        if not module.input_scale:
            return None
        value = self.read_number(module.input_scale)
        return reciprocal(value) if module.input_divides else value

    def __enter__(self) -> SmallTensorReader:
        return self


_SWAPPED = {SCALE: (), SCALE_2: (DIVISOR,), DIVISOR: (SCALE_2,)}


def reciprocal(values: Floats) -> Floats:
    """1 / values, rounded to float32: what one form divides by where another multiplies.

    Two reciprocals may differ from the first number in its last bit, three equal one.
    """
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(np.float32(1) / np.asarray(values, np.float32), np.float32)


def fits(values: Floats, dtype: DType) -> bool:
    """Whether a type holds all numbers exactly."""
    return bool(
        np.array_equal(single(round_to_dtype(values, dtype), dtype.name), values, equal_nan=True)
    )
