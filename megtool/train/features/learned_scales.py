"""Learned scales in a run: amaxes of weights' blocks as parameters, and how a run saves them.

A weight is replaced by the rounded one for the passes of a step, as a function of itself and of its
amaxes: autograd hands the gradients of all of them to the optimizer. An iteration has the rounded
weights with ModelOpt's quantizers, from which `export` makes the same codes and scales; the
optimizer's main parameters are the weights that are trained. Amaxes and their moments are a file of
megtool's own beside them, by canonical modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megtool.errors import CheckpointError, FormatError, LayoutError, MegtoolError, UsageError
from megtool.formats.save_folder import LEARNED_SCALES, folder_name
from megtool.model.attention.mla import DownLinear
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.param_attributes import mark
from megtool.model.moe.experts import ExpertLinear
from megtool.model.stacks.decoder import Decoder
from megtool.optim.segments import StatePiece
from megtool.options.effects import check_excludes
from megtool.quant.algorithms.weight_grid import make_grid
from megtool.quant.fake_quant.learned_scales import (
    BLOCK,
    learned_block_scale,
    learned_gradients,
    round_with_scales,
    scale_passes_gradient,
    smallest_learned_amax,
)
from megtool.quant.fake_quant.rounding_torch import E2M1_LARGEST
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.quant.qparams import QParams
from megtool.quant.recipes.formats import packing_of
from megtool.quant.recipes.learned_scales import LearnedScales
from megtool.quant.recipes.match import Decision
from megtool.train.checkpointing.added_files import SaverWithFiles, find_iteration
from megtool.train.checkpointing.protocol import CheckpointSaver, SaveMetadata
from megtool.train.checkpointing.safetensors_stream import SafetensorsFile, write_safetensors
from megtool.train.features.adapter_gather import WEIGHT
from megtool.train.features.adapter_tensors import all_gather_objects, raise_on_all
from megtool.train.features.frozen_weights import LazyTensors
from megtool.train.options.config import TrainConfig
from megtool.train.options.data_parallel import FULLY_SHARDED

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer
    from megtool.train.checkpointing.quantizer_state import QuantizerState

_FORMAT = 1
_NAME = "weight_amax_"
_TOP = "global_amax"
_LINEAR = ColumnLinear | RowLinear | DownLinear | ExpertLinear


def check_learned_scales(recipe: str, settings: TrainConfig, decisions: Sequence[Decision]) -> None:
    """Refuse what does not go with learned scales.

    Raises:
        LayoutError: tensor-parallel ranks would cut blocks, which ModelOpt's quantizers forbid.
        UsageError: an option, or a format of the recipe.
    """
    if settings.layout.tp > 1 or (settings.layout.etp or 1) > 1:
        raise LayoutError(
            f"--qat {recipe} learns scales of blocks, which ModelOpt's quantizers take as equal on "
            "all tensor-parallel ranks",
            hint="--tp 1; replicas, pipeline stages and expert ranks are taken",
        )
    why = "scales are learned together with weights; with mse or max they follow the weights"
    check_excludes(
        settings,
        f"--qat {recipe}",
        dict.fromkeys(
            (
                *("lora_rank", "freeze", "cuda_graph_impl"),
                *(f"data_parallel_sharding_strategy={name}" for name in FULLY_SHARDED),
                "dist_ckpt_optim_format=dp_reshardable",
            ),
            why,
        ),
    )
    for d in decisions:
        if d.format is None or not d.format.algo:
            continue
        packing, is_mtp = packing_of(d.format), "mtp" in d.module.roles
        if packing != f"nvfp4:{BLOCK}" or not d.format.block_scales or is_mtp:
            raise UsageError(
                f"--qat {recipe} learns the scales of NVFP4 weights, and {d.module.name} is "
                + ("of a layer of multi-token prediction" if is_mtp else d.label),
                hint="keep it with a rule (ModelOpt: `type: static` in block_sizes of weights)",
            )


def learned_bytes_per_block(learned: LearnedScales) -> int:
    """Bytes of a block's amaxes, their gradients and two moments, all in float32."""
    trained = learned.learns_post + (learned.learns_pre and not learned.is_tied)
    return 4 * (1 if learned.is_tied else 2) + 12 * trained


