"""Ranks: which boxes of which weights make each tensor of each rank of a legacy checkpoint.

The rules are those of TensorRT-LLM's `convert_checkpoint` scripts and of ModelOpt's
`postprocess_model_config`: `qkv`, `fc`, `gate`, the embedding and the head are cut along rows,
`dense` and `proj` along columns, everything else is on every rank of its stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megtool.config import ModelConfig

EMBED, HEAD = "transformer.vocab_embedding", "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The elements `lo:hi` of a canonical tensor, put at `at` of a rank's tensor."""

    canonical: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    at: tuple[int, ...]


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
    boxes: tuple[Box, ...]
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
class Cut:
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


def rank_tensors(cut: Cut, held: Collection[str], *, shares_table: bool) -> Iterator[RankTensor]:
    """All tensors of all ranks, rank by rank. `held` are the canonical tensors that there are.

    With `shares_table` the head is the embedding and is not stored.
    """
    for rank in range(cut.tp * cut.pp):
        stage, t = divmod(rank, cut.tp)
        one = _Rank(cut, held, rank, t)
        if stage == 0:
            yield one.vocabulary(EMBED, "embed.weight")
            if "positions.weight" in held:
                count = cut.config.max_positions
                rows = -(-count // cut.tp)
                yield one.rows("transformer.position_embedding", "positions.weight", count, rows)
        for local in range(cut.layers):
            yield from one.layer(local)
        if stage == cut.pp - 1:
            yield from one.norm("transformer.ln_f", "norm")
            if not shares_table:
                head = "head.weight" if "head.weight" in held else "embed.weight"
                yield one.vocabulary(HEAD, head)


class _Rank:
    """The tensors of one rank."""

    def __init__(self, cut: Cut, held: Collection[str], rank: int, t: int) -> None:
        self.cut, self.held, self.rank, self.t = cut, held, rank, t
        self.config = cut.config

    def layer(self, local: int) -> Iterator[RankTensor]:
        """One layer, counted from 0 in its stage."""
        c, t = self.config, self.t
        at = f"transformer.layers.{local}"
        number = self.cut.global_layer(self.rank, local)
        of = f"layers.{number}"
        yield from self.norm(f"{at}.input_layernorm", f"{of}.attn_norm")
        q = c.num_heads // self.cut.tp * c.head_dim
        first, end = (n * c.head_dim for n in self.cut.kv_heads(t))
        yield from self.column(
            f"{at}.attention.qkv",
            c.hidden_size,
            [
                (f"{of}.attn.q", t * q, (t + 1) * q),
                (f"{of}.attn.k", first, end),
                (f"{of}.attn.v", first, end),
            ],
        )
        for name in ("q", "k"):
            norm = f"{at}.attention.{name}_layernorm"
            yield from self.norm(norm, f"{of}.attn.{name}_norm", c.head_dim)
        yield from self.row(f"{at}.attention.dense", f"{of}.attn.o", c.num_heads * c.head_dim)
        yield from self.norm(f"{at}.post_layernorm", f"{of}.mlp_norm")
        if number in c.moe_layers:
            yield from self.experts(f"{at}.mlp", f"{of}.mlp")
            return
        f = c.ffn_hidden_size // self.cut.tp
        names = (("fc", "gate"), ("gate", "up")) if c.gated else (("fc", "up"),)
        for name, canonical in names:
            piece = (f"{of}.mlp.{canonical}", t * f, (t + 1) * f)
            yield from self.column(f"{at}.mlp.{name}", c.hidden_size, [piece])
        yield from self.row(f"{at}.mlp.proj", f"{of}.mlp.down", c.ffn_hidden_size)

    def norm(self, name: str, canonical: str, size: int = 0) -> Iterator[RankTensor]:
        """A norm's weight and bias, if there are any."""
        size = size or self.config.hidden_size
        for last in ("weight", "bias"):
            source = f"{canonical}.{last}"
            if source in self.held:
                yield self._tensor(
                    f"{name}.{last}",
                    (size,),
                    [Box(canonical=source, lo=(0,), hi=(size,), at=(0,))],
                    plus_one=last == "weight" and self.config.zero_centered_norm,
                )

    def column(
        self, name: str, width: int, pieces: list[tuple[str, int, int]]
    ) -> Iterator[RankTensor]:
        """Rows `first:end` of linear modules, below each other."""
        boxes, biases, down = [], [], 0
        for canonical, first, end in pieces:
            weight = f"{canonical}.weight"
            boxes.append(Box(canonical=weight, lo=(first, 0), hi=(end, width), at=(down, 0)))
            if f"{canonical}.bias" in self.held:
                bias = f"{canonical}.bias"
                biases.append(Box(canonical=bias, lo=(first,), hi=(end,), at=(down,)))
            down += end - first
        yield self._tensor(f"{name}.weight", (down, width), boxes, is_linear=True)
        if biases:
            yield self._tensor(f"{name}.bias", (down,), biases)

    def row(self, name: str, canonical: str, width: int) -> Iterator[RankTensor]:
        """Some columns of a linear module; all of its bias, which engines add once."""
        part, rows = width // self.cut.tp, self.config.hidden_size
        lo, hi = (0, self.t * part), (rows, (self.t + 1) * part)
        weight = Box(canonical=f"{canonical}.weight", lo=lo, hi=hi, at=(0, 0))
        yield self._tensor(f"{name}.weight", (rows, part), [weight], is_linear=True)
        if f"{canonical}.bias" in self.held:
            bias = Box(canonical=f"{canonical}.bias", lo=(0,), hi=(rows,), at=(0,))
            yield self._tensor(f"{name}.bias", (rows,), [bias])

    def experts(self, name: str, canonical: str) -> Iterator[RankTensor]:
        """A mixture: `fc` has of every expert the rows of `up`, and those of `gate` below them."""
        c, t = self.config, self.t
        count, h, f = c.num_experts, c.hidden_size, c.moe_ffn_hidden_size // self.cut.tp
        router = Box(canonical=f"{canonical}.router.weight", lo=(0, 0), hi=(count, h), at=(0, 0))
        yield self._tensor(f"{name}.router.weight", (count, h), [router], is_router=True)
        into, out = [], []
        for e in range(count):
            of = f"{canonical}.experts.{e}"
            for i, kind in enumerate(("up", "gate")):
                at = ((2 * e + i) * f, 0)
                lo, hi = (t * f, 0), ((t + 1) * f, h)
                into.append(Box(canonical=f"{of}.{kind}.weight", lo=lo, hi=hi, at=at))
            lo, hi = (0, t * f), (h, (t + 1) * f)
            out.append(Box(canonical=f"{of}.down.weight", lo=lo, hi=hi, at=(e * h, 0)))
        shape = 2 * f * count, h
        yield self._tensor(f"{name}.fc.weight", shape, into, experts=count, is_linear=True)
        shape = h * count, f
        yield self._tensor(f"{name}.proj.weight", shape, out, experts=count, is_linear=True)

    def vocabulary(self, name: str, canonical: str) -> RankTensor:
        """The rows of some tokens."""
        rows = self.cut.vocab_rows // self.cut.tp
        is_linear = name == HEAD and canonical == "head.weight"
        return self.rows(name, canonical, self.config.vocab_size, rows, is_linear=is_linear)

    def rows(
        self, name: str, canonical: str, count: int, rows: int, *, is_linear: bool = False
    ) -> RankTensor:
        """This rank's `rows` of `count`, of which the last ranks may lack some."""
        width = self.config.hidden_size
        first, end = min(self.t * rows, count), min((self.t + 1) * rows, count)
        box = Box(canonical=canonical, lo=(first, 0), hi=(end, width), at=(0, 0))
        return self._tensor(
            f"{name}.weight", (rows, width), [box] if first < end else [], is_linear=is_linear
        )

    def _tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        boxes: list[Box],
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
