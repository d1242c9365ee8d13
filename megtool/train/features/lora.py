"""LoRA training: adapters, saved in PEFT's format next to merged weights, and restored.

An iteration of a LoRA run is a checkpoint of the merged model. Its folder `adapter/` holds the
adapter in PEFT's format, and the optimizer's state in a file of megtool's own.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megtool.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from megtool.checkpoint.formats.save_folder import folder_name
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.storage.location import is_remote, location
from megtool.convert.families import Family
from megtool.errors import CheckpointError, FormatError, MegtoolError, UsageError
from megtool.model.decoder import Decoder
from megtool.model.lora import (
    LoraSettings,
    adapters_of,
    add_adapters,
    check_experts,
    layers_for,
    merged_weight,
)
from megtool.model.param_attributes import is_marked
from megtool.model.pipeline import build_stages
from megtool.model.unpacked_forward import made_weights
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import ProcessGroups
from megtool.reshard.source import CheckpointSource
from megtool.tensors.dtensor_shards import is_sharded, local_shard, shard_box
from megtool.train.checkpointing.megatron_common_state import to_plain_tree
from megtool.train.checkpointing.protocol import CheckpointSaver, SaveMetadata, TrainState
from megtool.train.checkpointing.retention import find_newest_iteration
from megtool.train.checkpointing.safetensors_stream import SafetensorsFile, write_safetensors
from megtool.train.checkpointing.staged_iteration import STAGING
from megtool.train.config import TrainConfig
from megtool.train.features.adapter_gather import WEIGHT, AdapterGather
from megtool.train.features.adapter_tensors import AdapterViews, all_gather_objects
from megtool.train.features.peft_format import PeftFormat
from megtool.train.features.protocol import FeatureInputs, TrainingFeature

if TYPE_CHECKING:
    from typing import Self

    from megtool.optim.optimizer import Optimizer

FOLDER = "adapter"
STATE_FILE = "training_state.safetensors"
_FORMAT = 2
_DTYPE_FLAGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_FINGERPRINT_TOLERANCE = 1e-11
"""Fingerprints of the same weights differ by less than this share of the sum of magnitudes: sums
depend on their order."""
_CHUNK = 1 << 24
"""Elements of a weight that are in memory as float64 at a time."""


class LoraFeature(TrainingFeature):
    """The adapters on this rank's stages, whose own weights are frozen.

    `base` is the path of the model that the adapters belong to.

    Raises:
        UsageError: the model has no layers of a role.
        MappingError: its family has no place for the adapters.
    """

    saves_optimizer = False

    def __init__(
        self, stages: Sequence[Decoder], settings: LoraSettings, family: Family, base: str
    ) -> None:
        self.stages, self.settings, self.base = stages, settings, base
        self.config = stages[0].config
        self.num_elements = add_adapters(stages, settings)
        self.views = AdapterViews(stages)
        self._family = family
        self._fingerprint = fingerprint_frozen_weights(stages)
        PeftFormat(self.config, family, [n for s in stages for n, *_ in adapters_of(s)])

    @classmethod
    def check(cls, settings: TrainConfig, source: CheckpointSource) -> None:
        """Check that the model can have the adapters.

        Raises:
            UsageError: its family is not known, or its experts cannot have such adapters.
            MappingError: its family has no place for them in PEFT's format.
        """
        if (lora := make_lora_settings(settings)) is None:
            return
        config = source.config
        check_experts(config, lora)
        family = _require_family(source)
        stages = build_stages(replace(config, num_mtp_layers=0), ProcessGroups.alone("meta"))
        PeftFormat(config, family, [name for s in stages for name, _ in layers_for(s, lora)])

    @classmethod
    def add_parameters(cls, settings: TrainConfig, stages: Sequence[Decoder]) -> None:
        """Add the adapters."""
        if (lora := make_lora_settings(settings)) is not None:
            add_adapters(stages, lora)

    @classmethod
    def freezes_model(cls, settings: TrainConfig) -> bool:
        """Adapters alone are trained."""
        return settings.lora_rank is not None

    @classmethod
    def identity(cls, settings: TrainConfig) -> Mapping[str, Any]:
        """Rank, layers and scale of the adapters."""
        lora = make_lora_settings(settings)
        return {
            "lora_rank": settings.lora_rank,
            "lora_target": None if lora is None else sorted(lora.roles),
            "lora_alpha": None if lora is None else lora.alpha,
        }

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Add the adapters, and freeze the model.

        Raises:
            UsageError: the model's family is not known.
        """
        if (lora := make_lora_settings(settings)) is None:
            return None
        family = _require_family(inputs.source)
        return cls(stages, lora, family, "" if inputs.source is None else str(inputs.source.path))

    @property
    def _dtype(self) -> str:
        return str(self.stages[0].dtype).removeprefix("torch.")

    def merged_stages(self) -> list[MergedStage]:
        """The stages with adapters merged into their weights."""
        return [MergedStage(decoder) for decoder in self.stages]

    def files(
        self, optimizer: Optimizer | None, state: TrainState, spool: Path, files: Files
    ) -> dict[str, bytes | Path]:
        """The adapter's files on rank 0, by their path in an iteration's folder.

        No rank has the whole state of the optimizer: it is written to the file `spool` one matrix
        at a time. The saver takes this file away, and the one with `.peft` added to its name.

        Raises:
            StorageError: it cannot be written.
        """
        facts: dict[str, Any] = {"format": _FORMAT, "base": self._fingerprint, "dtype": self._dtype}
        facts["optimizer"] = None
        if optimizer is not None:
            facts["optimizer"] = to_plain_tree(optimizer.small_state(), _single)
        facts |= {
            "iteration": state.iteration,
            "consumed_samples": state.consumed_samples,
            "num_steps": state.num_steps,
        }
        gathering = AdapterGather(self.views, () if optimizer is None else optimizer.pieces())
        weights: dict[str, Tensor] = {}
        matrices = self._iterate_matrices(gathering, weights)
        error: MegtoolError | None = None
        out: dict[str, bytes | Path] = {}
        groups = self.stages[0].groups
        if groups.rank == 0:
            specs = [(m.key, m.dtype, m.shape) for m in gathering.matrices]
            try:
                write_safetensors(files, spool, specs, matrices, {"state": json.dumps(facts)})
                out = self._peft_files(weights, spool.with_name(f"{spool.name}.peft"), files)
                out[f"{FOLDER}/{STATE_FILE}"] = spool
            except MegtoolError as e:
                error = e
        for _ in matrices:  # of other ranks, which must not wait if one fails
            pass
        for rank_error in all_gather_objects(error, groups.world):
            if rank_error is not None:
                raise rank_error
        return out

    def _peft_files(
        self, weights: Mapping[str, Tensor], spool: Path, files: Files
    ) -> dict[str, bytes | Path]:
        """The adapter in PEFT's format, its tensors in the file `spool`."""
        linears = {n.rpartition(".")[0] for n in weights if n.startswith("decoder.")}
        form = PeftFormat(self.config, self._family, sorted(linears))
        adapter = form.convert(weights, self.settings, self.base)
        tensors = adapter.tensors
        names = sorted(tensors)
        specs = [(n, tensors[n].dtype, tuple(tensors[n].shape)) for n in names]
        write_safetensors(files, spool, specs, (tensors[n] for n in names), {"format": "pt"})
        return {
            f"{FOLDER}/{WEIGHTS_FILE}": spool,
            f"{FOLDER}/{CONFIG_FILE}": adapter.config_file,
        }

    def _iterate_matrices(
        self, gathering: AdapterGather, weights: dict[str, Tensor]
    ) -> Iterator[Tensor]:
        """The matrices that rank 0 receives; the adapter's own are added to `weights`."""
        for matrix, full in gathering:
            if full is not None:
                if matrix.state == WEIGHT:
                    weights[matrix.name] = full
                yield full

    def restore(self, checkpoint: Path, optimizer: Optimizer) -> TrainState:
        """Restore adapters and optimizer from an iteration's folder, or the newest one in a save
        folder; see `resume`."""
        if (
            not (checkpoint / FOLDER).is_dir()
            and (newest := find_newest_iteration(checkpoint)) is not None
        ):
            checkpoint = checkpoint / folder_name(newest)
        return self.resume(checkpoint, optimizer)

    def wrap_saver(self, saver: CheckpointSaver) -> CheckpointSaver:
        """A saver of merged weights and of the adapter."""
        return LoraSaver(saver, self)

    def saved_paths(self, folder: Path, iteration: int) -> Mapping[str, str]:
        """The folder of the adapter."""
        return {"adapter": str(folder / folder_name(iteration) / FOLDER)}

    @torch.no_grad()
    def resume(self, iteration_folder: Path, optimizer: Optimizer) -> TrainState:
        """Restore adapters and optimizer state of an iteration, bit for bit.

        Raises:
            CheckpointError: it has no adapter, or one of another size, model or dtype.
        """
        matrices, facts = _read_adapter_state(iteration_folder / FOLDER / STATE_FILE)
        if facts["dtype"] != self._dtype:
            raise CheckpointError(
                f"the adapter was trained in {facts['dtype']}, and the run computes in "
                f"{self._dtype}",
                file=iteration_folder / FOLDER,
                hint=f"--{_DTYPE_FLAGS.get(facts['dtype'], facts['dtype'])} resumes it",
            )
        (current, magnitude), (stored, _) = self._fingerprint, facts["base"]
        if not abs(stored - current) <= _FINGERPRINT_TOLERANCE * magnitude:
            raise CheckpointError(
                "the adapter belongs to another model",
                file=iteration_folder / FOLDER,
                hint="SRC has to be the model that the run was started with",
            )
        for name, parameter in self.views.tensors.items():
            parameter.copy_(self.views.slice_local(matrices, WEIGHT, name))
        optimizer.reload_parameters()
        if facts["optimizer"] is not None:
            optimizer.load(lambda state, name: self.views.slice_local(matrices, state, name))
            optimizer.load_small_state(facts["optimizer"])
        return TrainState(
            iteration=facts["iteration"],
            consumed_samples=facts["consumed_samples"],
            num_steps=facts["num_steps"],
        )


