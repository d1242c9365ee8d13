"""The process groups of this rank on every axis, and how they are started and stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megtool.errors import LayoutError, MissingPackageError
from megtool.options.layout import ParallelConfig
from megtool.parallel.mesh import MEGATRON_ORDER, Mesh, Ranks
from megtool.parallel.pipeline_split import divisors, near


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Processes that share an axis. `ranks` are global and in the axis' order.

    `rank` is this process' place in `ranks`; `handle` is None where it is alone, and then every
    collective is the identity.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this process is first on the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process is last on the axis."""
        return self.rank == len(self.ranks) - 1

    def part(self, size: int, label: str) -> int:
        """The size of this process' equal part of `size`.

        Raises:
            LayoutError: the group does not divide `what`; the hint holds sizes that do.
        """
        if size % self.size:
            raise LayoutError(
                f"a group of {self.size} does not divide {label}={size}",
                hint=f"sizes that do: {near(divisors(size), self.size)}" if size else None,
            )
        return size // self.size


ALONE = Group()
SHARING_STAGES = ("ends", "inputs", "pp")
"""Groups of stages that may hold the same parameter."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """This process' groups on all axes of a layout.

    Dense parameters: `tp`, `cp`, `pp`, `dp`; their gradients are summed over `replicas` (dp x cp).
    Experts: `etp`, `ep`, `expert_dp`, over which theirs are summed. `ends` are the first and the
    last pipeline stage, which both hold tied embeddings; it has size 1 on the stages between. With
    stages of an encoder the decoder's first one is among `ends`; `inputs` are it and the encoder's
    first one, which both embed tokens.
    Context parallelism in two levels has `cp_inner`, neighbours on the axis that exchange heads,
    and `cp_outer`, which pass keys and values round.
    State of optimizers is sharded over `shards`, of experts over `expert_shards`: all replicas, or
    those of one instance, if `start` makes several. Ranks of `instances` and `expert_instances` are
    at the same place of different instances.
    Groups of the same ranks share one handle. `device` is where tensors have to be for the backend,
    `order` that of the axes (see `Mesh`).
    """

    parallel: ParallelConfig
    rank: int = 0
    tp: Group = ALONE
    cp: Group = ALONE
    pp: Group = ALONE
    dp: Group = ALONE
    ep: Group = ALONE
    etp: Group = ALONE
    expert_dp: Group = ALONE
    replicas: Group = ALONE
    shards: Group = ALONE
    instances: Group = ALONE
    expert_shards: Group = ALONE
    expert_instances: Group = ALONE
    ends: Group = ALONE
    inputs: Group = ALONE
    world: Group = ALONE
    device: torch.device = CPU
    order: str = MEGATRON_ORDER
    owns_world: bool = False
    cp_inner: Group = ALONE
    cp_outer: Group = ALONE

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> ProcessGroups:
        """One process: every group has size 1, and nothing is initialized."""
        return cls(parallel=ParallelConfig(), device=torch.device(device))

    @classmethod
    def start(
        cls,
        parallel: ParallelConfig,
        *,
        device: torch.device | str = "cpu",
        order: str = MEGATRON_ORDER,
        num_instances: int = 1,
        orders_kernels: bool = True,
        timeout_s: float = 1800.0,
        environment: Mapping[str, str] = os.environ,
    ) -> ProcessGroups:
        """Join the other processes that `torchrun` started, and make all groups.

        gloo on the CPU, nccl on CUDA (each process takes the device of its LOCAL_RANK). Data
        parallelism grows to fill the world, as in Megatron: a layout fits every multiple of its
        own world size, and `parallel` of the result says what it became. Without torchrun's
        environment a layout of one rank is `alone`. Every process has to call this, and with the
        same arguments. A world that the caller has initialized is used, and not stopped. Replicas
        are divided into `num_instances`, each of consecutive ones, as in Megatron. FSDP2 overlaps
        gathers with products only if `orders_kernels` is false (see `order_kernels`).

        Raises:
            LayoutError: the world has another size, the order of axes is none, or instances do not
                divide the replicas; the hint says which sizes would do.
            MissingPackageError: nccl was asked for, and there is no such device.
        """
        target_device = torch.device(device)
        started = dist.is_available() and dist.is_initialized()
        if started:
            rank, world_size = dist.get_rank(), dist.get_world_size()
        elif "WORLD_SIZE" in environment:
            rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        else:
            rank, world_size = 0, 1
        parallel = fit(parallel, world_size)
        check_instances(parallel, num_instances)
        mesh = Mesh(parallel, order)
        if target_device.type == "cuda" and orders_kernels:
            order_kernels(parallel)
        target_device = _device(target_device, _number(environment, "LOCAL_RANK", rank))
        if world_size == 1 and not started:
            return cls(parallel=parallel, device=target_device)
        if not started:
            timeout = timedelta(seconds=timeout_s)
            on_cuda: dict[str, Any] = (
                {"device_id": target_device} if target_device.type == "cuda" else {}
            )
            dist.init_process_group(
                "nccl" if target_device.type == "cuda" else "gloo",
                store=_store(rank, world_size, timeout),
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                **on_cuda,
            )
        more: dict[str, Any] = {"order": order, "owns_world": not started}
        more |= _make(mesh, rank, num_instances)
        return cls(parallel=parallel, rank=rank, device=target_device, **more)

    def stage(self) -> Group:
        """The ranks of this pipeline stage, wherever else they are: tp x replicas.

        Where no axis has just these a group is made: every process of the world has to call this.
        """
        size = self.tp.size * self.replicas.size
        for group in (self.world, self.replicas, self.tp):
            if group.size == size:
                return group
        positions = Mesh(self.parallel, self.order).position(np.arange(self.world.size))
        stage_group = ALONE
        for ranks in _parts([positions["pp"]]):
            handle = dist.new_group(list(ranks))
            if self.rank in ranks:
                stage_group = Group(ranks=ranks, rank=ranks.index(self.rank), handle=handle)
        return stage_group

    def stop(self) -> None:
        """Leave all groups, and the world if `start` has initialized it.

        Collectives are an error from then on. To be called before the process exits.
        """
        for group in (getattr(self, axis) for axis in ("world", *_SAME)):
            # A process that still holds a handle of gloo when it exits is aborted now and then.
            object.__setattr__(group, "handle", None)
        if self.owns_world and dist.is_initialized():
            dist.destroy_process_group()


def fit(parallel: ParallelConfig, world_size: int) -> ParallelConfig:
    """The layout with as many data-parallel replicas as fill a world.

    Raises:
        LayoutError: no number of replicas does; the hint says which worlds and which tp would fit.
    """
    layout_ranks = parallel.world_size
    if world_size % layout_ranks == 0:
        return replace(parallel, dp=parallel.dp * (world_size // layout_ranks))
    sizes = ("tp", "cp", "dp", "pp")
    sizes_text = " x ".join(f"{a}={n}" for a in sizes if (n := getattr(parallel, a)) > 1)
    fits = ", ".join(str(layout_ranks * k) for k in range(1, 4))
    hint = f"this layout fits {fits}, ... processes (torchrun --nproc-per-node {layout_ranks})"
    ranks_per_tp = layout_ranks // parallel.tp
    if world_size % ranks_per_tp == 0:
        alike = [t for t in divisors(world_size // ranks_per_tp) if _can(parallel, t, world_size)]
        if alike:
            hint += f"; with {world_size}, sizes of tp that do: {near(alike, parallel.tp)}"
    raise LayoutError(
        f"{sizes_text} needs {layout_ranks} processes, and there are {world_size}", hint=hint
    )


def _can(parallel: ParallelConfig, tp: int, world_size: int) -> bool:
    """Would the layout fit the world with another tp?"""
    etp = tp if parallel.etp == parallel.tp else parallel.etp
    dense = tp * parallel.cp * parallel.pp
    if world_size % dense:
        return False
    ranks = world_size // parallel.pp
    return ranks % (etp * parallel.ep) == 0


_stores: dict[tuple[Any, ...], tuple[Store, int]] = {}


def _store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """The rendezvous of a new world: a prefix of a store that outlives it.

    A store that ended with its world would be found by a process that is quicker to start the next
    one than rank 0 is to end it, and be gone a moment later; and torchrun's own store, which lasts,
    still holds the addresses of the world before.
    """
    key = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), rank, world_size)
    if key not in _stores:
        ways = rendezvous("env://", rank, world_size, timeout=timeout)
        _stores[key] = next(ways)[0], 0
    store, worlds = _stores[key]
    _stores[key] = store, worlds + 1
    store.set_timeout(timeout)
    return PrefixStore(f"megtool/{worlds}", store)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise LayoutError(
            f"the environment has {name}={text!r}",
            hint="start with: torchrun --nproc-per-node NUMBER -m megtool ...",
        )
    return int(text)


def order_kernels(
    parallel: ParallelConfig, environment: MutableMapping[str, str] = os.environ
) -> None:
    """With tp or cp, have CUDA start kernels in the order in which they were called.

    A reduction is called before the product that it overlaps with, and would otherwise wait for a
    free multiprocessor behind it. Megatron-LM asks for the same setting before Blackwell. It counts
    only if CUDA has not been used in this process, and a value of the user's stays.
    """
    if parallel.tp * parallel.cp > 1:
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _device(device: torch.device, local_rank: int) -> torch.device:
    """The device of this process, made the current one.

    Raises:
        MissingPackageError: there is no such device.
    """
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = local_rank if device.index is None else device.index
    if index >= count:
        raise MissingPackageError(
            f"process {local_rank} of this host needs CUDA device {index}, and there are {count}",
            hint=f"start at most {count} processes per host, or run with --device cpu"
            if count
            else "run with --device cpu, or pip install torch with CUDA on a host that has a GPU",
            error_id="missing-device",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def check_instances(parallel: ParallelConfig, num_instances: int) -> None:
    """Check that instances of the distributed optimizer have equal numbers of replicas.

    Raises:
        LayoutError: they do not divide the replicas; the hint says which numbers do.
    """
    for label, size in (
        ("dp x cp", parallel.dp * parallel.cp),
        ("replicas of experts", parallel.expert_dp),
    ):
        if size % num_instances:
            raise LayoutError(
                f"{num_instances} instances of the distributed optimizer do not divide {label}="
                f"{size}",
                hint="--num-distributed-optimizer-instances: "
                f"{near(divisors(size), num_instances)}",
            )


def _make(mesh: Mesh, rank: int, num_instances: int) -> dict[str, Group]:
    """All groups of one rank. Every process makes every group, in the same order, as torch wants.

    One handle for each set of ranks, whatever the axis; the whole world is torch's own.
    """
    positions = mesh.position(np.arange(mesh.sizes.world_size))
    # Stages between the outer ones are alone with their embedding, which they do not have.
    stages, second = positions["pp"], mesh.sizes.encoder_pp
    positions["ends"] = np.where(np.isin(stages, (0, second, mesh.sizes.pp - 1)), 0, stages)
    positions["inputs"] = np.where(stages == second, 0, stages)
    inner = (mesh.sizes.hierarchical_cp or (1,))[0]
    positions["cp_block"], positions["cp_place"] = np.divmod(positions["cp"], inner)
    for prefix, axes in (("", _SAME["replicas"]), ("expert_", _SAME["expert_dp"])):
        place = np.zeros_like(stages)
        for ranks in _parts([positions[axis] for axis in axes]):
            place[list(ranks)] = np.arange(len(ranks)) * num_instances // len(ranks)
        positions[f"{prefix}instance"] = place
        for ranks in _parts([positions[axis] for axis in (*axes, f"{prefix}instance")]):
            place = positions.setdefault(f"{prefix}shard", np.zeros_like(stages))
            place[list(ranks)] = np.arange(len(ranks))
    everyone = tuple(range(mesh.sizes.world_size))
    created: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: dist.group.WORLD}
    out = {"world": Group(ranks=everyone, rank=rank, handle=dist.group.WORLD)}
    for name, twin in _SAME.items():
        for ranks in _parts([positions[axis] for axis in twin]):
            if len(ranks) > 1 and ranks not in created:
                created[ranks] = dist.new_group(list(ranks))
            if rank in ranks:
                handle = created[ranks] if len(ranks) > 1 else None
                out[name] = Group(ranks=ranks, rank=ranks.index(rank), handle=handle)
    return out


# Which positions the ranks of a group have in common.
_SAME = {
    "tp": ("cp", "dp", "pp"),
    "cp": ("tp", "dp", "pp"),
    "cp_inner": ("tp", "dp", "pp", "cp_block"),
    "cp_outer": ("tp", "dp", "pp", "cp_place"),
    "dp": ("tp", "cp", "pp"),
    "pp": ("tp", "cp", "dp"),
    "replicas": ("tp", "pp"),
    "etp": ("ep", "edp", "pp"),
    "ep": ("etp", "edp", "pp"),
    "expert_dp": ("etp", "ep", "pp"),
    "ends": ("tp", "cp", "dp", "ends"),
    "inputs": ("tp", "cp", "dp", "inputs"),
    "shards": ("tp", "pp", "instance"),
    "instances": ("tp", "pp", "shard"),
    "expert_shards": ("etp", "ep", "pp", "expert_instance"),
    "expert_instances": ("etp", "ep", "pp", "expert_shard"),
}


def _parts(positions: list[Ranks]) -> list[tuple[int, ...]]:
    """Ranks split by their positions, in ascending order, the order of any axis."""
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(np.stack(positions, axis=1).tolist()):
        parts.setdefault(tuple(place), []).append(rank)
    return [tuple(part) for part in parts.values()]
