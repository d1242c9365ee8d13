"""The parameters of each model-parallel rank, as boxes of the model's tensors.

Two things on disk follow ranks instead of tensors: the distributed optimizer's buckets and the
legacy `mp_rank_*` folders. Both are read and written through this one list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megtool.convert.megatron.moe import INDEXER
from megtool.convert.megatron.names import EMBEDDING, OUTPUT, split_state
from megtool.convert.megatron.sections import joined
from megtool.convert.megatron.sharding import (
    Glu,
    ShardingRule,
    Stages,
    check_layout,
    is_beside_text,
    rule_of,
    stages_of,
    with_decoder,
)
from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.parallel.pipeline_split import Pipeline
from megtool.spec.model_config import ModelConfig
from megtool.tensors.box import numel
from megtool.tensors.sharded import GlobalTensor

# What the encoder's first stage has of an embedding, the decoder's has too; what all stages have.
_EMBEDDINGS, EVERYWHERE = "embedding.", re.compile(r"(?:encoder|decoder)_relative_pos_emb\.")

_SECOND_NAMES = {
    "embedding.position_embeddings.weight": "position_embeddings.weight",
    "lm_head.output_layer.weight": "output_layer.weight",
    "lm_head.output_layer.bias": "output_layer.bias",
}
"""Modules of Megatron's T5Model that have two names; the last of them names optimizer state."""

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, order=True)
class RankPlace:
    """A model-parallel rank's model chunk: pipeline stage, virtual chunk, expert and tensor rank.

    For the parameters that all ranks of an expert group share, `ep` is 0.
    """

    stage: int
    chunk: int
    ep: int
    tp: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of one rank.

    `key` is the global name with the layer's number, `shape` that tensor's shape (experts on a
    leading axis), `expert` which expert it belongs to. The rank's elements, in row-major order, are
    those of `boxes` one after the other. `registered_as` is the key its module goes by on this
    rank, which is another for the last stage's copy of a tied embedding. `is_shared`: Megatron
    keeps it equal to those of other ranks, and gives it a bucket of its own. `is_unused`: Megatron
    makes it and computes with another, so its values say nothing about the model.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    is_expert: bool = False
    expert: int = 0
    is_shared: bool = False
    registered_as: str = ""
    is_unused: bool = False

    @property
    def numel(self) -> int:
        """Number of elements on this rank."""
        return sum(numel([h - x for x, h in zip(lo, hi, strict=True)]) for lo, hi in self.boxes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's tensor, without the expert axis."""
        shapes = [
            [h - x for x, h in zip(lo, hi, strict=True)][int(self.is_expert) :]
            for lo, hi in self.boxes
        ]
        if not shapes[0]:
            return ()
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def module_key(self) -> str:
        """The global key its module goes by on this rank."""
        return self.registered_as or self.key


@dataclass(frozen=True, slots=True)
class Home:
    """A stage and chunk that has a tensor, as `Parameter` says it."""

    stage: int
    chunk: int
    registered_as: str = ""
    is_shared: bool = False
    is_unused: bool = False


@dataclass(frozen=True, slots=True)
class Homes:
    """Which stages and chunks hold a tensor; `chunks` of layers, none where there is one only."""

    stages: Stages
    chunks: Sequence[int]
    parallel: ParallelConfig
    tied: bool
    has_mtp: bool

    def of(self, key: str, layer: int, rule: ShardingRule) -> list[Home]:
        """Every stage and chunk that has a tensor, and the key of its module there.

        Source: megatron-core 0.16.1, `models/gpt/gpt_model.py` and
        `models/common/language_module/language_module.py`; tests compare the keys of real models.
        """
        if layer >= 0:
            chunk = self.chunks[layer] if self.chunks else 0
            return [Home(int(self.stages.of_layers(key)[layer]), chunk)]
        stage, second = self.stages.of_place[rule.place], self.parallel.encoder_pp
        if second and EVERYWHERE.match(key):
            return [Home(n, 0, is_shared=True) for n in range(self.parallel.pp)]
        if second and key.startswith(_EMBEDDINGS):
            is_words = key == EMBEDDING
            ends = [Home(n, 0, is_shared=is_words) for n in (0, second)]
            if self.tied and is_words and second < self.parallel.pp - 1:
                ends.append(Home(self.parallel.pp - 1, 0, OUTPUT, is_shared=True))
            return ends
        if rule.place != "first" or not key.startswith(_EMBEDDINGS) or self.parallel.pp == 1:
            return [Home(stage, self.stages.chunk_of_place[rule.place])]
        return self._of_embedding(is_words=key == EMBEDDING)

    def _of_embedding(self, *, is_words: bool) -> list[Home]:
        """Chunks of several stages with an embedding: the first, and that of MTP.

        The last one has an output layer even if embeddings are tied, which Megatron leaves unused
        where that chunk has the embedding as well.
        """
        places = {
            place: (self.stages.of_place[place], self.stages.chunk_of_place[place])
            for place in ("first", "mtp", "last")
        }
        first, mtp, last = places.values()
        is_shared = is_words and (self.tied or self.has_mtp)
        homes = [Home(*first, is_shared=is_shared)]
        if self.has_mtp and mtp != first:
            homes.append(Home(*mtp, is_shared=is_shared))
        if self.tied and is_words:
            is_unused = self.has_mtp and mtp == last
            homes.append(Home(*last, OUTPUT, is_shared=not is_unused, is_unused=is_unused))
        return homes


def each_once(weights: Sequence[GlobalTensor]) -> list[GlobalTensor]:
    """The weights whose parameters an optimizer has: a module with two names is stored twice."""
    names = {t.name for t in weights}
    return [t for t in weights if _SECOND_NAMES.get(t.name) not in names]


def rank_parameters(
    tensors: Sequence[GlobalTensor],
    config: ModelConfig,
    parallel: ParallelConfig,
) -> dict[RankPlace, list[Parameter]]:
    """Every rank's parameters, of the model's weights under Megatron's names (stacked or not).

    Experts have places of their own (`ep`, and `tp` the rank among `etp`), apart from the dense
    parameters' (`ep` 0): the caller joins them as its format does. The order within a place is
    that of `tensors`. Parts of a tensor that have names of their own are one parameter.

    Raises:
        LayoutError: the layout does not divide the model, or a tensor is of another model.
    """
    config = with_decoder(config, tensors)
    check_layout(config, parallel)
    tensors = joined(tensors)
    keys = [split_state(t.name)[2] for t in tensors]
    glu = Glu(tensors, keys, config.mlp.gated)
    pipeline = Pipeline.of(parallel)
    second = config.num_decoder_layers
    homes = Homes(
        stages_of(keys, config.num_layers, parallel, second),
        [] if second else pipeline.chunk_of_layer(config.num_layers).tolist(),
        parallel,
        config.embedding.tied_embeddings,
        any(key.startswith("mtp.") for key in keys),
    )
    out: dict[RankPlace, list[Parameter]] = {}
    for t, key in zip(tensors, keys, strict=True):
        rule = rule_of(key, glu(key), config)
        _check_size(t, rule, config)
        for place, parameter in _cut(t, key, rule, config, parallel, homes):
            out.setdefault(place, []).append(parameter)
    return out


def of_tensor_rank(
    ranks: Mapping[RankPlace, Sequence[Parameter]],
    parallel: ParallelConfig,
    stage: int,
    chunk: int,
    tp: int,
) -> list[Parameter]:
    """A tensor rank's parameters including its experts, as they are with `ep` 1.

    Tensor ranks of experts repeat among those of the dense parameters where they are fewer.
    """
    dense = [p for p in ranks.get(RankPlace(stage, chunk, 0, tp), ()) if not p.is_expert]
    place = RankPlace(stage, chunk, 0, tp % parallel.etp)
    return dense + [p for p in ranks.get(place, ()) if p.is_expert]


def in_buffer(parameters: Sequence[Parameter], num_elements: int) -> list[Parameter]:
    """Those of a rank's parameters that a flat buffer of so many elements has.

    Parts of a model that are not text, and indexers, have no place in it where they were frozen.
    """
    if sum(p.numel for p in parameters) <= num_elements:
        return list(parameters)
    return [p for p in parameters if not (is_beside_text(p.key) or INDEXER in p.key)]


def _check_size(t: GlobalTensor, rule: ShardingRule, config: ModelConfig) -> None:
    """The model has the layers and the experts of a tensor.

    Raises:
        LayoutError: it does not.
    """
    layers = t.shape[0] if rule.has_layer_axis else rule.layer + 1
    is_second = config.num_decoder_layers and t.name.startswith("decoder.")
    field = "num_decoder_layers" if is_second else "num_layers"
    if layers > (num_layers := config.get(field)):
        raise LayoutError(f"there is a layer {layers - 1}, but {field}={num_layers}", tensor=t.name)
    if not rule.is_expert:
        return
    experts = t.shape[rule.has_layer_axis] if rule.has_expert_axis else rule.expert + 1
    if experts > config.moe.num_experts:
        raise LayoutError(
            f"there is an expert {experts - 1}, but num_experts={config.moe.num_experts}",
            tensor=t.name,
        )


def _cut(
    t: GlobalTensor,
    key: str,
    rule: ShardingRule,
    config: ModelConfig,
    parallel: ParallelConfig,
    homes: Homes,
) -> Iterator[tuple[RankPlace, Parameter]]:
    """A tensor's parameters: layer by layer, expert by expert, and for every tensor rank."""
    shape = t.shape[1:] if rule.has_layer_axis else t.shape
    ranks = parallel.etp if rule.is_expert else parallel.tp
    pieces = [boxes_of_rank(t.name, shape, rule, ranks, rank) for rank in range(ranks)]
    experts = range(shape[0]) if rule.has_expert_axis else (rule.expert,)
    for layer in range(t.shape[0]) if rule.has_layer_axis else (rule.layer,):
        name = _layer_key(key, layer) if rule.has_layer_axis else key
        places = homes.of(key, layer, rule)
        for expert in experts if rule.is_expert else (0,):
            ep = expert * parallel.ep // config.moe.num_experts if rule.is_expert else 0
            for rank in range(ranks):
                boxes = pieces[rank]
                if rule.has_expert_axis:
                    boxes = tuple(((expert, *lo[1:]), (expert + 1, *hi[1:])) for lo, hi in boxes)
                for home in places:
                    yield (
                        RankPlace(home.stage, home.chunk, ep, rank),
                        Parameter(
                            key=name,
                            shape=shape,
                            dtype=t.dtype.name,
                            boxes=boxes,
                            is_expert=rule.is_expert,
                            expert=max(expert, 0),
                            is_shared=home.is_shared,
                            registered_as=home.registered_as,
                            is_unused=home.is_unused,
                        ),
                    )


def boxes_of_rank(
    name: str, shape: tuple[int, ...], rule: ShardingRule, ranks: int, rank: int
) -> tuple[Box, ...]:
    """The part of a tensor of `shape` (without a layer axis) on one of several tensor ranks.

    One box, or one of each of its parts: gate and up rows, for example.

    Raises:
        LayoutError: the ranks do not divide it.
    """
    zeros = (0,) * len(shape)
    if not rule.tp_dim or ranks == 1:
        return ((zeros, shape),)
    dim = len(shape) + rule.tp_dim
    out = []
    for start, stop in rule.pieces(name, shape, ranks)[rank::ranks]:
        lo, hi = list(zeros), list(shape)
        lo[dim], hi[dim] = start, stop
        out.append((tuple(lo), tuple(hi)))
    return tuple(out)


def _layer_key(key: str, layer: int) -> str:
    """A stacked key with the layer's number put in."""
    head, _, tail = key.partition(".layers.")
    return f"{head}.layers.{layer}.{tail}"
