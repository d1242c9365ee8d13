"""Saving: what a run that begins with a checkpoint will write of it, decided as reshard decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megtool.checkpoint.catalogue import Destination
from megtool.checkpoint.containers.te_extra_state import decode, to_tree
from megtool.checkpoint.containers.zip_reader import load_bytes
from megtool.checkpoint.containers.zip_writer import object_item
from megtool.checkpoint.formats.save_folder import folder_name
from megtool.checkpoint.formats.torch_dist_layout import COMMON_FILE, CONFIG_FILE
from megtool.checkpoint.param_groups import is_group_object
from megtool.checkpoint.random_state import RERUN, is_rerun, is_rng
from megtool.config import ModelConfig, ParallelConfig
from megtool.convert.dialects import is_optimizer_state
from megtool.dtypes import DType
from megtool.reshard.megatron.common_state import saved_iteration
from megtool.reshard.megatron.dp_reshardable_writer import Run, lay_out_buckets, objects_of
from megtool.reshard.megatron.optimizer import NONE, run_of, warn_of_order
from megtool.reshard.open_source import CheckpointSource, unknown_model
from megtool.reshard.target import make_target
from megtool.reshard.writers.target_spec import Request
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    from megtool.train.checkpointing.save_template import Flat, Template

_STATE = ("optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state", RERUN)


def template_of(
    opened: CheckpointSource,
    parallel: ParallelConfig,
    dtype: DType | None = None,
    *,
    bucket_size: int | None = None,
    grad_dtype: str | None = None,
) -> Template:
    """What a run at `parallel` saves of the model in `opened`.

    `dtype` is that of the model's parameters; None leaves every weight's own. `bucket_size` and
    `grad_dtype` are the run's own, for `dp_reshardable` optimizer state.

    Raises:
        MappingError: nothing says what model it is.
        LayoutError: the layout does not divide it.
    """
    from megtool.train.checkpointing.save_template import Template

    if opened.model is None:
        raise unknown_model(opened, "training needs the model's configuration")
    weights = _weights_of(opened)
    layout = {k: v for k, v in asdict(parallel).items() if v is not None}
    request = Request(to="torch_dist", layout=layout, optimizer=NONE, dtype=dtype)
    target = make_target(weights, request)
    destination = target.destination
    folder = folder_name(saved_iteration(opened.catalogue)) + "/"
    common = {k: v for k, v in destination.catalogue.metadata["common"].items() if k not in _STATE}
    tensors = destination.catalogue.tensors
    run = run_of(opened, parallel, tensors)
    run = replace(run, bucket_size=bucket_size, grad_dtype=grad_dtype or run.grad_dtype)
    return Template(
        config=opened.model.config,
        parallel=parallel,
        tensors=tuple(tensors),
        common=common,
        objects=_objects(destination),
        small={
            path.removeprefix(folder): data
            for path, data in destination.small.items()
            if path.removeprefix(folder) not in (".metadata", COMMON_FILE, CONFIG_FILE)
            and path.startswith(folder)
        },
        flat=partial(_flat, opened, tensors, opened.model.config, parallel, run),
    )


def _weights_of(opened: CheckpointSource) -> CheckpointSource:
    """The checkpoint without its optimizer's state."""
    side = opened.side
    weights = {n: t for n, t in side.canonical.items() if ":" not in n}
    return replace(
        opened,
        catalogue=opened.catalogue.select(lambda name: not is_optimizer_state(name)),
        side=replace(
            side,
            tensors=tuple(t for t in side.tensors if not is_optimizer_state(t.name)),
            canonical=weights,
            placements={n: side.placements[n] for n in weights},
            dropped=[d for d in side.dropped if not is_optimizer_state(d[0])],
            states={},
        ),
    )


def _objects(destination: Destination) -> dict[str, bytes]:
    """The objects as ready items; they lie at the beginning of the first file.

    What belongs to a state of the run, or of its ranks, the run writes itself. So does it FP8's
    scales and histories, where it computes in FP8; those of other layers are of weights and inputs
    as they were before it, and are left empty.
    """
    held = destination.catalogue.objects
    first = next((data for file, at, data in destination.fragments if (file, at) == (0, 0)), b"")
    items: dict[bytes, bytes] = {}  # a large model has one empty object thousands of times
    out = {}
    for name, stored in held.items():
        if stored.extent is None or is_rng(name) or is_rerun(name) or is_group_object(name):
            continue
        _, at, length = stored.extent
        item = first[at : at + length]
        if item not in items:
            items[item] = _without_scales(name, item)
        out[name] = items[item]
    return out


def _without_scales(name: str, item: bytes) -> bytes:
    """A ready item; an empty one in the place of a state of delayed scaling."""
    if "._extra_state" not in name:
        return item
    tree = load_bytes(item, file=name)
    held = tree[0] if isinstance(tree, list) and len(tree) == 1 else tree
    state = decode(held, file=name)
    if state is None or not state.is_delayed:
        return item
    empty = to_tree(None, release=state.release)
    return object_item([empty] if held is not tree else empty)


def _flat(
    opened: CheckpointSource,
    weights: Sequence[GlobalTensor],
    config: ModelConfig,
    parallel: ParallelConfig,
    run: Run,
    states: Mapping[str, DType],
) -> Flat:
    from megtool.train.checkpointing.save_template import Flat, Slot

    warn_of_order(opened.catalogue, run.order)
    laid = lay_out_buckets(weights, states, config, parallel, run)
    nothing: list[dict[str, Any]] = [{}] * laid.num_chains
    prefixes = []
    for chain, group in laid.sizes:
        chained = f"chained_{chain}." if laid.num_chains > 1 else ""
        prefixes.append((f"{chained}optimizer.distributed.dp_group_idx_{group}.", chain))
    return Flat(
        tensors=tuple(laid.tensors),
        slots=tuple(
            Slot(parameter=p, tensors=t, start=at, rank=laid.ranges[next(iter(t.values()))][0][2])
            for t, p, at in laid.slots
        ),
        objects=objects_of(laid, run, nothing),
        prefixes=tuple(prefixes),
    )
