"""Which boxes of which weights make up each tensor of each rank of a legacy checkpoint.

The rules are those of TensorRT-LLM's `convert_checkpoint` scripts and of ModelOpt's
`postprocess_model_config`: `qkv`, `fc`, `gate`, the embedding and the head are cut along rows,
`dense` and `proj` along columns, everything else is on every rank of its stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megtool.model_config import ModelConfig

EMBED, HEAD = "transformer.vocab_embedding", "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBox:
    """The elements `lo:hi` of a canonical tensor, put at `at` of a rank's tensor."""

    canonical: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """One tensor of one rank, before anything is said about numbers.

    `name` is that in the file, of which `module` is what a weight belongs to. Weights of `experts`
    experts lie below each other in `shape`, and are a third dimension in the file. `is_linear` says
    that it may be quantized. Elements no box covers are zero (rows that pad a vocabulary). With
    `plus_one` gammas around zero become those around one. A router keeps float32 (`is_router`).
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    boxes: tuple[RankBox, ...]
    experts: int = 0
    is_linear: bool = False
    is_router: bool = False
    plus_one: bool = False

    @property
    def module(self) -> str:
        """The name without `.weight` or `.bias`."""
        return self.name.rpartition(".")[0]

    @property
    def stored(self) -> str:
        """What tells it from the tensors of this name that other ranks have."""
        return f"rank{self.rank}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """How a model is cut: into `pp` stages of `tp` ranks.

    `vocab_size` is what config.json says, `vocab_rows` are those of all ranks together.
    """

    config: ModelConfig
    tp: int
    pp: int
    vocab_size: int
    vocab_rows: int

    @property
    def layers(self) -> int:
        """Layers of a stage."""
        return self.config.num_layers // self.pp

    def global_layer(self, rank: int, layer: int) -> int:
        """The number in the whole model of layer number `layer` of a rank."""
        return rank // self.tp * self.layers + layer

    def kv_heads(self, t: int) -> tuple[int, int]:
        """First and end of the heads of keys and values on tensor-parallel rank `t`."""
        heads = self.config.num_kv_heads
        if heads >= self.tp:
            return t * (heads // self.tp), (t + 1) * (heads // self.tp)
        return t * heads // self.tp, t * heads // self.tp + 1


def list_rank_tensors(
    layout: RankLayout, names: Collection[str], *, shares_table: bool
) -> Iterator[RankTensor]:
    """All tensors of all ranks, rank by rank. `held` are the canonical tensors that there are.

    With `shares_table` the head is the embedding and is not stored.
    """
    for rank in range(layout.tp * layout.pp):
        stage, t = divmod(rank, layout.tp)
        builder = _RankBuilder(layout, names, rank, t)
        if stage == 0:
            yield builder.vocabulary(EMBED, "embed.weight")
            if "positions.weight" in names:
                count = layout.config.max_positions
                rows = -(-count // layout.tp)
                yield builder.rows(
                    "transformer.position_embedding", "positions.weight", count, rows
                )
        for local in range(layout.layers):
            yield from builder.layer(local)
        if stage == layout.pp - 1:
            yield from builder.norm("transformer.ln_f", "norm")
            if not shares_table:
                head = "head.weight" if "head.weight" in names else "embed.weight"
                yield builder.vocabulary(HEAD, head)


class _RankBuilder:
    """The tensors of one rank."""

    def __init__(self, layout: RankLayout, names: Collection[str], rank: int, t: int) -> None:
        self.layout, self.names, self.rank, self.t = layout, names, rank, t
        self.config = layout.config

    def layer(self, local: int) -> Iterator[RankTensor]:
        """One layer, counted from 0 in its stage."""
        c, t = self.config, self.t
        prefix = f"transformer.layers.{local}"
        number = self.layout.global_layer(self.rank, local)
        source = f"layers.{number}"
        yield from self.norm(f"{prefix}.input_layernorm", f"{source}.attn_norm")
        q = c.num_heads // self.layout.tp * c.head_dim
        first, end = (n * c.head_dim for n in self.layout.kv_heads(t))
        yield from self.column(
            f"{prefix}.attention.qkv",
            c.hidden_size,
            [
                (f"{source}.attn.q", t * q, (t + 1) * q),
                (f"{source}.attn.k", first, end),
                (f"{source}.attn.v", first, end),
            ],
        )
        for name in ("q", "k"):
            norm = f"{prefix}.attention.{name}_layernorm"
            yield from self.norm(norm, f"{source}.attn.{name}_norm", c.head_dim)
        yield from self.row(
            f"{prefix}.attention.dense", f"{source}.attn.o", c.num_heads * c.head_dim
        )
        yield from self.norm(f"{prefix}.post_layernorm", f"{source}.mlp_norm")
        if number in c.moe_layers:
            yield from self.experts(f"{prefix}.mlp", f"{source}.mlp")
            return
        f = c.ffn_hidden_size // self.layout.tp
        names = (("fc", "gate"), ("gate", "up")) if c.gated else (("fc", "up"),)
        for name, canonical in names:
            piece = (f"{source}.mlp.{canonical}", t * f, (t + 1) * f)
            yield from self.column(f"{prefix}.mlp.{name}", c.hidden_size, [piece])
        yield from self.row(f"{prefix}.mlp.proj", f"{source}.mlp.down", c.ffn_hidden_size)

    def norm(self, name: str, canonical: str, size: int = 0) -> Iterator[RankTensor]:
        """A norm's weight and bias, if there are any."""
        size = size or self.config.hidden_size
        for last in ("weight", "bias"):
            source = f"{canonical}.{last}"
            if source in self.names:
                yield self._tensor(
                    f"{name}.{last}",
                    (size,),
                    [RankBox(canonical=source, lo=(0,), hi=(size,), offset=(0,))],
                    plus_one=last == "weight" and self.config.zero_centered_norm,
                )

    def column(
        self, name: str, width: int, pieces: list[tuple[str, int, int]]
    ) -> Iterator[RankTensor]:
        """Rows `first:end` of linear modules, below each other."""
        boxes, biases, down = [], [], 0
        for canonical, first, end in pieces:
            weight = f"{canonical}.weight"
            boxes.append(
                RankBox(canonical=weight, lo=(first, 0), hi=(end, width), offset=(down, 0))
            )
            if f"{canonical}.bias" in self.names:
                bias = f"{canonical}.bias"
                biases.append(RankBox(canonical=bias, lo=(first,), hi=(end,), offset=(down,)))
            down += end - first
        yield self._tensor(f"{name}.weight", (down, width), boxes, is_linear=True)
        if biases:
            yield self._tensor(f"{name}.bias", (down,), biases)

    def row(self, name: str, canonical: str, width: int) -> Iterator[RankTensor]:
        """Some columns of a linear module; all of its bias, which engines add once."""
        part, rows = width // self.layout.tp, self.config.hidden_size
        lo, hi = (0, self.t * part), (rows, (self.t + 1) * part)
        weight = RankBox(canonical=f"{canonical}.weight", lo=lo, hi=hi, offset=(0, 0))
        yield self._tensor(f"{name}.weight", (rows, part), [weight], is_linear=True)
        if f"{canonical}.bias" in self.names:
            bias = RankBox(canonical=f"{canonical}.bias", lo=(0,), hi=(rows,), offset=(0,))
            yield self._tensor(f"{name}.bias", (rows,), [bias])

    def experts(self, name: str, canonical: str) -> Iterator[RankTensor]:
        """A mixture: `fc` has of every expert the rows of `up`, and those of `gate` below them."""
        c, t = self.config, self.t
        count, h, f = c.num_experts, c.hidden_size, c.moe_ffn_hidden_size // self.layout.tp
        router = RankBox(
            canonical=f"{canonical}.router.weight", lo=(0, 0), hi=(count, h), offset=(0, 0)
        )
        yield self._tensor(f"{name}.router.weight", (count, h), [router], is_router=True)
        into, out = [], []
        for e in range(count):
            expert = f"{canonical}.experts.{e}"
            for i, kind in enumerate(("up", "gate")):
                offset = ((2 * e + i) * f, 0)
                lo, hi = (t * f, 0), ((t + 1) * f, h)
                into.append(
                    RankBox(canonical=f"{expert}.{kind}.weight", lo=lo, hi=hi, offset=offset)
                )
            lo, hi = (0, t * f), (h, (t + 1) * f)
            out.append(RankBox(canonical=f"{expert}.down.weight", lo=lo, hi=hi, offset=(e * h, 0)))
        shape = 2 * f * count, h
        yield self._tensor(f"{name}.fc.weight", shape, into, experts=count, is_linear=True)
        shape = h * count, f
        yield self._tensor(f"{name}.proj.weight", shape, out, experts=count, is_linear=True)

    def vocabulary(self, name: str, canonical: str) -> RankTensor:
        """The rows of some tokens."""
        rows = self.layout.vocab_rows // self.layout.tp
        is_linear = name == HEAD and canonical == "head.weight"
        return self.rows(name, canonical, self.config.vocab_size, rows, is_linear=is_linear)

    def rows(
        self, name: str, canonical: str, count: int, rows: int, *, is_linear: bool = False
    ) -> RankTensor:
        """This rank's `rows` of `count`, of which the last ranks may lack some."""
        width = self.config.hidden_size
        first, end = min(self.t * rows, count), min((self.t + 1) * rows, count)
        box = RankBox(canonical=canonical, lo=(first, 0), hi=(end, width), offset=(0, 0))
        return self._tensor(
            f"{name}.weight", (rows, width), [box] if first < end else [], is_linear=is_linear
        )

    def _tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        boxes: list[RankBox],
        *,
        experts: int = 0,
        is_linear: bool = False,
        is_router: bool = False,
        plus_one: bool = False,
    ) -> RankTensor:
        return RankTensor(
            rank=self.rank,
            name=name,
            shape=shape,
            boxes=tuple(boxes),
            experts=experts,
            is_linear=is_linear,
            is_router=is_router,
            plus_one=plus_one,
        )
