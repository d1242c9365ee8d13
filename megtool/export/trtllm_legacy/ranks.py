"""Which boxes of which weights make up each tensor of each rank of a legacy checkpoint.

The rules are those of TensorRT-LLM's `convert_checkpoint` scripts and of ModelOpt's
`postprocess_model_config`: `qkv`, `fc`, `gate`, the embedding and the head are cut along rows,
`dense` and `proj` along columns, everything else is on every rank of its stage. Of a mixture, whole
experts go to groups of ranks, and are cut among the ranks of a group (`Mapping`: `moe_ep_rank` is
the remainder of a rank by `moe_ep_size`, and `moe_tp_rank` the quotient).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypedDict, Unpack

from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

EMBED, HEAD = "transformer.vocab_embedding", "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBox:
    """The elements `lo:hi` of a canonical tensor, put at `at` of a rank's tensor."""

    canonical: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedQueries:
    """Queries of heads that meet what the cache holds: `heads` of them, from number `first`.

    A head has `nope` rows of the weight `query`, of `width` columns, that are multiplied by as many
    rows of the weight `key_value`, of `rank` columns; `rope` more rows are as they are. Below its
    rows of keys `key_value` has `value` rows of values.
    """

    query: str
    key_value: str
    first: int
    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """One tensor of one rank, before anything is said about numbers.

    `name` is that in the file, of which `module` is what a weight belongs to. Weights of `experts`
    experts lie below each other in `shape`, and are a third dimension in the file. `is_linear` says
    that it is a linear layer's weight. Elements no box covers are zero (rows that pad a
    vocabulary). With `plus_one` gammas around zero become those around one. A router is in float32
    (`is_router`), and so is what is added to its scores (`is_float32`). What engines compute
    further weights of cannot be quantized (`is_plain`).

    Tensors of latent attention that have the same `queries` are made together: see
    `absorbed_queries`.
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    boxes: tuple[RankBox, ...]
    experts: int = 0
    is_linear: bool = False
    is_router: bool = False
    is_float32: bool = False
    is_plain: bool = False
    plus_one: bool = False
    queries: AbsorbedQueries | None = None

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
    """How a model is cut: into `pp` stages of `tp` ranks, `ep` of which share the experts.

    `vocab_size` is what config.json says, `vocab_rows` are those of all ranks together.
    """

    config: ModelConfig
    tp: int
    pp: int
    vocab_size: int
    vocab_rows: int
    ep: int = 1

    @property
    def moe_tp(self) -> int:
        """How many ranks share each expert."""
        return self.tp // self.ep

    def experts(self, t: int) -> range:
        """The experts of tensor-parallel rank `t`."""
        count = self.config.moe.num_experts // self.ep
        return range(t % self.ep * count, (t % self.ep + 1) * count)

    @property
    def layers(self) -> int:
        """Layers of a stage."""
        return self.config.num_layers // self.pp

    def global_layer(self, rank: int, layer: int) -> int:
        """The number in the whole model of layer number `layer` of a rank."""
        return rank // self.tp * self.layers + layer

    def kv_heads(self, t: int) -> tuple[int, int]:
        """First and end of the heads of keys and values on tensor-parallel rank `t`."""
        heads = self.config.attention.num_kv_heads
        if heads >= self.tp:
            return t * (heads // self.tp), (t + 1) * (heads // self.tp)
        return t * heads // self.tp, t * heads // self.tp + 1


def list_rank_tensors(
    layout: RankLayout, names: Collection[str], *, shares_table: bool
) -> Iterator[RankTensor]:
    """All tensors of all ranks, rank by rank. `names` are the canonical tensors that there are.

    With `shares_table` the head is the embedding and is not stored.
    """
    for rank in range(layout.tp * layout.pp):
        stage, t = divmod(rank, layout.tp)
        builder = _RankBuilder(layout, names, rank, t)
        if stage == 0:
            yield builder.vocabulary(EMBED, "embed.weight")
            if "positions.weight" in names:
                count = layout.config.positions.max_positions
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


class _Traits(TypedDict, total=False):
    """What some tensors have: see `RankTensor`."""

    experts: int
    is_linear: bool
    is_router: bool
    is_float32: bool
    is_plain: bool
    plus_one: bool
    queries: AbsorbedQueries


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
        if c.latent.kv_lora_rank:
            yield from self.latent_attention(f"{prefix}.attention", f"{source}.attn")
        else:
            yield from self.attention(f"{prefix}.attention", f"{source}.attn")
        after = "mlp_layernorm" if c.residual.parallel_residual else "post_layernorm"
        yield from self.norm(f"{prefix}.{after}", f"{source}.mlp_norm")
        if number in layer_sets.moe_layers(c):
            yield from self.experts(f"{prefix}.mlp", f"{source}.mlp")
            return
        f = c.mlp.ffn_hidden_size // self.layout.tp
        names = (("fc", "gate"), ("gate", "up")) if c.mlp.gated else (("fc", "up"),)
        for name, canonical in names:
            piece = (f"{source}.mlp.{canonical}", t * f, (t + 1) * f)
            yield from self.column(f"{prefix}.mlp.{name}", c.hidden_size, [piece])
        yield from self.row(f"{prefix}.mlp.proj", f"{source}.mlp.down", c.mlp.ffn_hidden_size)

    def attention(self, name: str, source: str) -> Iterator[RankTensor]:
        """Queries of some heads, with keys and values of theirs below them."""
        c, t = self.config, self.t
        q = c.attention.num_heads // self.layout.tp * c.attention.head_dim
        first, end = (n * c.attention.head_dim for n in self.layout.kv_heads(t))
        yield from self.column(
            f"{name}.qkv",
            c.hidden_size,
            [
                (f"{source}.q", t * q, (t + 1) * q),
                (f"{source}.k", first, end),
                (f"{source}.v", first, end),
            ],
        )
        for kind in ("q", "k"):
            yield from self.norm(
                f"{name}.{kind}_layernorm", f"{source}.{kind}_norm", c.attention.head_dim
            )
        yield from self.row(
            f"{name}.dense", f"{source}.o", c.attention.num_heads * c.attention.head_dim
        )

    def latent_attention(self, name: str, source: str) -> Iterator[RankTensor]:
        """Both projections to latents as one, on every rank, and of some heads those from them.

        `kv_b_proj` has the keys of all heads of a rank, and their values below them;
        `fused_q_proj` makes queries that meet latents instead of keys, as
        tensorrt_llm/models/deepseek_v2/convert.py does at 65b31db1 and 130232d9.
        """
        c = self.config
        heads = c.attention.num_heads // self.layout.tp
        first = self.t * heads
        down = (
            ("q_down", c.latent.q_lora_rank),
            ("kv_down", c.latent.kv_lora_rank + c.latent.qk_rope_head_dim),
        )
        pieces = [(f"{source}.{kind}", 0, rows) for kind, rows in down if rows]
        yield from self.column(f"{name}.fused_a", c.hidden_size, pieces, is_plain=True)
        for kind, rows in (("q", c.latent.q_lora_rank), ("kv", c.latent.kv_lora_rank)):
            yield from self.norm(f"{name}.{kind}_a_layernorm", f"{source}.{kind}_down_norm", rows)
        query = f"{source}.q_up.weight" if c.latent.q_lora_rank else f"{source}.q.weight"
        size, width = c.attention.head_dim, c.latent.q_lora_rank or c.hidden_size
        lo, hi = (first * size, 0), ((first + heads) * size, width)
        q_box = RankBox(canonical=query, lo=lo, hi=hi, offset=(0, 0))
        key_value, nope, value = (
            f"{source}.kv_up.weight",
            c.latent.qk_nope_head_dim,
            c.attention.v_head_dim,
        )
        boxes = []
        for part, start, length in ((0, 0, nope), (heads * nope, nope, value)):
            for head in range(heads):
                row = (first + head) * (nope + value) + start
                box = RankBox(
                    canonical=key_value,
                    lo=(row, 0),
                    hi=(row + length, c.latent.kv_lora_rank),
                    offset=(part + head * length, 0),
                )
                boxes.append(box)
        queries = AbsorbedQueries(
            query=query,
            key_value=key_value,
            first=first,
            heads=heads,
            nope=nope,
            rope=c.latent.qk_rope_head_dim,
            value=value,
            rank=c.latent.kv_lora_rank,
            width=width,
        )
        for kind, shape, parts in (
            ("fused_q_proj", (heads * (queries.rank + queries.rope), width), [q_box, *boxes]),
            ("q_b_proj", (heads * size, width), [q_box]),
            ("kv_b_proj", (heads * (nope + value), queries.rank), boxes),
        ):
            yield self._tensor(f"{name}.{kind}", shape, parts, is_plain=True, queries=queries)
        yield from self.row(f"{name}.dense", f"{source}.o", c.attention.num_heads * value)

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
                    plus_one=last == "weight" and self.config.norms.zero_centered_norm,
                )

    def column(
        self,
        name: str,
        width: int,
        pieces: list[tuple[str, int, int]],
        *,
        is_plain: bool = False,
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
        yield self._tensor(
            f"{name}.weight", (down, width), boxes, is_linear=True, is_plain=is_plain
        )
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
        """A mixture: `fc` has of every expert the rows of `up`, and those of `gate` below them; an
        expert that all tokens go to has both so, too."""
        c, layout = self.config, self.layout
        h, f = c.hidden_size, c.moe.moe_ffn_hidden_size // layout.moe_tp
        first = self.t // layout.ep * f
        router = RankBox(
            canonical=f"{canonical}.router.weight",
            lo=(0, 0),
            hi=(c.moe.num_experts, h),
            offset=(0, 0),
        )
        shape: tuple[int, ...] = c.moe.num_experts, h
        yield self._tensor(
            f"{name}.router.weight", shape, [router], is_router=True, is_float32=True
        )
        if (bias := f"{canonical}.router.expert_bias") in self.names:
            added = RankBox(canonical=bias, lo=(0,), hi=(c.moe.num_experts,), offset=(0,))
            shape = (c.moe.num_experts,)
            yield self._tensor(f"{name}.e_score_correction_bias", shape, [added], is_float32=True)
        into, out = [], []
        experts = layout.experts(self.t)
        for number, e in enumerate(experts):
            expert = f"{canonical}.experts.{e}"
            for i, kind in enumerate(("up", "gate")):
                offset = ((2 * number + i) * f, 0)
                lo, hi = (first, 0), (first + f, h)
                into.append(
                    RankBox(canonical=f"{expert}.{kind}.weight", lo=lo, hi=hi, offset=offset)
                )
            lo, hi, offset = (0, first), (h, first + f), (number * h, 0)
            out.append(RankBox(canonical=f"{expert}.down.weight", lo=lo, hi=hi, offset=offset))
        count = len(experts)
        shape = 2 * f * count, h
        yield self._tensor(f"{name}.fc.weight", shape, into, experts=count, is_linear=True)
        shape = h * count, f
        yield self._tensor(f"{name}.proj.weight", shape, out, experts=count, is_linear=True)
        if c.moe.shared_ffn_hidden_size:
            f, shared = c.moe.shared_ffn_hidden_size // layout.tp, f"{canonical}.shared"
            lines = [(f"{shared}.{n}", self.t * f, (self.t + 1) * f) for n in ("up", "gate")]
            yield from self.column(f"{name}.shared_expert.fc", h, lines)
            width = c.moe.shared_ffn_hidden_size
            yield from self.row(f"{name}.shared_expert.proj", f"{shared}.down", width)

    def vocabulary(self, name: str, canonical: str) -> RankTensor:
        """The rows of some tokens."""
        rows = self.layout.vocab_rows // self.layout.tp
        is_linear = name == HEAD and canonical == "head.weight"
        return self.rows(
            name, canonical, self.config.embedding.vocab_size, rows, is_linear=is_linear
        )

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
        **traits: Unpack[_Traits],
    ) -> RankTensor:
        return RankTensor(rank=self.rank, name=name, shape=shape, boxes=tuple(boxes), **traits)
