"""Which pipeline stage and virtual chunk has a layer, for every way Megatron splits them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig, pipeline_chunks

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How layers go to `pp` stages of `vpp` virtual chunks, by Megatron-Core's rules.

    A chunk holds consecutive layers, and chunks follow each other round robin: chunk 0 of every
    stage, then chunk 1 of every stage. How many layers a chunk holds is what the five other
    fields say (see `ParallelConfig`). Sources: `get_num_layers_to_build` in
    `transformer/transformer_block.py`, `get_transformer_layer_offset` in
    `transformer/transformer_layer.py`, `transformer/pipeline_parallel_layer_layout.py` and the
    checks of `TransformerConfig`, all of megatron-core 0.16; tests compare the two.

    Raises:
        LayoutError: `layout` breaks a rule of its own: where E, m and L may stand.
    """

    pp: int = 1
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    embedding_counts: bool = False
    loss_counts: bool = False
    layout: str | None = None

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Pipeline:
        """The pipeline of a layout."""
        return cls(
            pp=parallel.pp,
            vpp=parallel.vpp,
            first=parallel.first_stage_layers,
            last=parallel.last_stage_layers,
            embedding_counts=parallel.account_for_embedding,
            loss_counts=parallel.account_for_loss,
            layout=parallel.pipeline_layout,
        )

    def __post_init__(self) -> None:
        if self.layout is not None:
            _check_order(self.layout, pipeline_chunks(self.layout), self.pp)

    def sizes(self, num_layers: int) -> Ints:
        """Layers in every chunk, int64 `[vpp, pp]`.

        Raises:
            LayoutError: the split does not fit the number of layers; the hint holds ones that do.
        """
        if self.layout is not None:
            counts = [chunk.count("t") for chunk in pipeline_chunks(self.layout)]
            if sum(counts) != num_layers:
                raise LayoutError(
                    f"pipeline_layout has {sum(counts)} layers (t), and the model {num_layers}",
                    hint=f"for example {_example(num_layers, self)}",
                )
            return np.array(counts, np.int64).reshape(self.vpp, self.pp)
        if self.first is not None or self.last is not None:
            stages = self._uneven(num_layers)
        else:
            stages = self._even(num_layers)
        out = np.broadcast_to(stages // self.vpp, (self.vpp, self.pp)).copy()
        out[0, 0] -= self.embedding_counts
        out[-1, -1] -= self.loss_counts
        return out

    def stage_of_layer(self, num_layers: int) -> Ints:
        """The pipeline stage of every layer, int64 `[num_layers]`. Raises: see `sizes`."""
        return np.repeat(np.arange(self.vpp * self.pp) % self.pp, self.sizes(num_layers).ravel())

    def chunk_of_layer(self, num_layers: int) -> Ints:
        """The virtual chunk of every layer in its stage, int64 `[num_layers]`."""
        return np.repeat(np.arange(self.vpp * self.pp) // self.pp, self.sizes(num_layers).ravel())

    def layers_of(self, num_layers: int, stage: int, chunk: int = 0) -> range:
        """The layers of one chunk of one stage, possibly none. Raises: see `sizes`."""
        ends = np.cumsum(self.sizes(num_layers).ravel())
        position = chunk * self.pp + stage
        return range(int(ends[position - 1]) if position else 0, int(ends[position]))

    @property
    def embedding(self) -> tuple[int, int]:
        """Stage and chunk of the embedding: Megatron builds it first in every layout."""
        return 0, 0

    @property
    def loss(self) -> tuple[int, int]:
        """Stage and chunk of the output layer: Megatron builds it last in every layout."""
        return self.pp - 1, self.vpp - 1

    @property
    def mtp(self) -> tuple[int, int]:
        """Stage and chunk of multi-token prediction: where a layout has `m`, else the last."""
        chunks = pipeline_chunks(self.layout or "")
        position = next((i for i, c in enumerate(chunks) if "m" in c), self.pp * self.vpp - 1)
        return position % self.pp, position // self.pp

    @property
    def num_mtp(self) -> int:
        """Layers of multi-token prediction that an explicit layout names."""
        return sum(chunk.count("m") for chunk in pipeline_chunks(self.layout or ""))

    def norm(self, num_layers: int, *, has_mtp: bool = False) -> tuple[int, int]:
        """Stage and chunk of the final norm: the last, or the last layer's in a model with MTP."""
        if not has_mtp or not num_layers:
            return self.loss
        position = int(np.flatnonzero(self.sizes(num_layers).ravel())[-1])
        return position % self.pp, position // self.pp

    def _even(self, num_layers: int) -> Ints:
        """Layers of every stage, the embedding and the loss counted in."""
        total = num_layers + self.embedding_counts + self.loss_counts
        counted = f"num_layers={num_layers}" + "".join(
            f" + 1 for the {name}"
            for name, counts in (("embedding", self.embedding_counts), ("loss", self.loss_counts))
            if counts
        )
        if total % self.pp:
            raise LayoutError(
                f"pp={self.pp} does not divide {counted}", hint=_hint(num_layers, self, total)
            )
        each = total // self.pp
        if each % self.vpp:
            raise LayoutError(
                f"vpp={self.vpp} does not divide the {each} layers of each of pp={self.pp} stages",
                hint=f"sizes that do: {near(divisors(each), self.vpp)}{_ways(num_layers, self)}",
            )
        return np.full(self.pp, each, np.int64)

    def _uneven(self, num_layers: int) -> Ints:
        """Layers of every stage where the first or the last one has a number of its own."""
        outer = [n for n in (self.first, self.last) if n is not None]
        remaining, between = num_layers - sum(outer), self.pp - len(outer)
        outer_flags = flags(Pipeline(first=self.first, last=self.last))
        fits = remaining >= 0 and (remaining == 0) == (between == 0)
        if not fits or (between and remaining % between):
            raise LayoutError(
                f"{outer_flags} leaves {remaining} of {num_layers} layers for {between} stages of "
                f"pp={self.pp}",
                hint=_hint(num_layers, self, 0),
            )
        if not between and self.vpp > 1:
            raise LayoutError(
                f"{outer_flags} says all layers of pp={self.pp} stages, and vpp is {self.vpp}",
                hint="Megatron has virtual stages there only with layers on stages between: one of "
                "the two flags, or no --vpp",
            )
        each = remaining // between if between else 0
        if odd := next((n for n in (*outer, each) if n % self.vpp), 0):
            raise LayoutError(
                f"vpp={self.vpp} does not divide the {odd} layers of a stage "
                f"({outer_flags} of {num_layers} layers, {each} on each other stage)",
                hint=_hint(num_layers, self, 0),
            )
        out = np.full(self.pp, each, np.int64)
        if self.first is not None:
            out[0] = self.first
        if self.last is not None:
            out[-1] = self.last
        return out


def split_stacks(
    parallel: ParallelConfig, num_layers: int, num_decoder_layers: int
) -> tuple[list[range], list[range]]:
    """The layers of an encoder and those of its decoder, on every stage.

    Of the stages, megatron-core 0.8 to 0.13 had the encoder's first: `pretrain_t5.py` and
    `is_inside_encoder` of `parallel_state.py`.

    Raises:
        LayoutError: it is not known which stages are the encoder's, or layers do not go evenly.
    """
    pp, first = parallel.pp, parallel.encoder_pp
    if pp > 1 and not first:
        pairs = [n for n in range(1, pp) if not (num_layers % n or num_decoder_layers % (pp - n))]
        raise LayoutError(
            f"pp={pp}: the model has an encoder and a decoder, and encoder_pp does not say how "
            "many stages the encoder has",
            hint=f"--encoder-pp {' or '.join(map(str, pairs))}" if pairs else "another --pp",
        )
    if not first:
        return [range(num_layers)], [range(num_decoder_layers)]
    for name, size, stages in (
        ("num_layers", num_layers, first),
        ("num_decoder_layers", num_decoder_layers, pp - first),
    ):
        if size % stages:
            raise LayoutError(
                f"{stages} of pp={pp} stages do not divide {name}={size}",
                hint=f"numbers of stages that do: {near(divisors(size), stages)}; --encoder-pp "
                "says how many of --pp the encoder has",
            )
    encoder, decoder = Pipeline(pp=first), Pipeline(pp=pp - first)
    none = range(0)
    return (
        [*(encoder.layers_of(num_layers, n) for n in range(first)), *[none] * (pp - first)],
        [*[none] * first, *(decoder.layers_of(num_decoder_layers, n) for n in range(pp - first))],
    )


def splits(num_layers: int, pp: int, vpp: int = 1) -> list[Pipeline]:
    """Splits of `num_layers` that Megatron takes, the best balanced of each kind, plainest first.

    An even split or one that accounts for the embedding or the loss, then an uneven first stage,
    last stage, or both, and an explicit layout. None where there are more chunks than layers.
    """
    chunks = pp * vpp
    if chunks > num_layers:
        return []
    out = [
        Pipeline(pp=pp, vpp=vpp, embedding_counts=e, loss_counts=last)
        for e, last in ((False, False), (True, False), (False, True), (True, True))
        if (num_layers + e + last) % chunks == 0
    ][:1]
    if vpp == 1 or num_layers % vpp == 0:
        units = num_layers // vpp
        for num_outer in (1, 2):
            if pp <= num_outer:
                continue
            middle = pp - num_outer
            each = [k for k in (units // pp, units // pp + 1) if k]
            ends = [(units - k * middle, k) for k in each if units - k * middle >= num_outer]
            if not ends:
                continue
            remainder, _ = min(ends, key=lambda end: abs(end[0] - end[1] * num_outer))
            if num_outer == 1:
                out.append(Pipeline(pp=pp, vpp=vpp, first=remainder * vpp))
                out.append(Pipeline(pp=pp, vpp=vpp, last=remainder * vpp))
            else:
                first = -(-remainder // 2)
                out.append(
                    Pipeline(pp=pp, vpp=vpp, first=first * vpp, last=(remainder - first) * vpp)
                )
    text = even_text(num_layers, Pipeline(pp=pp, vpp=vpp))
    return [*out, Pipeline(pp=pp, vpp=vpp, layout=text)]


def even_text(num_layers: int, shape: Pipeline, num_mtp: int = 0) -> str:
    """An explicit layout that spreads layers as evenly as chunks allow, the outer ones lighter.

    The first chunk also holds the embedding, and the last one the loss, hence the fewer layers.
    """
    chunks = shape.pp * shape.vpp
    each, more = divmod(num_layers, chunks)
    light = chunks - more
    counts = [each] * (light - light // 2) + [each + 1] * more + [each] * (light // 2)
    rows = ["t" * n for n in counts]
    rows[0] = "E" + rows[0]
    rows[-1] += "m" * num_mtp + "L"
    return compact(rows)


def compact(chunks: Sequence[str]) -> str:
    """Chunks of letters as Megatron's short text: `["E", "tt", "tt", "L"]` is `E|(tt|)*2L`."""
    rows = [_short(c) for c in chunks]
    out, i = "", 0
    while i < len(rows):
        n = next((j for j in range(i, len(rows)) if rows[j] != rows[i]), len(rows)) - i
        n -= i + n == len(rows)  # the last chunk has no bar behind it
        if n > 1 and rows[i]:
            out += f"({rows[i]}|)*{n}"
        else:
            out += f"{rows[i]}|" * n
        i += n
        if i == len(rows) - 1:
            return out + rows[i]
    return out


def layout_text(rows: Iterable[Iterable[str]]) -> str:
    """Megatron's list form, a list of layer names for each chunk, as text.

    Raises:
        LayoutError: a name is none of `embedding`, `decoder`, `mtp`, `loss`.
    """
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    out = []
    for row in rows:
        names = [str(name).strip().lower() for name in row]
        if unknown := [n for n in names if n not in letters]:
            raise LayoutError(
                f"the pipeline layout names {unknown[0]!r}", hint=f"known: {', '.join(letters)}"
            )
        out.append("".join(letters[n] for n in names))
    return compact(out)


def flags(pipeline: Pipeline) -> str:
    """The command-line flags of a split; `""` for an even one."""
    out = []
    if pipeline.first is not None:
        out.append(f"--first-stage-layers {pipeline.first}")
    if pipeline.last is not None:
        out.append(f"--last-stage-layers {pipeline.last}")
    if pipeline.embedding_counts:
        out.append("--account-for-embedding")
    if pipeline.loss_counts:
        out.append("--account-for-loss")
    if pipeline.layout is not None:
        out.append(f"--pipeline-layout '{pipeline.layout}'")
    return " ".join(out)


def divisors(n: int) -> list[int]:
    """All divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def near(fits: Sequence[int], size: int, most: int = 8) -> str:
    """The sizes nearest to one that does not fit, ascending, as text."""
    nearest = sorted(sorted(fits, key=lambda n: (abs(n - size), n))[:most])
    more = ", ..." if len(nearest) < len(fits) else ""
    return (", ".join(map(str, nearest)) or "none") + more


def _hint(num_layers: int, requested: Pipeline, total: int) -> str:
    """Sizes of pp that divide, where that matters, and splits that fit the same stages."""
    sizes = f"sizes that do: {near(divisors(total), requested.pp)}" if total else ""
    return f"{sizes}{_ways(num_layers, requested)}".removeprefix("; ")


def _ways(num_layers: int, requested: Pipeline) -> str:
    vpp = f" vpp={requested.vpp}" if requested.vpp > 1 else ""
    ways = [flags(p) or "an even split" for p in splits(num_layers, requested.pp, requested.vpp)]
    if not ways:
        return f"; {num_layers} layers want at most {num_layers} chunks, not pp={requested.pp}{vpp}"
    return f"; with pp={requested.pp}{vpp}: {', or '.join(ways)}"


def _example(num_layers: int, requested: Pipeline) -> str:
    text = even_text(num_layers, requested, requested.num_mtp)
    return flags(Pipeline(pp=requested.pp, vpp=requested.vpp, layout=text))


def _short(chunk: str) -> str:
    """A chunk's letters with repeats counted: `Ettt` is `Et*3`."""
    return re.sub(r"(.)\1{2,}", lambda m: f"{m[1]}*{len(m[0])}", chunk)


def _check_order(text: str, chunks: Sequence[str], pp: int) -> None:
    """The rules of an explicit layout that do not depend on the model."""
    flat = "".join(chunks)
    with_mtp = [i for i, chunk in enumerate(chunks) if "m" in chunk]
    rules = (
        (flat.startswith("E") and flat.count("E") == 1, "one E, before everything else"),
        (flat.endswith("L") and flat.count("L") == 1, "one L, after everything else"),
        ("t" not in flat[flat.find("m") :] or not with_mtp, "every m after the last t"),
        (len(with_mtp) <= 1, "every m in one chunk"),
        (
            all(i >= len(chunks) - pp for i in with_mtp),
            f"m in the last virtual stage: the last {pp} of its {len(chunks)} chunks",
        ),
    )
    for holds, rule in rules:
        if not holds:
            raise LayoutError(
                f"pipeline_layout {text[:80]!r} is not a Megatron pipeline layout", hint=rule
            )
