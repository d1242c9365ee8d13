"""Features that train parameters of their own beside a frozen model, and how a run saves them.

An iteration of such a run is a checkpoint of the model (with adapters merged, where there are
some). One folder in it holds what was trained, in the format that other software reads, and the
optimizer's state in a file of megtool's own.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megtool.errors import CheckpointError, FormatError, MegtoolError
from megtool.formats.save_folder import folder_name
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.fully_shard import sharded_modules
from megtool.model.stacks.unpacked_forward import made_weights
from megtool.storage.files import Files
from megtool.train.checkpointing.added_files import SaverWithFiles, find_iteration
from megtool.train.checkpointing.megatron_common_state import to_plain_tree
from megtool.train.checkpointing.protocol import CheckpointSaver, SaveMetadata, TrainState
from megtool.train.checkpointing.safetensors_stream import SafetensorsFile, write_safetensors
from megtool.train.features.adapter_gather import WEIGHT, AdapterGather
from megtool.train.features.adapter_tensors import AdapterViews, raise_on_all
from megtool.train.features.frozen_weights import MergedStage, fingerprint_frozen_weights
from megtool.train.features.protocol import TrainingFeature

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer

STATE_FILE = "training_state.safetensors"
_FORMAT = 2
_DTYPE_FLAGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_FINGERPRINT_TOLERANCE = 1e-11
"""Fingerprints of the same weights differ by less than this share of the sum of magnitudes: sums
depend on their order."""


class FrozenModelFeature(TrainingFeature, ABC):
    """Parameters that are trained on the stages of this rank, whose own weights are frozen.

    `views` are the positions of this rank's parameters in full matrices. A subclass says with
    `format_files` how others read them, the name of their `folder` in an iteration and of the field
    of the report with its path, and what they are called.
    """

    saves_optimizer = False
    folder: ClassVar[str]
    state_folder: ClassVar[str]
    """Of the training state, in an iteration: not `folder` if others load all that lies in it."""
    called: ClassVar[str]

    def __init__(self, stages: Sequence[Decoder], views: AdapterViews) -> None:
        self.stages, self.views = stages, views
        self._fingerprint = fingerprint_frozen_weights(stages)

    @abstractmethod
    def format_files(
        self, weights: Mapping[str, Tensor], spool: Path, files: Files
    ) -> dict[str, bytes | Path]:
        """The files that others read, by their names in `folder`, of the full matrices `weights`.

        Rank 0 calls it. The largest file is written to `spool`, and the saver takes it from there.

        Raises:
            StorageError: it cannot be written.
        """

    @property
    def _dtype(self) -> str:
        return str(self.stages[0].dtype).removeprefix("torch.")

    def merged_stages(self) -> list[MergedStage]:
        """The stages with adapters merged into their weights, and without other added modules."""
        return [MergedStage(decoder) for decoder in self.stages]

    def files(
        self, optimizer: Optimizer | None, state: TrainState, spool: Path, files: Files
    ) -> dict[str, bytes | Path]:
        """What is saved beside the model, on rank 0, by its path in an iteration's folder.

        No rank has the whole state of the optimizer: it is written to the file `spool` one matrix
        at a time. The saver takes this file away, and the one with `.format` added to its name.

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
                out = self.format_files(weights, spool.with_name(f"{spool.name}.format"), files)
                out = {f"{self.folder}/{name}": data for name, data in out.items()}
                out[f"{self.state_folder}/{STATE_FILE}"] = spool
            except MegtoolError as e:
                error = e
        for _ in matrices:  # of other ranks, which must not wait if one fails
            pass
        raise_on_all(error, groups.world)
        return out

    def _iterate_matrices(
        self, gathering: AdapterGather, weights: dict[str, Tensor]
    ) -> Iterator[Tensor]:
        """The matrices that rank 0 receives; the parameters themselves are added to `weights`."""
        for matrix, full in gathering:
            if full is not None:
                if matrix.state == WEIGHT:
                    weights[matrix.name] = full
                yield full

    def restore(self, checkpoint: Path, optimizer: Optimizer) -> TrainState:
        """Restore parameters and optimizer from an iteration's folder, or the newest one in a save
        folder; see `resume`."""
        return self.resume(find_iteration(checkpoint, self.folder), optimizer)

    def wrap_saver(self, saver: CheckpointSaver) -> CheckpointSaver:
        """A saver of the model and of what is trained."""
        return FrozenModelSaver(saver, self)

    def saved_paths(self, folder: Path, iteration: int) -> Mapping[str, str]:
        """The folder of what is trained."""
        return {self.folder: str(folder / folder_name(iteration) / self.folder)}

    @torch.no_grad()
    def resume(self, iteration_folder: Path, optimizer: Optimizer) -> TrainState:
        """Restore parameters and optimizer state of an iteration, bit for bit.

        Raises:
            CheckpointError: it has none, or of another size, model or dtype.
        """
        folder = iteration_folder / self.folder
        matrices, facts = self._read_state(iteration_folder / self.state_folder / STATE_FILE)
        if facts["dtype"] != self._dtype:
            raise CheckpointError(
                f"the {self.called} was trained in {facts['dtype']}, and the run computes in "
                f"{self._dtype}",
                file=folder,
                hint=f"--{_DTYPE_FLAGS.get(facts['dtype'], facts['dtype'])} resumes it",
            )
        (current, magnitude), (stored, _) = self._fingerprint, facts["base"]
        if not abs(stored - current) <= _FINGERPRINT_TOLERANCE * magnitude:
            raise CheckpointError(
                f"the {self.called} belongs to another model",
                file=folder,
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

    def _read_state(self, path: Path) -> tuple[SafetensorsFile, dict[str, Any]]:
        """The tensors and the facts of a state file.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        if not path.exists():
            raise CheckpointError(
                f"this iteration has no {self.called} to resume",
                file=path,
                hint="it is of a run that trained something else: give it as SRC to start a new "
                "one",
            )
        tensors = SafetensorsFile(path)
        try:
            facts = json.loads(tensors.metadata["state"])
            format_version = facts["format"]
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise FormatError(f"it is not the state of the {self.called}: {e}", file=path) from e
        if format_version != _FORMAT:
            raise FormatError(
                f"the state of the {self.called} has format {format_version}, not {_FORMAT}",
                file=path,
            )
        return tensors, facts


class FrozenModelSaver(SaverWithFiles):
    """Saves merged weights with `saver`, and adds the files of a feature.

    `saver` has the optimizer format `none`. Merged weights are computed one by one: the device
    never holds all of them. While training waits, as it does where weights are kept packed, they
    are written one by one, too; otherwise, and where ranks have shards, the host has a copy.
    """

    def __init__(self, saver: CheckpointSaver, feature: FrozenModelFeature) -> None:
        super().__init__(saver)
        self._feature = feature
        self._is_packed = any(made_weights(stage) for stage in feature.stages)
        self._is_sharded = bool(sharded_modules(feature.stages))

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
        spool = self._spool_folder() / f"{folder_name(iteration)}.{self._feature.folder}"
        own_files = self._feature.files(optimizer, state, spool, self._saver.files)
        files = {**metadata.files, **own_files}
        self._saver.save(
            iteration,
            self._stages(),
            None,
            replace(metadata, files=files),
            asynchronous=(asynchronous or self._is_sharded) and not self._is_packed,
        )
        if not asynchronous:
            self._saver.finish()
        return time.monotonic() - began

    def _stages(self) -> Any:
        return self._feature.merged_stages()


def _single(tensor: Tensor) -> float:
    """A tensor of one element (the loss scale) as a number for JSON."""
    return float(tensor.item())
