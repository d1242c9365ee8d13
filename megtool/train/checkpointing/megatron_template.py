"""The save template of a run, planned from its checkpoint as reshard plans it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megtool.convert.config.hybrid import needs_hybrid
from megtool.convert.dialects import is_optimizer_state
from megtool.dtypes import DType
from megtool.formats.save_folder import folder_name
from megtool.formats.torch_dist.layout import COMMON_FILE, CONFIG_FILE
from megtool.megatron_state.extra_states.names import is_extra_state
from megtool.megatron_state.extra_states.te_state import decode, to_tree
from megtool.megatron_state.optimizer.dp_reshardable_writer import make_bucket_objects, plan_buckets
from megtool.megatron_state.param_groups import is_group_object
from megtool.megatron_state.random_state import RERUN, is_rerun_object, is_rng_object
from megtool.options.layout import LayoutOptions, ParallelConfig
from megtool.options.target import TargetOptions
from megtool.pickles.zip_reader import load_object_bytes
from megtool.pickles.zip_writer import encode_object
from megtool.reshard.target import make_target
from megtool.reshard.writers.target_spec import Target
from megtool.run_state.common_state import read_iteration
from megtool.run_state.optimizer import choose_bucket_settings, warn_unknown_order
from megtool.source.checkpoint import CheckpointSource, unknown_model
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files
from megtool.tensors.buckets import BucketSettings
from megtool.tensors.catalogue import Destination
from megtool.tensors.placement import place_in
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.reading.reader import CheckpointReader

if TYPE_CHECKING:
    from torch import Tensor

    from megtool.train.checkpointing.quantizer_state import QuantizerState
    from megtool.train.checkpointing.save_template import BucketLayout, SaveTemplate

_STATE = ("optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state", RERUN)


def make_save_template(
    opened: CheckpointSource,
    parallel: ParallelConfig,
    dtype: DType | None = None,
    *,
    bucket_size: int | None = None,
    grad_dtype: str | None = None,
    carries: bool = True,
    quantizers: QuantizerState | None = None,
) -> SaveTemplate:
    """Plan what a run at `parallel` saves of the model in `opened`.

    `dtype` is that of the model's parameters; None keeps the dtype of every weight. `bucket_size`
    and `grad_dtype` are those of the run, for `dp_reshardable` optimizer state. A rank that
    `carries`, one of the first stage, loads the parts of the model that are not text.
    `quantizers` are saved too, with a key for each layer and expert, as ModelOpt names modules.

    Raises:
        MappingError: the model is not known, or its modules cannot have the quantizers.
        LayoutError: the layout does not divide it, or cuts blocks of the quantizers.
    """
    from megtool.train.checkpointing.save_template import SaveTemplate

    if opened.model is None:
        raise unknown_model(opened, "training needs the model's configuration")
    weights = _without_optimizer(opened)
    layout = LayoutOptions.of(parallel)
    # The run's own modules have the numbers of the configuration's layers.
    own_class: Literal["gpt", "hybrid"] = "hybrid" if needs_hybrid(opened.model.config) else "gpt"
    request = TargetOptions(
        destination=Path(),
        to="torch_dist",
        layout=layout,
        optimizer_format="none",
        dtype=None if dtype is None else dtype.name,
        model_class=own_class,
    )
    if quantizers is not None:  # the states of modules are new ones
        objects = weights.catalogue.objects
        stateless = {n: o for n, o in objects.items() if not is_extra_state(n)}
        weights = replace(weights, catalogue=replace(weights.catalogue, objects=stateless))
    target = make_target(weights, request, add=None if quantizers is None else quantizers.add)
    destination = target.destination
    folder = folder_name(read_iteration(opened.catalogue)) + "/"
    common = {k: v for k, v in destination.catalogue.metadata["common"].items() if k not in _STATE}
    values = {} if quantizers is None else quantizers.values()
    tensors = [t for t in destination.catalogue.tensors if t.name not in values]
    run = choose_bucket_settings(opened, parallel, tensors)
    run = replace(run, bucket_size=bucket_size, grad_dtype=grad_dtype or run.grad_dtype)
    return SaveTemplate(
        config=opened.model.config,
        parallel=parallel,
        tensors=tuple(tensors),
        common=common,
        objects=_collect_objects(destination),
        small={
            path.removeprefix(folder): data
            for path, data in destination.small_files.items()
            if path.removeprefix(folder) not in (".metadata", COMMON_FILE, CONFIG_FILE)
            and path.startswith(folder)
        },
        carried=_load_towers(weights, target) | values if carries else {},
        rotation=opened.rotation,
        whole=tuple(t for t in destination.catalogue.tensors if t.name in values),
        plan_buckets=partial(_plan_buckets, opened, tensors, opened.model.config, parallel, run),
    )


def _load_towers(opened: CheckpointSource, target: Target) -> dict[str, Tensor]:
    """The parts of a model other than its text as the target stores them, in memory."""
    import torch

    whole: dict[str, np.ndarray[Any, Any]] = {}
    names = opened.view.towers()
    if not names:
        return {}
    sizes = {t.name: t.shape for t in target.side.tensors}
    kinds: dict[str, torch.dtype] = {}
    with CheckpointReader(opened.catalogue, Files()) as reader:
        for name in names:
            values = reader.open_canonical(opened.placement_of(name)).read()
            placement = target.side.placements[name]
            stored = placement.stored
            kinds[stored] = getattr(torch, opened.view.canonical[name].dtype.name)
            into = whole.setdefault(stored, np.zeros(sizes[stored], values.dtype))
            place_in(into, placement)[...] = values.reshape(placement.shape)
    return {
        # numpy lacks the dtypes that elements may have, and a scalar's bytes are no array.
        stored: torch.from_numpy(elements.reshape(-1).view(np.uint8))
        .view(kinds[stored])
        .reshape(elements.shape)
        for stored, elements in whole.items()
    }


def _without_optimizer(opened: CheckpointSource) -> CheckpointSource:
    side = opened.view
    weights = {n: t for n, t in side.canonical.items() if ":" not in n}
    return replace(
        opened,
        catalogue=opened.catalogue.select(lambda name: not is_optimizer_state(name)),
        view=replace(
            side,
            tensors=tuple(t for t in side.tensors if not is_optimizer_state(t.name)),
            canonical=weights,
            placements={n: side.placements[n] for n in weights},
            dropped=[d for d in side.dropped if not is_optimizer_state(d[0])],
            states={},
        ),
    )


def _collect_objects(destination: Destination) -> dict[str, bytes]:
    """The objects as ready items, from the beginning of the first file.

    The run itself writes objects with the state of the run or of its ranks, and FP8's scales and
    histories if it computes in FP8. Those of other layers, which no longer fit the weights, are
    left empty.
    """
    stored_objects = destination.catalogue.objects
    first = next(
        (data for file, offset, data in destination.fragments if (file, offset) == (0, 0)), b""
    )
    items: dict[bytes, bytes] = {}  # a large model has one empty object thousands of times
    out = {}
    for name, stored in stored_objects.items():
        if (
            stored.extent is None
            or is_rng_object(name)
            or is_rerun_object(name)
            or is_group_object(name)
        ):
            continue
        _, offset, length = stored.extent
        item = first[offset : offset + length]
        if item not in items:
            items[item] = _without_scales(name, item)
        out[name] = items[item]
    return out


def _without_scales(name: str, item: bytes) -> bytes:
    """A ready item, emptied if it is a state of delayed scaling."""
    if "._extra_state" not in name:
        return item
    tree = load_object_bytes(item, file=name)
    content = tree[0] if isinstance(tree, list) and len(tree) == 1 else tree
    state = decode(content, file=name)
    if state is None or not state.is_delayed:
        return item
    empty = to_tree(None, release=state.release)
    return encode_object([empty] if content is not tree else empty)


def _plan_buckets(
    opened: CheckpointSource,
    weights: Sequence[GlobalTensor],
    config: ModelConfig,
    parallel: ParallelConfig,
    run: BucketSettings,
    states: Mapping[str, DType],
) -> BucketLayout:
    from megtool.train.checkpointing.save_template import BucketLayout, BucketSlot

    warn_unknown_order(opened.catalogue, run.order)
    laid = plan_buckets(weights, states, config, parallel, run)
    nothing: list[dict[str, Any]] = [{}] * laid.num_chains
    prefixes = []
    for chain, group in laid.sizes:
        chained = f"chained_{chain}." if laid.num_chains > 1 else ""
        prefixes.append((f"{chained}optimizer.distributed.dp_group_idx_{group}.", chain))
    return BucketLayout(
        tensors=tuple(laid.tensors),
        slots=tuple(
            BucketSlot(
                parameter=p, tensors=t, start=start, rank=laid.ranges[next(iter(t.values()))][0][2]
            )
            for t, p, start in laid.slots
        ),
        objects=make_bucket_objects(laid, run, nothing),
        prefixes=tuple(prefixes),
    )
