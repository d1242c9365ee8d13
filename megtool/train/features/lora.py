"""LoRA in a run: adapters kept in PEFT's form beside merged weights, and taken up again.

An iteration of a LoRA run is a checkpoint of the merged model, and in its folder `adapter/` holds
the adapter as PEFT has it, with the optimizer's state in a file of our own.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.checkpoint.formats.save_folder import folder_name
from megtool.checkpoint.storage.files import Files
from megtool.convert.families import Family
from megtool.errors import CheckpointError, FormatError, MegtoolError
from megtool.model.decoder import Decoder
from megtool.model.lora import LoraSettings, adapters_of, add_adapters, merged_weight
from megtool.model.param_attributes import is_marked
from megtool.parallel.collectives import all_sum
from megtool.train.checkpointing.megatron_common_state import plain
from megtool.train.checkpointing.retention import newest_iteration
from megtool.train.checkpointing.safetensors_stream import TensorFile, write
from megtool.train.checkpointing.save_metadata import Extras
from megtool.train.checkpointing.staged_iteration import STAGING
from megtool.train.features.adapter_gather import WEIGHT, Gathering
from megtool.train.features.adapter_tensors import AdapterViews, gathered
from megtool.train.features.peft_format import CONFIG_FILE, WEIGHTS_FILE, PeftForm
from megtool.train.train_state import Standing

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer
    from megtool.train.checkpointing.save import Saver

FOLDER = "adapter"
STATE_FILE = "training_state.safetensors"
_FORMAT = 2
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SAME = 1e-11
"""Prints of the same weights differ by less of their room, by the order of summing alone."""
_CHUNK = 1 << 24
"""Elements of a weight that are held in float64 at a time."""


class Lora:
    """The adapters of a run, on this rank's stages, which are frozen from now on.

    `base` is where the model lies that they belong to. Every rank makes one, and the same calls.

    Raises:
        UsageError: the model has no layers of a role.
        MappingError: its family has no place for them.
    """

    def __init__(
        self, stages: Sequence[Decoder], settings: LoraSettings, family: Family, base: str
    ) -> None:
        self.stages, self.settings, self.base = stages, settings, base
        self.config = stages[0].config
        self.num_elements = add_adapters(stages, settings)
        self.views = AdapterViews(stages)
        self._family = family
        self._print = frozen_print(stages)
        PeftForm(self.config, family, [n for s in stages for n, *_ in adapters_of(s)])

    @property
    def _dtype(self) -> str:
        return str(self.stages[0].dtype).removeprefix("torch.")

    def merged(self) -> list[Merged]:
        """The stages as the model without adapters that computes the same."""
        return [Merged(decoder) for decoder in self.stages]

    def files(
        self, optimizer: Optimizer | None, standing: Standing, spool: Path, files: Files
    ) -> dict[str, bytes | Path]:
        """The adapter's files on rank 0, by their path in an iteration's folder; every rank calls
        it.

        No rank has all states of the optimizer: one after the other goes into the file `spool`.
        It is to be moved, as is `spool` with `.peft` behind it.

        Raises:
            StorageError: it cannot be written.
        """
        facts: dict[str, Any] = {"format": _FORMAT, "base": self._print, "dtype": self._dtype}
        facts["optimizer"] = None
        if optimizer is not None:
            facts["optimizer"] = plain(optimizer.small_state(), _single)
        facts |= {
            "iteration": standing.iteration,
            "consumed_samples": standing.consumed_samples,
            "num_steps": standing.num_steps,
        }
        gathering = Gathering(self.views, () if optimizer is None else optimizer.pieces())
        weights: dict[str, Tensor] = {}
        met = self._met(gathering, weights)
        error: MegtoolError | None = None
        out: dict[str, bytes | Path] = {}
        groups = self.stages[0].groups
        if groups.rank == 0:
            told = [(m.key, m.dtype, m.shape) for m in gathering.matrices]
            try:
                write(files, spool, told, met, {"state": json.dumps(facts)})
                out = self._peft_files(weights, spool.with_name(f"{spool.name}.peft"), files)
                out[f"{FOLDER}/{STATE_FILE}"] = spool
            except MegtoolError as e:
                error = e
        for _ in met:  # of the other ranks; and where one fails, they do not wait for it
            pass
        for found in gathered(error, groups.world):
            if found is not None:
                raise found
        return out

    def _peft_files(
        self, weights: Mapping[str, Tensor], spool: Path, files: Files
    ) -> dict[str, bytes | Path]:
        """The adapter as PEFT has it, its tensors in the file `spool`."""
        linears = {n.rpartition(".")[0] for n in weights if n.startswith("decoder.")}
        form = PeftForm(self.config, self._family, sorted(linears))
        made = form.tensors(weights)
        names = sorted(made)
        told = [(n, made[n].dtype, tuple(made[n].shape)) for n in names]
        write(files, spool, told, (made[n] for n in names), {"format": "pt"})
        config = form.config(self.settings, self.base)
        return {f"{FOLDER}/{WEIGHTS_FILE}": spool, f"{FOLDER}/{CONFIG_FILE}": config}

    def _met(self, gathering: Gathering, weights: dict[str, Tensor]) -> Iterator[Tensor]:
        """The matrices that rank 0 meets; the adapter's own are put into `weights`."""
        for matrix, whole in gathering:
            if whole is not None:
                if matrix.state == WEIGHT:
                    weights[matrix.name] = whole
                yield whole

    def go_on(self, begun: Path, optimizer: Optimizer) -> Standing:
        """`resume` from an iteration's folder, or the newest iteration of a save folder."""
        if not (begun / FOLDER).is_dir() and (newest := newest_iteration(begun)) is not None:
            begun = begun / folder_name(newest)
        return self.resume(begun, optimizer)

    def place(self, folder: Path, iteration: int | None) -> str | None:
        """Where a save folder has the adapter of an iteration."""
        return None if iteration is None else str(folder / folder_name(iteration) / FOLDER)

    @torch.no_grad()
    def resume(self, iteration_folder: Path, optimizer: Optimizer) -> Standing:
        """Take up adapters and optimizer state where an iteration left them, bit for bit.

        Raises:
            CheckpointError: it has no adapter, one of another size, one of another model, or one
                that was trained in another type.
        """
        whole, facts = _read(iteration_folder / FOLDER / STATE_FILE)
        if facts["dtype"] != self._dtype:
            raise CheckpointError(
                f"the adapter was trained in {facts['dtype']}, and the run computes in "
                f"{self._dtype}",
                file=iteration_folder / FOLDER,
                hint=f"--{_SHORT.get(facts['dtype'], facts['dtype'])} goes on with it",
            )
        (mine, room), (theirs, _) = self._print, facts["base"]
        if not abs(theirs - mine) <= _SAME * room:
            raise CheckpointError(
                "the adapter belongs to another model than the one that was given",
                file=iteration_folder / FOLDER,
                hint="SRC has to be the model that the run was started with",
            )
        for name, parameter in self.views.tensors.items():
            parameter.copy_(self.views.local(whole, WEIGHT, name))
        optimizer.reload_parameters()
        if facts["optimizer"] is not None:
            optimizer.load(lambda state, name: self.views.local(whole, state, name))
            optimizer.load_small_state(facts["optimizer"])
        return Standing(
            iteration=facts["iteration"],
            consumed_samples=facts["consumed_samples"],
            num_steps=facts["num_steps"],
        )


