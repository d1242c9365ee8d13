"""How Megatron shards its tensors over a layout: boxes, and the rank that writes each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megtool.convert.families.nested import TOWERS
from megtool.convert.megatron.names import is_encoder_decoder, split_state
from megtool.convert.megatron.sections import has_parts, section_rows
from megtool.convert.megatron.tp_dims import REPLICATED, TP_DIMS
from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.parallel.mesh import Mesh
from megtool.parallel.pipeline_split import Pipeline, divisors, near, split_stacks
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.box import Boxes, Ints
from megtool.tensors.sharded import GlobalTensor, Shards, widest

# Other parts of models than their text: every rank of the first stage has them whole, whatever
# their names end with, unless they are made of Megatron's own layers.
_TOWER = re.compile(rf"(?:{'|'.join(TOWERS)})\.(decoder\.layers\.)?")
_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(
    r"\.experts\.(?:experts\.|local_experts\.)?(?:(\d+)\.)?linear_fc[12](?:\.(?:weight|bias)(\d+))?"
)
_FC1 = re.compile(r"(.*linear_)fc1\.(?:weight|bias)(\d*)$")
# An expert's number, and gate (`_w`) and up (`_v`) rows apart, change nothing about the cut.
_SPELLING = re.compile(r"\.(weight|bias)\d*(?:_[wv])?$")
_MTP = re.compile(r"mtp\.layers\.(\d+)\.")
# What has no layer and is not on the first stage, where embeddings are: how its name begins, and
# which place of the pipeline that is. The heads are BERT's.
_PLACES = (
    ("decoder.final_", "norm"),
    ("decoder.hc_head_", "norm"),
    ("encoder.final_", "encoder"),
    ("output_layer.", "last"),
    ("lm_head.", "last"),
    ("binary_head.", "last"),
    ("pooler.", "last"),
    ("score.", "last"),
    ("score_dense.", "last"),
    ("mtp.", "mtp"),
)


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """The sharding of a module key: TP dimension (from the end; 0 for none), leading axes, and
    location.

    `sections` are the rows along the TP dimension of parts that are each cut for itself.
    """

    tp_dim: int
    is_glu: bool
    layer: int
    has_layer_axis: bool
    expert: int
    is_expert: bool
    has_expert_axis: bool
    place: str
    sections: tuple[int, ...] = ()

    def pieces(self, key: str, shape: Sequence[int], ranks: int) -> list[tuple[int, int]]:
        """Where the piece of each rank begins and ends in the TP dimension, for every part.

        Raises:
            LayoutError: the ranks do not divide a part, or it is not known what the parts are.
        """
        parts = self.sections or ((1, 1) if self.is_glu else (1,))
        if has_parts(key) and not self.sections and ranks > 1:
            raise LayoutError(
                "it has several parts, whose sizes only the model's configuration says",
                tensor=key,
                hint="--like HF_FOLDER gives it",
            )
        dim = len(shape) + self.tp_dim
        size = shape[dim]
        if self.sections and size % sum(parts):
            raise LayoutError(
                f"{size} rows are not those of its parts, {list(parts)} by the configuration",
                tensor=key,
            )
        out, start = [], 0
        for part in parts:
            rows = size * part // sum(parts)
            if rows % ranks or size % len(parts) * (not self.sections):
                name = "etp" if self.is_expert else "tp"
                raise _indivisible(
                    name, ranks, f"{rows} of dimension {dim}", divisors(rows), tensor=key
                )
            each = rows // ranks
            out += [(start + k * each, start + (k + 1) * each) for k in range(ranks)]
            start += rows
        return out


def shard(
    tensors: Sequence[GlobalTensor],
    parallel: ParallelConfig,
    *,
    config: ModelConfig | None = None,
    gated: bool | None = None,
) -> Shards:
    """Cut Megatron's tensors (of any state, stacked or per layer) for a layout.

    A shard is one layer's, one expert's and one TP rank's piece; fused gate and up rows are cut in
    halves first, so that a rank has a piece of each. Replicated tensors are TP rank 0's. The shards
    of a model-parallel rank are spread over its data-parallel ranks by bytes. `owner` is a rank of
    the whole grid. Whether the MLP is gated is told by the shapes of fc1 and fc2 where both are
    there, otherwise by `gated`, then `config`.

    Raises:
        LayoutError: an axis does not divide the model; the hint lists sizes that do.
    """
    keys = [split_state(t.name)[2] for t in tensors]
    if config is not None:
        config = with_decoder(config, tensors)
        check_layout(config, parallel)
    fused = Glu(tensors, keys, config.mlp.gated if gated is None and config else gated)
    rules = [rule_of(key, fused(key), config) for key in keys]
    named = list(zip(tensors, rules, keys, strict=True))
    num_layers, num_experts = _counts(tensors, rules)
    if not any(r.tp_dim or r.has_layer_axis or r.layer >= 0 for r in rules):
        _refuse_unknown(tensors, parallel)
    if config is not None:  # a selection of tensors may lack the last layers
        num_layers = max(num_layers, config.num_layers)
    if config is not None and config.num_decoder_layers:
        num_layers, num_decoder_layers = config.num_layers, config.num_decoder_layers
    elif num_decoder_layers := _decoder_layers(tensors):
        num_layers, _ = _counts(
            *zip(*((t, r) for t, r, k in named if k.startswith("encoder.")), strict=True)
        )
    stages = stages_of(keys, num_layers, parallel, num_decoder_layers)
    if num_experts and num_experts % parallel.ep:
        raise _indivisible("ep", parallel.ep, f"{num_experts} experts", divisors(num_experts))
    ndim = widest(tensors)
    parts = [_cut(t, key, rule, parallel, stages, num_experts, ndim) for t, rule, key in named]
    counts = np.array([len(p.tp) for p in parts], np.int64)
    tensor = np.repeat(np.arange(len(tensors), dtype=np.int32), counts)
    boxes = Boxes(_joined([p.lo for p in parts], ndim), _joined([p.hi for p in parts], ndim))
    tp, ep, stage = (
        np.concatenate([getattr(p, f) for p in parts] or [np.zeros(0, np.int64)])
        for f in ("tp", "ep", "stage")
    )
    expert = np.repeat(np.array([r.is_expert for r in rules], bool), counts)
    itemsize = np.array([t.dtype.itemsize for t in tensors], np.int64)
    owner = _owners(parallel, boxes.volume() * itemsize[tensor], expert, tp, ep, stage)
    return Shards(tensor, boxes, owner.astype(np.int32))


def check_layout(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that a layout divides the model.

    Attention heads and MLP rows have to be multiples of TP. KV heads have to be a multiple of TP,
    or TP of KV heads: then the rows of a query group are cut between ranks.

    Raises:
        LayoutError: naming the axis, what it does not divide, and the sizes that work.
    """
    moe = config.moe
    tp = parallel.tp
    fits = [n for n in divisors(config.attention.num_heads) if not _tp_fault(config, n)]
    if fault := _tp_fault(config, tp):
        raise _indivisible("tp", tp, fault, fits)
    if moe.num_experts:
        if moe.num_experts % parallel.ep:
            num_divisors = divisors(moe.num_experts)
            raise _indivisible("ep", parallel.ep, f"num_experts={moe.num_experts}", num_divisors)
        if moe.moe_ffn_hidden_size % parallel.etp:
            quantity = f"moe_ffn_hidden_size={moe.moe_ffn_hidden_size}"
            raise _indivisible("etp", parallel.etp, quantity, divisors(moe.moe_ffn_hidden_size))
    elif parallel.ep > 1:
        raise LayoutError(f"ep={parallel.ep}, but the model has no experts", hint="omit --ep")
    if config.num_decoder_layers:
        split_stacks(parallel, config.num_layers, config.num_decoder_layers)
        return
    check_one_stack(parallel)
    Pipeline.of(parallel).sizes(config.num_layers)


