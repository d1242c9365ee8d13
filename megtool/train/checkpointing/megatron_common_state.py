"""Megatron's common state of an iteration: args, optimizer groups, scheduler, random state."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megtool.dtypes import dtype
from megtool.errors import CheckpointError
from megtool.megatron_state.param_groups import (
    SHARDING_TYPE,
    OptimizerState,
    build_common_optimizer,
    build_content_metadata,
    optimizer_args,
    scalar_value,
)
from megtool.megatron_state.random_state import RNG
from megtool.parallel.process_groups import ProcessGroups
from megtool.pickles.reader import Inert, decode, find_references, inert_global
from megtool.pickles.writer import make_namespace
from megtool.pickles.zip_writer import encode_tensor_pickle
from megtool.train.checkpointing.protocol import SaveMetadata
from megtool.train.checkpointing.save_template import SaveTemplate


def make_common_state(
    template: SaveTemplate,
    metadata: SaveMetadata,
    iteration: int,
    small: Mapping[str, Any] | None,
    kind: str,
    *,
    num_chains: int,
) -> dict[str, Any]:
    """Megatron's common state of an iteration.

    `small` is the optimizer's small state, None if none is saved; `kind` is its sharding type.
    """
    common = dict(template.common)
    old = common.get("args")
    args: dict[str, Any] = dict(old.state) if isinstance(old, Inert) else {}
    args |= {
        "iteration": iteration,
        "consumed_train_samples": metadata.consumed_train_samples,
        "consumed_valid_samples": metadata.consumed_valid_samples,
        **metadata.args,
    }
    absent = {"no_save_optim": small is None, "no_save_rng": not metadata.random}
    args |= {k: no or None for k, no in absent.items() if bool(args.get(k)) != no}
    if small is not None:
        args |= optimizer_args(kind)
        chain = split_chain(small, num_chains)
        common["optimizer"] = to_plain_tree(build_common_optimizer(chain, kind))
        common["content_metadata"] = build_content_metadata(common.get("content_metadata"), kind)
    if metadata.scheduler is not None:
        common["opt_param_scheduler"] = to_plain_tree(dict(metadata.scheduler))
    common["args"] = make_namespace({k: to_plain_tree(v) for k, v in args.items()})
    common["iteration"] = iteration
    common["num_floating_point_operations_so_far"] = metadata.floating_point_operations
    return common


def split_chain(small: Mapping[str, Any], length: int) -> list[OptimizerState]:
    """The small state of one optimizer as that of a chain; of two, the second has the experts."""
    inner: dict[str, Any] = {k: v for k, v in small.items() if k != SHARDING_TYPE}
    if length == 1:
        return [inner]
    optimizer_state = dict(inner["optimizer"])
    groups: Sequence[Mapping[str, Any]] = optimizer_state["param_groups"]
    return [
        {
            **inner,
            "optimizer": {
                **optimizer_state,
                "param_groups": [
                    g for g in groups if bool(g.get("is_expert_parallel")) == is_expert
                ],
            },
        }
        for is_expert in (False, True)
    ]


def join_chain(chain: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The small state of a chain as that of one optimizer, as plain values.

    Raises:
        CheckpointError: the loss scale is not a number.
    """
    first = dict(chain[0])
    groups = [g for inner in chain for g in inner["optimizer"].get("param_groups", ())]
    values = []
    for g in groups:
        values.append({k: v for k, v in g.items() if not isinstance(v, Inert)})
        if (
            step := scalar_value(g.get("step"))
        ) is not None:  # Transformer Engine's may be a tensor
            values[-1]["step"] = step
    if scaler := first.get("grad_scaler"):
        numbers = {k: scalar_value(v) for k, v in scaler.items()}
        if unread := [k for k, v in numbers.items() if v is None]:
            raise CheckpointError(
                f"the saved loss scale has a {unread[0]!r} that is not a number",
                hint="--load a checkpoint whose optimizer was saved by Megatron or megtool",
            )
        first["grad_scaler"] = numbers
    return {**first, "optimizer": {**first["optimizer"], "param_groups": values}}


def to_plain_tree(value: Any, tensor: Callable[[torch.Tensor], Any] | None = None) -> Any:
    """A tree with Python's numbers, and with inert data in place of torch's dtypes and tensors.

    `tensor` gives the replacement of tensors that have dimensions.
    """
    if isinstance(value, torch.Tensor | np.generic) and value.ndim == 0:
        return value.item()
    if isinstance(value, torch.Tensor):
        return (tensor or _inert_tensor)(value)
    if isinstance(value, torch.dtype):
        return inert_global("torch", str(value).removeprefix("torch."))
    if isinstance(value, Mapping):
        return {k: to_plain_tree(v, tensor) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain_tree(v, tensor) for v in value)
    return value