class Merged:
    """A stage with its adapters in its weights, as far as a saver looks at it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.groups = decoder.groups

    def state_dict(self) -> Mapping[str, Tensor]:
        """Parameters under the names of a model without adapters; merged as they are looked at."""
        found = {f"{n}.weight": (x, a) for n, x, a in adapters_of(self._decoder)}
        held = self._decoder.state_dict()
        makers: dict[str, Callable[[], Tensor]] = {}
        for name, tensor in held.items():
            if ".adapter." not in name:
                pair = found.get(name)
                makers[name] = _made(tensor) if pair is None else _merging(*pair)
        return _Lazy(makers)


def _made(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _merging(linear: Any, adapter: Any) -> Callable[[], Tensor]:
    return lambda: merged_weight(linear, adapter)


class _Lazy(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for, and not kept."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def items(self) -> ItemsView[str, Tensor]:
        """One after the other."""
        return ItemsView(self)


class LoraSaver:
    """A `Saver` of merged weights, without optimizer, that puts the adapter beside them.

    The saver has `optimizer_format` none. Merged weights are made and copied to host memory some at
    a time: the device never has all of them.
    """

    def __init__(self, saver: Saver, lora: Lora) -> None:
        self._saver, self._lora = saver, lora

    def prepare(
        self, stages: Sequence[Decoder], optimizer: Optimizer | None, *, asynchronous: bool = True
    ) -> None:
        """Plan all saves, and take the memory for host copies."""
        self._saver.prepare(self._stages(), None, asynchronous=asynchronous)

    def save(
        self,
        iteration: int,
        stages: Sequence[Decoder],
        optimizer: Optimizer | None,
        extras: Extras,
        *,
        asynchronous: bool = False,
        copy_behind: bool = False,
    ) -> float:
        """Save an iteration; see `Saver.save`. Nothing is copied behind passes."""
        began = time.monotonic()
        self._saver.finish()
        scheduler = extras.scheduler or {}
        standing = Standing(
            iteration=iteration,
            consumed_samples=extras.consumed_train_samples,
            num_steps=int(scheduler.get("num_steps", extras.consumed_train_samples)),
        )
        spool = self._saver.folder / STAGING / f"{folder_name(iteration)}.{FOLDER}"
        found = self._lora.files(optimizer, standing, spool, self._saver.files)
        files = {**extras.files, **found}
        self._saver.save(
            iteration, self._stages(), None, replace(extras, files=files), asynchronous=True
        )
        if not asynchronous:
            self._saver.finish()
        return time.monotonic() - began

    def wait_for_copy(self) -> float:
        """Wait until the state may change; returns the seconds of it."""
        return self._saver.wait_for_copy()

    def check(self) -> None:
        """Raise what went wrong in the background."""
        self._saver.check()

    def finish(self) -> None:
        """Wait until no save is under way."""
        self._saver.finish()

    def _stages(self) -> Any:
        return self._lora.merged()


@torch.no_grad()
def frozen_print(stages: Sequence[Decoder]) -> tuple[float, float]:
    """A number that all frozen weights and their places decide about, the same at every layout, and
    the sum of magnitudes that it is a part of; every rank calls it.

    Elements are summed with factors that depend on the parameter's name, and on the place along
    dimensions that no layout cuts.
    """
    groups = stages[0].groups
    total = torch.zeros(2, dtype=torch.float64, device=groups.device)
    for decoder in stages:
        for name, p in decoder.named_parameters():
            is_expert, is_cut = not is_marked(p, "allreduce"), is_marked(p, _CUT)
            replicas, shards = groups.replicas, groups.tp
            if is_expert:
                replicas, shards = groups.expert_dp, groups.etp
            if replicas.rank or (shards.rank and not is_cut) or is_marked(p, "shared"):
                continue
            if ".adapter." not in name:
                digest = hashlib.sha256(name.encode()).digest()
                # Marks of experts say how they are cut here, not how another layout may cut them.
                along = int(getattr(p, "partition_dim", -1))  # -1: along none
                cut = range(p.dim()) if is_expert else [along]
                total += _summed(p, cut) * (0.5 + int.from_bytes(digest[:4], "little") / 2**32)
    value, room = all_sum(total, groups.world).tolist()
    return value, room


_CUT = "tensor_model_parallel"


def _summed(p: Tensor, cut: Iterable[int]) -> Tensor:
    """The sum of a parameter's elements with factors by their place, and that of magnitudes."""
    factors = [
        torch.ones(n, dtype=torch.float64, device=p.device)
        if d in cut
        else 0.5 + torch.arange(n, device=p.device).mul(2654435761).remainder(2**32) / 2**32
        for d, n in enumerate(p.shape)
    ]
    *outer, inner = factors
    by_row = torch.ones(1, dtype=torch.float64, device=p.device)
    for factor in outer:
        by_row = torch.outer(by_row, factor.double()).flatten()
    total = torch.zeros(2, dtype=torch.float64, device=p.device)
    rows = max(1, _CHUNK // max(inner.numel(), 1))
    by_inner = p.reshape(by_row.numel(), -1)
    for at in range(0, by_row.numel(), rows):
        weights, wide = by_row[at : at + rows], by_inner[at : at + rows].double()
        total[0] += weights @ (wide @ inner.double())
        total[1] += weights @ (wide.abs_() @ inner.double())
    return total


def _single(tensor: Tensor) -> float:
    """A tensor of one element, the loss scale's, as JSON has it."""
    return float(tensor.item())


def _read(path: Path) -> tuple[TensorFile, dict[str, Any]]:
    """The tensors and the facts of a state file.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if not path.exists():
        raise CheckpointError(
            "this iteration has no adapter to go on with",
            file=path,
            hint="it is no iteration of a LoRA run: give it as SRC to start a new one",
        )
    tensors = TensorFile(path)
    try:
        facts = json.loads(tensors.metadata["state"])
        found = facts["format"]
    except (ValueError, KeyError, TypeError) as e:
        raise FormatError(f"no state of an adapter: {e}", file=path) from e
    if found != _FORMAT:
        raise FormatError(f"a state of an adapter of format {found}, not {_FORMAT}", file=path)
    return tensors, facts