def with_decoder(config: ModelConfig, tensors: Sequence[GlobalTensor]) -> ModelConfig:
    """The configuration, with the number of a decoder's layers where only the names of tensors say
    that there is a decoder beside an encoder, as those of Megatron's own T5 do."""
    if config.num_decoder_layers or not (number := _decoder_layers(tensors)):
        return config
    return config.with_fields(num_decoder_layers=number)


def _decoder_layers(tensors: Sequence[GlobalTensor]) -> int:
    """How many layers the decoder has that attends to an encoder; 0 where there is none."""
    keys = [split_state(t.name)[2] for t in tensors]
    if not is_encoder_decoder(keys):
        return 0
    own = [
        (t, rule_of(k, False))
        for t, k in zip(tensors, keys, strict=True)
        if k.startswith("decoder.")
    ]
    return _counts([t for t, _ in own], [rule for _, rule in own])[0]


def check_one_stack(parallel: ParallelConfig) -> None:
    """Refuse stages of an encoder for a model that has none beside a decoder.

    Raises:
        LayoutError: there are some.
    """
    if parallel.encoder_pp:
        raise LayoutError(
            f"encoder_pp is {parallel.encoder_pp}, and the model is not an encoder and a decoder",
            hint="omit --encoder-pp",
        )


def layers_of_stage(
    config: ModelConfig, parallel: ParallelConfig, stage: int, chunk: int = 0
) -> range:
    """The layers of a chunk of a stage, which are an encoder's or its decoder's.

    Where one stage has both, as many as the larger one has. Raises: see `Pipeline.sizes`.
    """
    if not config.num_decoder_layers:
        return Pipeline.of(parallel).layers_of(config.num_layers, stage, chunk)
    encoder, decoder = split_stacks(parallel, config.num_layers, config.num_decoder_layers)
    return max(encoder[stage], decoder[stage], key=len)


