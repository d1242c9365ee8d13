"""Words of the mapping language that GGUF's tables have beside those of converters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megtool.convert.language.canonical import CanonicalModel
from megtool.convert.language.expression import Expression
from megtool.convert.language.mapping import Word, WordLike, word
from megtool.convert.language.tensor_layout import TensorLayout, permute, transpose
from megtool.errors import MappingError


@dataclass(frozen=True, slots=True)
class Squeezed(Word):
    """A tensor without its dimension `dim`, of size 1: `[channels, 1, kernel]` of a convolution."""

    of: WordLike
    dim: int = 1

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The other dimensions; parts step along them alone."""
        inner, gone = word(self.of).layout(model), self.dim
        parts = (
            replace(
                p,
                dims=tuple(d - (d > gone) if d != gone else 0 for d in p.dims),
                base=(*p.base[:gone], *p.base[gone + 1 :]),
            )
            for p in inner.parts
        )
        shape = (*inner.shape[:gone], *inner.shape[gone + 1 :])
        return TensorLayout(shape, tuple(parts))


@dataclass(frozen=True, slots=True)
class InRows(Word):
    """A vector as a matrix of `rows` rows, one after the other."""

    of: str
    rows: Expression

    def names(self) -> tuple[str, ...]:
        """The pattern of the vector."""
        return (self.of,)

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """Element i of the vector at `[i // width, i % width]`."""
        rows, (size,) = model.value(self.rows), model.shape(self.of)
        inner = word(self.of).layout(model)
        (part,) = inner.parts
        cut = replace(part, shape=(rows, size // rows), dims=(0, 1), mults=(1, 1), base=(0, 0))
        return TensorLayout((rows, size // rows), (cut,))


@dataclass(frozen=True, slots=True)
class Paired(Word):
    """Rows of `heads` heads whose two halves alternate, for llama.cpp turns pairs of neighbours.

    Where a part of a head turns, the rest, which queries and keys are multiplied in alike, is cut
    into pieces of the same size, and their halves alternate too.
    """

    of: WordLike
    heads: Expression

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The same rows in another order.

        Raises:
            MappingError: what turns is no whole part of a head.
        """
        size = model.config.attention.head_dim
        turning = int(size * model.config.positions.rotary_percent)
        if not turning or size % turning:
            raise MappingError(
                f"{turning} of {size} elements of a head turn, which llama.cpp cannot have in "
                "pairs of neighbours",
                hint="--to hf writes the model as it is",
                error_id="unsupported-by-engine",
            )
        grid = (model.value(self.heads), size // turning, 2, turning // 2)
        return permute(word(self.of).layout(model), 0, grid, (0, 1, 3, 2))


@dataclass(frozen=True, slots=True)
class Tiled(Word):
    """Value heads that lie group after group along `dim`, one of every group after the other.

    A gated delta net has several value heads for each key head, and llama.cpp repeats all key heads
    in turn, not each one several times.
    """

    of: WordLike
    dim: int = 0

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The same heads in another order."""
        inner = word(self.of).layout(model)
        c = model.config
        groups = c.delta.linear_num_key_heads
        shared = c.delta.linear_num_value_heads // groups
        size = inner.shape[self.dim] // c.delta.linear_num_value_heads
        return permute(inner, self.dim, (groups, shared, size), (1, 0, 2))


@dataclass(frozen=True, slots=True)
class HeadsOf(Word):
    """Rows of heads as one matrix for each head; `is_transposed` exchanges rows and columns."""

    of: str
    is_transposed: bool = False

    def names(self) -> tuple[str, ...]:
        """The pattern of the matrix."""
        return (self.of,)

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """Row r of head h at `[h, r]`, or its element c at `[h, c, r]`."""
        heads, (rows, columns) = model.config.attention.num_heads, model.shape(self.of)
        view = (heads, rows // heads, columns)
        (part,) = word(self.of).layout(model).parts
        cut = replace(part, shape=view, dims=(0, 1, 2), mults=(1, 1, 1), base=(0, 0, 0))
        out = TensorLayout(view, (cut,))
        return transpose(out, (0, 2, 1)) if self.is_transposed else out