def make_lora_settings(settings: TrainConfig) -> LoraSettings | None:
    """The adapters that options ask for; None if they do not.

    Raises:
        UsageError: there is no such role.
    """
    rank = settings.lora_rank
    if rank is None:
        return None
    return LoraSettings(
        rank=rank,
        alpha=2.0 * rank if settings.lora_alpha is None else settings.lora_alpha,
        dropout=settings.lora_dropout,
        roles=tuple(dict.fromkeys(role.strip() for role in settings.lora_target.split(","))),
        seed=settings.seed,
    )


def _require_family(source: CheckpointSource | None) -> Family:
    """The family of the model, whose names PEFT's format needs.

    Raises:
        UsageError: it is not known.
    """
    model = None if source is None else source.model
    if model is None or model.family is None:
        raise UsageError(
            "LoRA of a model of unknown family, whose modules have no names in PEFT's format",
            hint="name the family with --family",
        )
    return model.family


class MergedStage:
    """A stage with adapters merged into its weights, as a saver reads it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.groups, self.dtype, self.modules = decoder.groups, decoder.dtype, decoder.modules

    @property
    def computed(self) -> Mapping[str, Callable[[], Tensor]]:
        """The weights that the stage keeps packed, with adapters merged."""
        tensors = self._makers(keep_vars=True)
        return {name: tensors[name] for name in made_weights(self._decoder)}

    def state_dict(self, *, keep_vars: bool = False) -> Mapping[str, Tensor]:
        """Parameters under the names of a model without adapters, merged when they are read."""
        return _LazyTensors(self._makers(keep_vars=keep_vars))

    def _makers(self, *, keep_vars: bool) -> dict[str, Callable[[], Tensor]]:
        adapters = {f"{n}.weight": (x, a) for n, x, a in adapters_of(self._decoder)}
        packed = made_weights(self._decoder)
        tensors = self._decoder.state_dict(keep_vars=keep_vars)
        makers: dict[str, Callable[[], Tensor]] = {}
        for name, tensor in tensors.items():
            if ".adapter." not in name:
                weight = packed.get(name, _constant(tensor))
                pair = adapters.get(name)
                makers[name] = weight if pair is None else _merge_fn(*pair, weight)
        return makers


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _merge_fn(linear: Any, adapter: Any, weight: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: merged_weight(linear, adapter, weight().detach())


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors that are computed each time they are read."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def items(self) -> ItemsView[str, Tensor]:
        """Names and tensors, one at a time."""
        return ItemsView(self)


class LoraSaver:
    """Saves merged weights with `saver`, and adds the adapter's files.

    `saver` has the optimizer format `none`. Merged weights are computed and copied to host memory
    in parts: the device never holds all of them. Where weights are kept packed, they are written
    one by one while training waits, and the host does not hold them either.
    """

    def __init__(self, saver: CheckpointSaver, lora: LoraFeature) -> None:
        self._saver, self._lora = saver, lora
        self._is_packed = any(made_weights(stage) for stage in lora.stages)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def _spool_folder(self) -> Path:
        """Where files are written before the saver moves them, or uploads them into a store."""
        if not is_remote(self._saver.folder):
            return self._saver.folder / STAGING
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="megtool-")
        return location(self._temporary.name)

    @property
    def folder(self) -> Path:
        """The save folder."""
        return self._saver.folder

    @property
    def files(self) -> Files:
        """The access to its file system."""
        return self._saver.files

    def prepare(
        self, stages: Sequence[Decoder], optimizer: Optimizer | None, *, asynchronous: bool = True
    ) -> None:
        """Plan all saves, and take the memory for host copies."""
        self._saver.prepare(self._stages(), None, asynchronous=asynchronous and not self._is_packed)

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
        """Save an iteration; see `CheckpointSaver.save`. The copy is complete on return."""
        began = time.monotonic()
        self._saver.finish()
        scheduler = metadata.scheduler or {}
        state = TrainState(
            iteration=iteration,
            consumed_samples=metadata.consumed_train_samples,
            num_steps=int(scheduler.get("num_steps", metadata.consumed_train_samples)),
        )
        spool = self._spool_folder() / f"{folder_name(iteration)}.{FOLDER}"
        adapter_files = self._lora.files(optimizer, state, spool, self._saver.files)
        files = {**metadata.files, **adapter_files}
        self._saver.save(
            iteration,
            self._stages(),
            None,
            replace(metadata, files=files),
            asynchronous=not self._is_packed,
        )
        if not asynchronous:
            self._saver.finish()
        return time.monotonic() - began

    def wait_for_copy(self) -> float:
        """Wait until the state may change; returns the seconds it took."""
        return self._saver.wait_for_copy()

    def check(self) -> None:
        """Raise an error of the background thread, if there was one."""
        self._saver.check()

    def finish(self) -> None:
        """Wait until no save is under way."""
        self._saver.finish()

    def _stages(self) -> Any:
        return self._lora.merged_stages()


@torch.no_grad()
def fingerprint_frozen_weights(stages: Sequence[Decoder]) -> tuple[float, float]:
    """A number that depends on all frozen weights and their positions and is the same for every
    layout, and the sum of magnitudes; every rank calls it.

    Elements are summed with factors that depend on the parameter's name, and on the position along
    dimensions that no layout splits.
    """
    groups = stages[0].groups
    total = torch.zeros(2, dtype=torch.float64, device=groups.device)
    for decoder in stages:
        packed = made_weights(decoder)
        for name, p in decoder.named_parameters():
            is_expert, is_cut = not is_marked(p, "allreduce"), is_marked(p, _CUT)
            replicas, instances, shards = groups.replicas, groups.instances, groups.tp
            if is_expert:
                replicas, shards = groups.expert_dp, groups.etp
                instances = groups.expert_instances
            copies = instances if is_sharded(p) else replicas
            if copies.rank or (shards.rank and not is_cut) or is_marked(p, "shared"):
                continue
            if ".adapter." not in name:
                digest = hashlib.sha256(name.encode()).digest()
                # Marks of experts tell how this layout splits them; another may do it differently.
                along = int(getattr(p, "partition_dim", -1))  # -1: along none
                cut = range(p.dim()) if is_expert else [along]
                weight = packed[name]() if name in packed else p
                total += _weighted_sum(weight, cut) * (
                    0.5 + int.from_bytes(digest[:4], "little") / 2**32
                )
    value, room = all_sum(total, groups.world).tolist()
    return value, room


_CUT = "tensor_model_parallel"


def _weighted_sum(p: Tensor, cut: Iterable[int]) -> Tensor:
    """The sum of a parameter's elements with factors by position, and that of magnitudes."""
    starts = [0] * p.dim()
    if isinstance(p, DTensor):
        dim, starts[dim], _ = shard_box(p)
        p = local_shard(p)
    factors = [
        torch.ones(n, dtype=torch.float64, device=p.device)
        if d in cut
        else 0.5
        + torch.arange(start, start + n, device=p.device).mul(2654435761).remainder(2**32) / 2**32
        for d, (n, start) in enumerate(zip(p.shape, starts, strict=True))
    ]
    *outer, inner = factors
    by_row = torch.ones(1, dtype=torch.float64, device=p.device)
    for factor in outer:
        by_row = torch.outer(by_row, factor.double()).flatten()
    total = torch.zeros(2, dtype=torch.float64, device=p.device)
    rows = max(1, _CHUNK // max(inner.numel(), 1))
    by_inner = p.reshape(by_row.numel(), -1)
    for start in range(0, by_row.numel(), rows):
        weights, wide = by_row[start : start + rows], by_inner[start : start + rows].double()
        total[0] += weights @ (wide @ inner.double())
        total[1] += weights @ (wide.abs_() @ inner.double())
    return total


def _single(tensor: Tensor) -> float:
    """A tensor of one element (the loss scale) as a number for JSON."""
    return float(tensor.item())


def _read_adapter_state(path: Path) -> tuple[SafetensorsFile, dict[str, Any]]:
    """The tensors and the facts of a state file.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if not path.exists():
        raise CheckpointError(
            "this iteration has no adapter to resume",
            file=path,
            hint="it is not an iteration of a LoRA run: give it as SRC to start a new one",
        )
    tensors = SafetensorsFile(path)
    try:
        facts = json.loads(tensors.metadata["state"])
        format_version = facts["format"]
    except (ValueError, KeyError, TypeError) as e:
        raise FormatError(f"it is not the state of an adapter: {e}", file=path) from e
    if format_version != _FORMAT:
        raise FormatError(
            f"the adapter state has format {format_version}, not {_FORMAT}", file=path
        )
    return tensors, facts