_MIXER_HEADS = (
    ("mamba_num_heads", layer_sets.mamba_layers),
    ("mamba_num_groups", layer_sets.mamba_layers),
    ("linear_num_key_heads", layer_sets.delta_layers),
    ("linear_num_value_heads", layer_sets.delta_layers),
    ("linear_num_value_heads", layer_sets.kda_layers),
)


def _tp_fault(config: ModelConfig, tp: int) -> str | None:
    """The first size that TP does not divide, if any, of all layers."""
    if not config.layer_sizes:
        return _layer_fault(config, tp)
    for layer in range(config.num_layers):
        if fault := _layer_fault(config.at_layer(layer), tp):
            return f"{fault} of layer {layer}"
    return None


def _layer_fault(config: ModelConfig, tp: int) -> str | None:
    attention = config.attention
    for name, layers in _MIXER_HEADS:
        if layers(config) and (heads := config.get(name)) % tp:
            return f"{name}={heads}"
    if layer_sets.conv_layers(config) and config.hidden_size % tp:
        return f"hidden_size={config.hidden_size}"
    if attention.num_heads % tp:
        return f"num_heads={attention.num_heads}"
    if config.compression.is_compressed and config.compression.out_groups % tp:
        return f"out_groups={config.compression.out_groups}"
    # Every head has its own rows of keys and values, or there is one head on all ranks.
    latent = bool(config.latent.kv_lora_rank) or config.compression.is_compressed
    if not latent and attention.num_kv_heads % tp and tp % attention.num_kv_heads:
        return f"num_kv_heads={attention.num_kv_heads} (nor is it a multiple of them)"
    heads = attention.num_heads * (1 + attention.attn_output_gate) + attention.num_kv_heads
    rows = heads * attention.head_dim + attention.num_kv_heads * attention.value_size
    if not latent and rows % tp:
        return f"{rows} fused query, key and value rows"
    if layer_sets.dense_layers(config) and config.mlp.ffn_hidden_size % tp:
        return f"ffn_hidden_size={config.mlp.ffn_hidden_size}"
    if config.moe.shared_ffn_hidden_size % tp:
        return f"shared_ffn_hidden_size={config.moe.shared_ffn_hidden_size}"
    return None


@dataclass(frozen=True, slots=True)
class _Cut:
    """One tensor's shards: boxes, and where each sits on the model-parallel axes."""

    lo: Ints
    hi: Ints
    tp: Ints
    ep: Ints
    stage: Ints