@dataclass(slots=True, eq=False, kw_only=True)
class LearnedLayer:
    """A weight of a stage, `[..., out, in]`, of whose rows `is_learned` says which are rounded.

    `amaxes` are those of its blocks by side, flat: parameters where they are trained. Without a
    pre side both are one. `top` `[..., out, 1]` is the amax of the canonical weight of each row.
    """

    stage: Decoder
    layer: nn.Module
    name: str
    views: WeightViews
    modules: tuple[str, ...]
    is_learned: Tensor
    top: Tensor
    amaxes: dict[str, Tensor]
    rounds_pre: bool
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def weight(self) -> nn.Parameter:
        """The weight that is trained, also while passes see the rounded one."""
        parameter = self.layer._parameters["weight"]
        if parameter is None:
            raise ValueError(f"{self.name} has no weight")
        return parameter

    @property
    def is_expert(self) -> bool:
        """Whether replicas are those of experts."""
        return isinstance(self.layer, ExpertLinear)

    def parameter_name(self, side: str) -> str:
        """The name of an amax in the stage."""
        return f"{self.name.removesuffix('.weight')}.{_NAME}{side}"

    def blocks(self, side: str) -> Tensor:
        """The amaxes of a side, `[..., out, in / 16]`."""
        flat = self.amaxes.get(side, self.amaxes["post"])
        return flat.detach().view(*self.weight.shape[:-1], -1)

    def find_scales(self) -> tuple[Tensor, Tensor]:
        """The scales of both sides."""
        return (
            learned_block_scale(self.blocks("pre"), self.top, rounds=self.rounds_pre),
            learned_block_scale(self.blocks("post"), self.top, rounds=True),
        )

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """The weight as it is stored."""
        weight = self.weight.detach()
        values = round_with_scales(weight, *self.find_scales()).to(weight.dtype)
        return torch.where(self.is_learned, values, weight)

    def spread(self, blocks: Tensor) -> Tensor:
        """Values of blocks, for each element of the weight."""
        return blocks.reshape(*self.weight.shape[:-1], -1).repeat_interleave(BLOCK, -1)

    def read(self, module: str, flat: Tensor) -> Tensor:
        """The values of a canonical module's blocks, `[out, in / 16]`."""
        source = {self.views.parts[module].parameter: self.spread(flat.to(self.weight.device))}
        return self.views.read(module, source)[:, ::BLOCK].contiguous()

    def join(self, tables: Mapping[str, Tensor]) -> Tensor:
        """Flat values of all blocks, from those of canonical modules; zeros elsewhere."""
        out = torch.zeros(self.weight.shape, device=self.weight.device)
        for module in self.modules:
            table = tables[module].to(out).repeat_interleave(BLOCK, -1)
            self.views.write(module, table, {self.views.parts[module].parameter: out})
        return out[..., ::BLOCK].reshape(-1).contiguous()


