"""A model's layout over ranks (ParallelConfig) and the options that say it; kinds of labels."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from megtool.errors import LayoutError
from megtool.options.field import LAYOUT, Options, layout_size, option
from megtool.spec.model_config import MOST_LAYERS

CommType = Literal["all_gather", "p2p", "a2a", "a2a+p2p"]
"""How ranks of context parallelism exchange keys and values, in Megatron's words."""

LabelKind = Literal["classes", "numbers", "preferences"]
"""What labels of texts are: the number of a class; a number, as the bits of its float32; or, of an
answer, the place in its row where the one is scored that it is preferred to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes, named as in Megatron, and how layers go to pipeline stages.

    `etp`, the tensor-parallel size of experts, is `tp` unless given. `dp` unless given is the
    smallest that leaves room for the experts: `etp * ep` ranks have to divide `tp * cp * dp`.
    `vpp` unless given is what `pipeline_layout` says, or 1. After construction every size is a
    positive integer.

    Layers are split evenly over the pipeline stages, unless `first_stage_layers` or
    `last_stage_layers` gives one of the outer stages a number of its own, or the embedding or the
    loss is accounted for as if it were a layer, or `pipeline_layout` says it chunk by chunk in
    Megatron's own words: `Et*3|(tt|)*29m|L` (see `megtool.parallel.pipeline_split`, which
    knows what divides which number of layers).

    Of a model of an encoder and a decoder (T5) the first `encoder_pp` stages have the encoder's
    layers, and the others the decoder's, each evenly; 0 where one stage has both, and of any other
    model.

    `cp_comm_type` is one type for all layers, or one for each; none is `all_gather`. With `a2a+p2p`
    `hierarchical_cp` has the ranks that exchange heads, neighbours on the axis, and the number of
    such groups, which pass keys and values round. Two layouts that differ in these are equal.

    Raises:
        LayoutError: an axis is no positive integer, the experts' ranks do not fit, two ways of
            splitting layers are mixed, or ranks of context parallelism cannot communicate so.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 0
    ep: int = 1
    etp: int = 0
    cp: int = 1
    dp: int = 0
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    pipeline_layout: str | None = None
    encoder_pp: int = 0
    cp_comm_type: tuple[CommType, ...] = field(default=(), compare=False)
    hierarchical_cp: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "cp"):
            self._check(name, 1)
        for name in ("vpp", "etp", "dp", "encoder_pp"):
            self._check(name, 0)
        if not self.etp:
            object.__setattr__(self, "etp", self.tp)
        experts, dense = self.etp * self.ep, self.tp * self.cp
        least = experts // math.gcd(experts, dense)
        if not self.dp:
            object.__setattr__(self, "dp", least)
        if self.dp % least:
            below, above = self.dp // least * least, -(-self.dp // least) * least
            near = f"{below} or {above}" if below else f"{above}"
            raise LayoutError(
                f"etp={self.etp} x ep={self.ep} does not divide "
                f"tp={self.tp} x cp={self.cp} x dp={self.dp}",
                hint=f"dp has to be a multiple of {least}: the nearest is {near}",
            )
        self._check_split()
        self._check_stacks()
        self._check_context()
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                f"vpp is {self.vpp}, but pp is 1",
                hint="virtual stages need at least two pipeline stages",
            )

    def _check(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise LayoutError(f"{name} is {value!r}", hint="parallel sizes are positive integers")

    def _check_split(self) -> None:
        """One way of splitting layers, and `vpp` from an explicit layout."""
        uneven = [f for f in ("first_stage_layers", "last_stage_layers") if self._has(f)]
        for name in uneven:
            self._check(name, 1)
        if uneven and self.pp == 1:
            raise LayoutError(
                f"{' and '.join(uneven)} cannot be set with pp={self.pp}",
                hint="an uneven split needs at least 2 pipeline stages",
            )
        accounted = [f for f in ("account_for_embedding", "account_for_loss") if self._has(f)]
        for name in accounted:
            if getattr(self, name) is not True:
                raise LayoutError(f"{name} is {getattr(self, name)!r}", hint="true or false")
        explicit = ["pipeline_layout"] if self.pipeline_layout is not None else []
        if len(ways := [w[0] for w in (explicit, uneven, accounted) if w]) > 1:
            raise LayoutError(
                f"{ways[0]} and {ways[1]} exclude each other", hint="give one of them"
            )
        if self.pipeline_layout is not None:
            chunks = len(pipeline_chunks(self.pipeline_layout))
            if chunks > 1 and self.pp == 1:
                raise LayoutError(
                    f"pipeline_layout has {chunks} chunks, and pp is 1",
                    hint=f"--pp says how many stages share them: {chunks}, or a divisor of it",
                )
            if chunks % self.pp or self.vpp not in (0, chunks // self.pp):
                vpp = f" x vpp={self.vpp}" if self.vpp else " or a multiple of it"
                raise LayoutError(
                    f"pipeline_layout has {chunks} chunks, not pp={self.pp}{vpp}",
                    hint="'|' parts chunks: one for each stage and virtual stage",
                )
            object.__setattr__(self, "vpp", chunks // self.pp)
        object.__setattr__(self, "vpp", self.vpp or 1)

    def _check_stacks(self) -> None:
        """An encoder leaves stages to its decoder, and both are split evenly."""
        if not self.encoder_pp:
            return
        if self.encoder_pp >= self.pp:
            raise LayoutError(
                f"encoder_pp is {self.encoder_pp}, and pp is {self.pp}",
                hint="pp counts all stages, and the decoder has at least the last one",
            )
        names = ("first_stage_layers", "last_stage_layers", "account_for_embedding")
        others = [n for n in (*names, "account_for_loss", "pipeline_layout") if self._has(n)]
        others += ["vpp"] if self.vpp > 1 else []
        if others:
            raise LayoutError(
                f"encoder_pp and {others[0]} exclude each other",
                hint="an encoder and its decoder are split evenly, without virtual stages",
            )

    def _check_context(self) -> None:
        """Known types, and levels that make up the axis."""
        for kind in self.cp_comm_type:
            if kind not in get_args(CommType):
                raise LayoutError(
                    f"cp_comm_type is {kind!r}", hint=f"known: {', '.join(get_args(CommType))}"
                )
        levels, is_needed = self.hierarchical_cp, "a2a+p2p" in self.cp_comm_type
        if is_needed and (len(levels) != 2 or math.prod(levels) != self.cp or min(levels) < 1):
            raise LayoutError(
                f"cp_comm_type a2a+p2p has the levels {list(levels)}, and cp is {self.cp}",
                hint="--hierarchical-context-parallel-sizes A,B: A ranks exchange heads, B groups "
                "of them keys and values, and A * B is --cp",
            )
        if levels and not is_needed:
            raise LayoutError(
                f"hierarchical_cp is {list(levels)}, and no layer has cp_comm_type a2a+p2p",
                hint="--cp-comm-type a2a+p2p, or leave the sizes out",
            )

    def comm_type(self, layer: int) -> CommType:
        """How ranks exchange keys and values of a layer; layers behind the last have its type."""
        kinds = self.cp_comm_type or ("all_gather",)
        return kinds[min(layer, len(kinds) - 1)]

    def _has(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Number of replicas of every expert."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(Options):
    """A parallel layout as a user gives it: None (or False) leaves a field to the checkpoint.

    The fields are those of `ParallelConfig`.
    """

    tp: int | None = layout_size("tp", note="; default of all axes but --dp: as in the source")
    pp: int | None = layout_size("pp")
    vpp: int | None = layout_size("vpp")
    ep: int | None = layout_size("ep")
    etp: int | None = layout_size("etp")
    cp: int | None = layout_size("cp")
    dp: int | None = layout_size("dp", note="; default: the smallest number that fits")
    first_stage_layers: int | None = option(
        LAYOUT, "Layers of the first pipeline stage.", metavar="N", minimum=1
    )
    last_stage_layers: int | None = option(
        LAYOUT, "Layers of the last pipeline stage.", metavar="N", minimum=1
    )
    account_for_embedding: bool = option(LAYOUT, "Count the embedding as a layer.", False)
    account_for_loss: bool = option(LAYOUT, "Count the loss as a layer.", False)
    pipeline_layout: str | None = option(
        LAYOUT,
        "Layers of every stage in Megatron's notation, such as Et*3|(tt|)*29m|L.",
        metavar="TEXT",
    )
    encoder_pp: int | None = layout_size("encoder_pp", minimum=0)

    @classmethod
    def of(cls, parallel: ParallelConfig) -> LayoutOptions:
        """All of a layout that a checkpoint has."""
        return cls(**{f.name: getattr(parallel, f.name) for f in fields(LayoutOptions)})

    def explicit(self) -> dict[str, Any]:
        """The fields that are given, as keywords of `ParallelConfig`."""
        values = {f.name: getattr(self, f.name) for f in fields(LayoutOptions)}
        return {k: v for k, v in values.items() if v is not None and v is not False}


_TIMES = (re.compile(r"\(([^()]+)\)\*([0-9]{1,9})"), re.compile(r"(.)\*([0-9]{1,9})"))
_MOST_CHUNK_TEXT = 4 * MOST_LAYERS


def pipeline_chunks(text: str) -> tuple[str, ...]:
    """The chunks of an explicit pipeline layout: a letter for each layer, `""` for an empty one.

    Letters are `E` embedding, `t` decoder layer, `m` layer of multi-token prediction and `L` loss;
    `|` parts chunks, `x*3` and `(..)*3` repeat (parentheses do not nest), commas say nothing.
    Chunks come in the order of layers: all stages of the first virtual stage, then of the next.

    Raises:
        LayoutError: another letter, or more layers than any model has.
    """
    if not isinstance(text, str):
        raise LayoutError(f"pipeline_layout is {text!r}", hint="for example 'Ett|tt|ttL'")
    plain = text.replace(",", "")
    for pattern in _TIMES:
        length = len(plain) + sum(
            len(m[1]) * int(m[2]) - len(m[0]) for m in pattern.finditer(plain)
        )
        if max(length, len(plain)) > _MOST_CHUNK_TEXT:
            raise LayoutError(
                f"pipeline_layout {text[:60]!r} describes {length:,} layers and chunks",
                hint=f"at most {_MOST_CHUNK_TEXT:,}",
            )
        plain = pattern.sub(lambda m: m[1] * int(m[2]), plain)
    if strange := set(plain) - set("EtmL|"):
        raise LayoutError(
            f"pipeline_layout {text[:60]!r} holds {min(strange)!r}",
            hint="E embedding, t layer, m multi-token prediction, L loss, | next chunk; "
            "x*3 and (..)*3 repeat",
        )
    return tuple(plain.split("|"))