def _inert_tensor(value: torch.Tensor) -> Any:
    """A small tensor as inert data with its bytes, which determine the storage's key."""
    host = value.detach().cpu().contiguous()
    data = host.view(torch.uint8).numpy().tobytes()
    kind = str(host.dtype).removeprefix("torch.")
    node = decode(encode_tensor_pickle(dtype(kind), tuple(host.shape)), file="common.pt")
    for storage in find_references(node):
        kind_tag, type_, _, *tail = storage.id
        storage.id = (kind_tag, type_, f"{kind}-{zlib.crc32(data):08x}", *tail)
        storage.data = data
    return node


def rng_object_name(groups: ProcessGroups) -> str:
    """The name of this rank's random state; with expert parallelism every replica has its own."""
    p = groups.parallel
    if p.ep > 1:
        sizes = f"{p.pp}.{p.tp}.{p.dp * p.cp}"
        return f"{RNG}/shard_{groups.pp.rank}.{groups.tp.rank}.{groups.replicas.rank}_{sizes}"
    return f"{RNG}/shard_{groups.pp.rank}.{groups.tp.rank}_{p.pp}.{p.tp}"


def pack_rng_state(groups: ProcessGroups) -> bytes:
    """This process' random state in Megatron's form, as a ready item.

    Without a GPU, the states of its generators are those of Megatron seeded with torch's seed.
    """
    seed = torch.initial_seed() % (1 << 63)
    is_cuda = groups.device.type == "cuda"
    shift = 1024 + 100 * groups.ep.rank + groups.etp.rank
    seeds = {
        "model-parallel-rng": seed + 2718 + groups.tp.rank,
        "data-parallel-rng": seed,
        "expert-parallel-rng": seed + shift,
    }
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if is_cuda else _seeded(seed),
        "rng_tracker_states": {name: _seeded(n) for name, n in seeds.items()},
    }
    out = io.BytesIO()
    torch.save([[state]], out)
    return out.getvalue()


def seed_random_states(seed: int, groups: ProcessGroups) -> None:
    """Seed this process' generators as Megatron does, so that two runs save the same states."""
    number = (seed + 100 * groups.pp.rank) % (1 << 32)
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _seeded(seed: int) -> torch.Tensor:
    """The state of a CUDA generator right after seeding."""
    return torch.frombuffer(bytearray(struct.pack("<QQ", seed, 0)), dtype=torch.uint8)


def restore_rng_state(value: Any, groups: ProcessGroups) -> bool:
    """Set this process' random state from the inert data of an object of `pack_rng_state`.

    Returns whether it is valid; otherwise nothing is set.
    """
    state = value[0] if isinstance(value, list) and value else value
    if not isinstance(state, Mapping):
        return False
    python_state = state.get("random_rng_state")
    torch_state = _bytes(state.get("torch_rng_state"))
    if not isinstance(python_state, tuple) or torch_state is None:
        return False
    try:
        torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
        random.setstate(python_state)
        kind, keys, *tail = state["np_rng_state"]
        numpy_keys = np.frombuffer(_array(keys), np.uint32)
        np.random.set_state((kind, numpy_keys, *tail))
        cuda_state = _bytes(state.get("cuda_rng_state"))
        if groups.device.type == "cuda" and cuda_state:
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(cuda_state), dtype=torch.uint8))
    except (TypeError, ValueError, RuntimeError, KeyError):
        return False
    return True


def _bytes(value: Any) -> bytes | None:
    """The bytes of a tensor in inert data."""
    return next((storage.data for storage in find_references(value)), None)


def _array(value: Any) -> bytes:
    """The bytes of a numpy array in inert data.

    Raises:
        TypeError: it is not an array.
    """
    state = getattr(value, "state", None)
    data = state[-1] if isinstance(state, tuple) and state else None
    if isinstance(data, str):
        return data.encode("latin1")
    if isinstance(data, bytes):
        return data
    if isinstance(data, Inert) and data.args:  # `_codecs.encode(text, "latin1")` of protocol 2
        return str(data.args[0]).encode("latin1")
    raise TypeError("not an array")