class _LearnedWeight(torch.autograd.Function):
    """The rounded weight as a function of the weight and its amaxes. It saves nothing, so that the
    passes of all micro batches of a step can go back through it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, pre: Tensor, post: Tensor, layer: LearnedLayer) -> Tensor:
        layer.scales = layer.find_scales()
        ctx.layer = layer
        return layer.rounded()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        layer: LearnedLayer = ctx.layer
        weight = layer.weight.detach()
        scales = layer.scales or layer.find_scales()
        of_weight, of_pre, of_post = learned_gradients(g, weight, *scales)
        of_weight = torch.where(layer.is_learned, of_weight, g.float())
        of_amax = []
        for side, grad, rounds in (("pre", of_pre, layer.rounds_pre), ("post", of_post, True)):
            passes = scale_passes_gradient(layer.blocks(side), layer.top, rounds=rounds)
            grad = torch.where(layer.is_learned & passes, grad / E2M1_LARGEST, 0.0)
            of_amax.append(grad.reshape(-1))
        return of_weight.to(weight.dtype), of_amax[0], of_amax[1], None


class LearnedWeights:
    """The weights with learned scales on this rank's stages, whose amaxes become parameters.

    Raises:
        UsageError: a weight is no linear layer of its own.
    """

    def __init__(
        self, stages: Sequence[Decoder], qparams: QParams, settings: LearnedScales
    ) -> None:
        self.stages, self.settings = stages, settings
        self._groups, self._qparams = stages[0].groups, qparams
        self._tops: dict[str, float] = {}
        self.layers = [x for stage in stages for x in self._add(stage, qparams)]

    @torch.no_grad()
    def _add(self, stage: Decoder, qparams: QParams) -> Iterator[LearnedLayer]:
        views = WeightViews(stage, qparams.weights)
        by_parameter: dict[str, list[str]] = {}
        for module, part in views.parts.items():
            by_parameter.setdefault(part.parameter, []).append(module)
        for name, modules in by_parameter.items():
            layer = stage.get_submodule(name.removesuffix(".weight"))
            weight = stage.get_parameter(name)
            if not isinstance(layer, _LINEAR) or not name.endswith(".weight"):
                raise UsageError(
                    f"the scales of {modules[0]} cannot be learned: it is no linear layer of its "
                    "own here",
                    hint="keep it with a rule",
                )
            rows, tops = torch.zeros(2, *weight.shape, device=weight.device)
            amaxes = {}
            for m in modules:
                q, own = qparams.weights[m], views.read(m).float()
                amax = make_grid(q.format).amax(own)
                if q.amax is not None:
                    amax = torch.from_numpy(np.array(q.amax, np.float32))
                amaxes[m] = amax.cpu()
                self._tops[m] = q.global_amax or float(own.abs().max())
                views.write(m, torch.ones_like(own), {name: rows})
                views.write(m, torch.full_like(own, self._tops[m]), {name: tops})
            learned = LearnedLayer(
                stage=stage,
                layer=layer,
                name=name,
                views=views,
                modules=tuple(modules),
                is_learned=rows[..., :1] > 0,
                top=tops[..., :1].clone(),
                amaxes={},
                rounds_pre=self.settings.rounds_pre,
            )
            flat = learned.join(amaxes)
            sides = {"post": self.settings.learns_post}
            if not self.settings.is_tied:
                sides["pre"] = self.settings.learns_pre
            for side, is_trained in sides.items():
                values: Tensor = flat.clone()
                if is_trained:
                    values = mark(nn.Parameter(values), expert=learned.is_expert)
                    layer.register_parameter(f"{_NAME}{side}", values)
                learned.amaxes[side] = values
            yield learned

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Let passes see the rounded weights."""
        try:
            for x in self.layers:
                pre = x.amaxes.get("pre", x.amaxes["post"])
                seen = _LearnedWeight.apply(x.weight, pre, x.amaxes["post"], x)  # type: ignore[no-untyped-call]
                x.layer.__dict__["weight"] = seen
            yield
        finally:
            for x in self.layers:
                x.layer.__dict__.pop("weight", None)
                x.scales = None

    def rounded_stages(self) -> list[Any]:
        """The stages as savers read them: rounded weights, and no amaxes."""
        return [_RoundedStage(stage, self.layers) for stage in self.stages]

    @torch.no_grad()
    def gather(self, pieces: Iterable[StatePiece]) -> dict[str, Tensor]:
        """All amaxes and their states by canonical modules, on rank 0; empty on others.

        Every rank calls it. Names are `state:module.side`.
        """
        by_name: dict[str, list[tuple[str, int, Tensor]]] = {}
        for p in pieces:
            if p.state != "main":
                values = p.tensor.detach().cpu().float()
                by_name.setdefault(p.parameter, []).append((p.state, p.start, values))
        local: dict[str, Tensor] = {}
        groups = self._groups
        for x in self.layers:
            local |= {f"{_TOP}:{m}": torch.tensor(self._tops[m]) for m in x.modules}
            group = groups.expert_dp if x.is_expert else groups.replicas
            for side, amax in x.amaxes.items():
                pieces_of_ranks = all_gather_objects(by_name.get(x.parameter_name(side), []), group)
                states = {WEIGHT: amax.detach()}
                for state, start, values in (part for parts in pieces_of_ranks for part in parts):
                    into = states.setdefault(state, torch.zeros(amax.numel()))
                    into[start : start + values.numel()] = values
                if group.rank == 0:
                    for state, flat in states.items():
                        for m in x.modules:
                            local[f"{state}:{m}.{side}"] = x.read(m, flat).cpu()
        if groups.world.handle is None:
            return local
        parts: list[Any] | None = [None] * groups.world.size if groups.rank == 0 else None
        dist.gather_object(local, parts, 0, group=groups.world.handle)
        return {k: t for part in parts or () for k, t in part.items()}

    def plan_qparams(self, decisions: Sequence[Decision]) -> QParams:
        """Parameters of the shapes of those that `stored_qparams` gives, without their values."""
        weights = dict(self._qparams.weights)
        for d in decisions:
            if d.module.name in weights:
                out, width = d.module.shape
                amax = np.zeros((out, width // BLOCK), np.float32)
                q = weights[d.module.name]
                weights[d.module.name] = replace(q, amax=amax, codes=None)
        return replace(self._qparams, weights=weights)

    def stored_qparams(self, tables: Mapping[str, Tensor]) -> QParams:
        """The parameters of the rounded weights, of the tables of `gather`."""
        weights = dict(self._qparams.weights)
        for module, q in weights.items():
            top = float(tables[f"{_TOP}:{module}"])
            amax = tables[f"{WEIGHT}:{module}.post"].numpy()
            stored = np.maximum(amax, np.float32(smallest_learned_amax(top)))
            weights[module] = replace(q, amax=stored, global_amax=top, codes=None)
        return replace(self._qparams, weights=weights)

    @torch.no_grad()
    def load(self, checkpoint: Path) -> dict[tuple[str, str], Tensor]:
        """Load the amaxes of an iteration, or of the newest one of a save folder; returns their
        states by state and parameter.

        Raises:
            CheckpointError: it has none, or others.
            FormatError: the file is damaged.
        """
        path = find_iteration(checkpoint, LEARNED_SCALES) / LEARNED_SCALES
        if not path.exists():
            raise CheckpointError(
                "this iteration has no learned scales to resume",
                file=path,
                hint="it is of a run without them: give it as SRC to start a new one",
            )
        file = SafetensorsFile(path)
        try:
            is_known = json.loads(file.metadata["state"])["format"] == _FORMAT
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise FormatError(f"it has no learned scales: {e}", file=path) from e
        if not is_known:
            raise FormatError("its learned scales have another format", file=path)
        states = sorted({name.partition(":")[0] for name in file} - {_TOP})
        out: dict[tuple[str, str], Tensor] = {}
        for x in self.layers:
            self._load_tops(x, file, path)
            for side, amax in x.amaxes.items():
                for state in states:
                    tables = {m: file.get(f"{state}:{m}.{side}") for m in x.modules}
                    if all(t is None for t in tables.values()) and state != WEIGHT:
                        continue
                    self._check(tables, amax, x, path)
                    flat = x.join({m: t for m, t in tables.items() if t is not None})
                    if state == WEIGHT:
                        amax.copy_(flat)
                    out["main" if state == WEIGHT else state, x.parameter_name(side)] = flat
        return out

    def _load_tops(self, layer: LearnedLayer, file: Mapping[str, Tensor], path: Path) -> None:
        """Load the amaxes of whole weights, which are those of the weights that a run began with.

        Raises:
            CheckpointError: one is missing.
        """
        tops = torch.zeros(layer.weight.shape, device=layer.weight.device)
        for module in layer.modules:
            if (top := file.get(f"{_TOP}:{module}")) is None:
                raise CheckpointError("it has no amax of a weight", file=path, tensor=module)
            self._tops[module] = float(top)
            part = layer.views.parts[module]
            layer.views.write(module, top.to(tops).expand(part.shape), {part.parameter: tops})
        layer.top = tops[..., :1].clone()

    def _check(
        self, tables: Mapping[str, Tensor | None], amax: Tensor, layer: LearnedLayer, path: Path
    ) -> None:
        """Check that a layer's modules all have amaxes of their shape.

        Raises:
            CheckpointError: they have not.
        """
        for module, table in tables.items():
            out, width = layer.views.parts[module].shape
            if table is None or tuple(table.shape) != (out, width // BLOCK):
                shape = "none" if table is None else list(table.shape)
                raise CheckpointError(
                    f"the saved amaxes of {module} are {shape} where the run has "
                    f"{[out, width // BLOCK]}",
                    file=path,
                    tensor=module,
                    hint="resume with the recipe that the run was started with",
                )


class _RoundedStage:
    """A stage as a saver reads it."""

    def __init__(self, decoder: Decoder, layers: Sequence[LearnedLayer]) -> None:
        self._decoder = decoder
        self._rounded: dict[str, Callable[[], Tensor]] = {
            x.name: x.rounded for x in layers if x.stage is decoder
        }
        self.groups, self.dtype, self.modules = decoder.groups, decoder.dtype, decoder.modules

    def state_dict(self, *, keep_vars: bool = False) -> Mapping[str, Tensor]:
        """Parameters under the names of a model without amaxes, rounded when they are read."""
        makers: dict[str, Callable[[], Tensor]] = {}
        for name, tensor in self._decoder.state_dict(keep_vars=keep_vars).items():
            if not name.rpartition(".")[2].startswith(_NAME):
                makers[name] = self._rounded.get(name, partial(_same, tensor))
        return LazyTensors(makers)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class LearnedScalesSaver(SaverWithFiles):
    """Saves rounded weights and quantizers with `saver`, and adds amaxes and their states.

    The copy is complete when `save` returns.
    """

    def __init__(
        self,
        saver: CheckpointSaver,
        learned: LearnedWeights,
        quantizers: QuantizerState,
    ) -> None:
        super().__init__(saver)
        self._learned, self._quantizers = learned, quantizers

    def prepare(
        self, stages: Sequence[Decoder], optimizer: Optimizer | None, *, asynchronous: bool = True
    ) -> None:
        """Plan all saves, and take the memory for host copies."""
        self._saver.prepare(self._stages(), optimizer, asynchronous=asynchronous)

    def save(
        self,
        iteration: int,
        stages: Sequence[Decoder],
        optimizer: Optimizer | None,
        metadata: SaveMetadata,
        *,
        asynchronous: bool = False,
        copy_behind: bool = False,
    ) -> float:
        """Save an iteration; see `CheckpointSaver.save`."""
        self._saver.finish()
        if optimizer is not None:
            optimizer.wait_for_parameters()
        tables = self._learned.gather(() if optimizer is None else optimizer.pieces())
        error: MegtoolError | None = None
        files = dict(metadata.files)
        world = self._learned.stages[0].groups.world
        if world.rank == 0:
            spool = self._spool_folder() / f"{folder_name(iteration)}.learned_scales"
            names = sorted(tables)
            facts = [(n, tables[n].dtype, tuple(tables[n].shape)) for n in names]
            try:
                head = {"state": json.dumps({"format": _FORMAT})}
                write_safetensors(self._saver.files, spool, facts, (tables[n] for n in names), head)
                self._quantizers.update(self._learned.stored_qparams(tables))
                files[LEARNED_SCALES] = spool
            except MegtoolError as e:
                error = e
        raise_on_all(error, world)
        return self._saver.save(
            iteration,
            self._stages(),
            optimizer,
            replace(metadata, files=files),
            asynchronous=asynchronous,
        )

    def _stages(self) -> Any:
        return self._learned.rounded_stages()