def _cut(
    t: GlobalTensor,
    key: str,
    rule: ShardingRule,
    parallel: ParallelConfig,
    stages: Stages,
    num_experts: int,
    ndim: int,
) -> _Cut:
    """Cut one tensor into a grid; columns are padded to `ndim` dimensions."""
    tp = parallel.etp if rule.is_expert else parallel.tp
    grid = [1] * len(t.shape)
    lead = int(rule.has_layer_axis)
    if rule.has_layer_axis:
        grid[0] = t.shape[0]
    if rule.has_expert_axis:
        grid[lead] = t.shape[lead]
    tp_at = len(t.shape) + rule.tp_dim if rule.tp_dim else -1
    ranges: dict[int, Ints] = {}
    if tp_at >= 0:
        ranges[tp_at] = np.array(rule.pieces(t.name, t.shape, tp), np.int64)
        grid[tp_at] = len(ranges[tp_at])
    coordinates = (
        np.indices(grid, dtype=np.int64).reshape(len(grid), -1) if grid else np.zeros((0, 1))
    )
    n = coordinates.shape[1]
    lo, hi = np.zeros((n, ndim), np.int64), np.ones((n, ndim), np.int64)
    for d, (size, pieces) in enumerate(zip(t.shape, grid, strict=True)):
        if d in ranges:
            lo[:, d], hi[:, d] = ranges[d][coordinates[d]].T
            continue
        lo[:, d] = coordinates[d] * (size // pieces)
        hi[:, d] = lo[:, d] + size // pieces
    zeros = np.zeros(n, np.int64)
    if rule.has_layer_axis:
        stage = stages.of_layers(key)[coordinates[0]]
    elif rule.layer >= 0:
        stage = zeros + stages.of_layers(key)[rule.layer]
    else:
        stage = zeros + stages.of_place[rule.place]
    ep = zeros
    if rule.is_expert:
        expert_ids = coordinates[lead] if rule.has_expert_axis else zeros + rule.expert
        ep = expert_ids // max(num_experts // parallel.ep, 1)
    return _Cut(lo, hi, coordinates[tp_at] % tp if tp_at >= 0 else zeros, ep, stage)


def _owners(
    parallel: ParallelConfig, size: Ints, expert: NDArray[np.bool_], tp: Ints, ep: Ints, stage: Ints
) -> Ints:
    """The rank of every shard: its model-parallel place, and a data-parallel one by bytes.

    The shards of one place, in order, are cut into runs of near-equal bytes, one per replica.
    """
    mesh = Mesh(parallel)
    copies = np.where(expert, parallel.expert_dp, parallel.dp * parallel.cp)
    place = ((stage * parallel.ep + ep) * max(parallel.tp, parallel.etp) + tp) * 2 + expert
    order = np.argsort(place, kind="stable")
    ordered = place[order]
    ends = np.cumsum(size[order])
    starts = ends - size[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1)) if len(ordered) else ordered
    group = np.cumsum(np.diff(ordered, prepend=-1) != 0) - 1
    last = np.append(first[1:], len(ordered))[: len(first)] - 1
    total = np.maximum(ends[last] - starts[first], 1)[group]
    middle = starts - starts[first][group] + size[order] // 2
    replica = np.empty(len(order), np.int64)
    replica[order] = np.minimum(middle * copies[order] // total, copies[order] - 1)
    dp, cp = np.divmod(replica, parallel.cp)
    dense = mesh.rank(tp=tp, cp=cp, dp=dp, pp=stage)
    return np.where(expert, mesh.expert_rank(etp=tp, ep=ep, edp=replica, pp=stage), dense)


class Glu:
    """Whether an fc1 has gate and up rows: twice as many rows as its fc2 has columns."""

    def __init__(
        self, tensors: Sequence[GlobalTensor], keys: Sequence[str], gated: bool | None
    ) -> None:
        self.gated = gated
        self.shapes: Mapping[str, tuple[int, ...]] = {
            k: t.shape for k, t in zip(keys, tensors, strict=True) if ".linear_fc" in k
        }

    def __call__(self, key: str) -> bool:
        """The fc1 called `key` is fused."""
        match = _FC1.fullmatch(key)
        if match is None:
            return False
        rows = self.shapes.get(f"{match[1]}fc1.weight{match[2]}", ())
        columns = self.shapes.get(f"{match[1]}fc2.weight{match[2]}", ())
        if len(rows) > 1 and columns:
            return rows[-2] == 2 * columns[-1]
        return bool(self.gated)


def rule_of(key: str, is_glu: bool, config: ModelConfig | None = None) -> ShardingRule:
    """The sharding rule of a module key (stacked or per layer); shapes decide `is_glu`.

    Parts of tensors that have several are known from the configuration.
    """
    if is_tower(key):
        return ShardingRule(0, False, -1, False, -1, False, False, "first")
    match = _LAYER.fullmatch(key)
    expert = _EXPERT.search(key)
    number = (expert[1] or expert[2]) if expert else None
    return ShardingRule(
        tp_dim=_tp_dim(_suffix(key)),
        is_glu=is_glu,
        layer=int(match[1]) if match and match[1] else -1,
        has_layer_axis=bool(match and not match[1]),
        expert=int(number) if number else -1,
        is_expert=expert is not None,
        has_expert_axis=expert is not None and number is None,
        place=next((place for begin, place in _PLACES if key.startswith(begin)), "first"),
        sections=section_rows(key, config) if config else (),
    )


def is_known(key: str) -> bool:
    """Whether Megatron's modules have a tensor of this name, so that it is known how it is cut."""
    if is_tower(key):
        return True
    suffix = _suffix(key)
    return bool(_tp_dim(suffix) or REPLICATED.search(suffix))


def is_tower(key: str) -> bool:
    """Whether a tensor belongs to another part of a model than its text, and is whole on ranks."""
    match = _TOWER.match(key)
    return match is not None and match[1] is None


def is_beside_text(key: str) -> bool:
    """Whether a tensor belongs to another part of a model than its text, whole on ranks or cut."""
    return _TOWER.match(key) is not None


def _suffix(key: str) -> str:
    match = _LAYER.fullmatch(key)
    return _SPELLING.sub(r".\1", match[2] if match else key)


@cache
def _tp_dim(suffix: str) -> int:
    return next((dim for end, dim in TP_DIMS if f".{suffix}".endswith(f".{end}")), 0)


def _counts(tensors: Sequence[GlobalTensor], rules: Sequence[ShardingRule]) -> tuple[int, int]:
    """Number of layers and of experts, from axes and indices."""
    layers = experts = 0
    for t, r in zip(tensors, rules, strict=True):
        layers = max(layers, t.shape[0] if r.has_layer_axis else r.layer + 1)
        if r.is_expert:
            dim = int(r.has_layer_axis)
            experts = max(experts, t.shape[dim] if r.has_expert_axis else r.expert + 1)
    return layers, experts


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stage of each part of the model.

    The stage of every layer, int64 `[num_layers]`, and by name those of the places outside of
    layers (`ShardingRule.place`), with the virtual chunk of each. In a model of an encoder and a
    decoder `of_layer` are the decoder's, and `of_encoder` the encoder's.
    """

    of_layer: Ints
    of_place: Mapping[str, int]
    chunk_of_place: Mapping[str, int]
    of_encoder: Ints | None = None

    def of_layers(self, key: str) -> Ints:
        """The stage of every layer of the stack that a key is of."""
        if self.of_encoder is not None and key.startswith("encoder."):
            return self.of_encoder
        return self.of_layer


def stages_of(
    keys: Sequence[str], num_layers: int, parallel: ParallelConfig, num_decoder_layers: int = 0
) -> Stages:
    """The stages of a model's layers, and of the places outside of them.

    Raises:
        LayoutError: the pipeline does not take so many layers.
    """
    if num_decoder_layers:
        return _stages_of_stacks(num_layers, parallel, num_decoder_layers)
    check_one_stack(parallel)
    pipeline = Pipeline.of(parallel)
    has_mtp = any(key.startswith("mtp.") for key in keys)
    num_mtp = len({m[1] for key in keys if (m := _MTP.match(key))})
    if pipeline.layout is not None and num_layers and num_mtp != pipeline.num_mtp:
        raise LayoutError(
            f"pipeline_layout has {pipeline.num_mtp} layers of multi-token prediction (m), "
            f"and the model {num_mtp}",
            hint="one m for each of them, all in one chunk after the last t",
        )
    layers = pipeline.stage_of_layer(num_layers) if num_layers else np.zeros(0, np.int64)
    homes = {
        "first": pipeline.embedding,
        "norm": pipeline.norm(num_layers, has_mtp=has_mtp),
        "mtp": pipeline.mtp,
        "last": pipeline.loss,
        "encoder": pipeline.loss,
    }
    stages = {place: stage for place, (stage, _) in homes.items()}
    return Stages(layers, stages, {place: chunk for place, (_, chunk) in homes.items()})


def _stages_of_stacks(num_layers: int, parallel: ParallelConfig, num_decoder_layers: int) -> Stages:
    """As `stages_of`, of an encoder's layers and its decoder's."""
    stacks = split_stacks(parallel, num_layers, num_decoder_layers)
    of_encoder, of_layer = (
        np.repeat(np.arange(len(stack)), [len(layers) for layers in stack]) for stack in stacks
    )
    places = {place: parallel.pp - 1 for place in ("norm", "mtp", "last")}
    places |= {"first": 0, "encoder": max(parallel.encoder_pp, 1) - 1}
    return Stages(of_layer, places, dict.fromkeys(places, 0), of_encoder)


def _refuse_unknown(tensors: Sequence[GlobalTensor], parallel: ParallelConfig) -> None:
    """Refuse names that cannot be sharded, because their layer and TP dimension are unknown."""
    if parallel.tp * parallel.pp * parallel.ep > 1 and tensors:
        raise LayoutError(
            f"tp={parallel.tp}, pp={parallel.pp}, ep={parallel.ep} need Megatron's names, "
            f"and {tensors[0].name!r} is none",
            tensor=tensors[0].name,
            hint="write another format, or omit the parallel sizes",
        )


def _indivisible(
    axis: str, size: int, quantity: str, fits: Sequence[int], *, tensor: str | None = None
) -> LayoutError:
    return LayoutError(
        f"{axis}={size} does not divide {quantity}",
        tensor=tensor,
        hint=f"sizes that do: {near(fits, size)}",
    )


def _joined(parts: Sequence[Ints], ndim: int) -> Ints:
    return np.concatenate(parts) if parts else np.zeros((0, ndim), np.int64)
