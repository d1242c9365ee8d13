"""The format of optimizer state to write, and what the run that loads it expects."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megtool.convert.dialects import CanonicalView, TargetView, is_optimizer_state
from megtool.convert.megatron.names import MAIN, split_state
from megtool.dtypes import DType
from megtool.errors import MappingError, UsageError
from megtool.formats import RANK_SHARDED_FORMATS
from megtool.megatron_state.param_groups import DP_RESHARDABLE, FULLY_RESHARDABLE
from megtool.megatron_state.saved_objects import saved_args
from megtool.options.layout import ParallelConfig
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.registration_order import Order, likely_orders
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    from megtool.tensors.buckets import BucketSettings

_LOG = logging.getLogger(__name__)
NONE, LEGACY = "none", "legacy"
OPTIMIZER_FORMATS = (FULLY_RESHARDABLE, DP_RESHARDABLE, LEGACY, NONE)
_FORMAT_OF = {FULLY_RESHARDABLE: "torch_dist", DP_RESHARDABLE: "torch_dist", LEGACY: "megatron"}


def choose_optimizer(
    requested: str | None, source: Catalogue, side: CanonicalView, to: str
) -> str | None:
    """The format of the optimizer state to write; None where its names stay.

    Raises:
        UsageError: an unknown format, one that the target cannot hold, or one that needs weights
            which are missing.
    """
    if requested is not None and requested not in OPTIMIZER_FORMATS:
        raise UsageError(
            f"there is no optimizer format {requested!r}",
            hint=f"one of {', '.join(OPTIMIZER_FORMATS)}",
        )
    required_format = _FORMAT_OF.get(requested or "")
    if required_format is not None and required_format != to:
        raise UsageError(
            f"optimizer format {requested!r} belongs to --to {required_format}, not to {to!r}",
            hint=f"--to {required_format}, or leave --optimizer-format out",
        )
    if requested == NONE:
        return None
    if requested is not None and not any(
        is_optimizer_state(n) for n in (*side.canonical, *side.states)
    ):
        raise UsageError(
            f"optimizer format {requested!r}, and the source has no optimizer state",
            hint="leave --optimizer-format out",
        )
    if not side.states:
        return _choose_for_stored_names(requested, source, side, to)
    by_weights = to == "megatron" or requested == DP_RESHARDABLE
    if by_weights and not any(":" not in name for name in side.canonical):
        raise UsageError(
            f"optimizer state as {LEGACY if to == 'megatron' else requested!r} needs the weights, "
            "and there are none",
            hint=f"--to torch_dist --optimizer-format {FULLY_RESHARDABLE} holds state alone",
        )
    if by_weights and MAIN not in side.states:
        kind = LEGACY if to == "megatron" else requested
        raise UsageError(
            f"optimizer state as {kind!r} needs master weights, and the source has only "
            f"{', '.join(side.states)}: the place of a parameter's state could not be found",
            hint="--optimizer-format none leaves the state out; --to torch_dist "
            f"--optimizer-format {FULLY_RESHARDABLE} holds it as it is",
        )
    towers = frozenset(side.towers())
    trained = [n for n in side.canonical if n.rpartition(":")[2] in towers and n not in towers]
    if by_weights and trained:
        raise MappingError(
            "optimizer state in buckets follows the order in which a model registers its "
            f"parameters, and that of {trained[0].rpartition(':')[2].partition('.')[0]} is not "
            "known",
            tensor=trained[0],
            hint=f"--to torch_dist --optimizer-format {FULLY_RESHARDABLE} holds the state by name; "
            "--optimizer-format none leaves it out",
        )
    if to == "megatron":
        return LEGACY
    if to != "torch_dist":
        return None
    if requested is not None:
        return requested
    is_distributed = read_sharding_type(source) is not None or source.format == "megatron"
    return FULLY_RESHARDABLE if is_distributed or side.states.get(MAIN) == "param" else None


def _choose_for_stored_names(
    requested: str | None, source: Catalogue, side: CanonicalView, to: str
) -> str | None:
    """The format of state whose names stay as they are read, since no table has the model's.

    State in buckets is read by parameter, which is how `fully_reshardable` has it.

    Raises:
        MappingError: a format by the places of parameters is asked for.
    """
    state = next((n for n in side.canonical if is_optimizer_state(n)), None)
    if state is None:
        return None
    if requested in (DP_RESHARDABLE, LEGACY):
        raise MappingError(
            f"optimizer state as {requested!r} needs the model's family, which is not known",
            tensor=state,
            hint=f"--to torch_dist --optimizer-format {FULLY_RESHARDABLE} holds the state by name; "
            "--optimizer-format none leaves it out",
        )
    declared = read_sharding_type(source)
    is_changed = declared is not None and declared != FULLY_RESHARDABLE
    return FULLY_RESHARDABLE if to == "torch_dist" and is_changed else None


def read_sharding_type(source: Catalogue) -> str | None:
    """The format of distributed optimizer state that a checkpoint declares; None if none."""
    content = source.metadata.get("content_metadata")
    value = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    return value if isinstance(value, str) else None


def find_state_dtypes(side: TargetView) -> dict[str, DType]:
    """The optimizer states among stored tensors, by stored name, and their dtypes."""
    out: dict[str, DType] = {}
    for t in side.tensors:
        state, spelled, _ = split_state(t.name)
        if state:
            out.setdefault(spelled, t.dtype)
    return out


def require_states(side: TargetView, expected: Iterable[str]) -> None:
    """Require the state tensors that flat buffers need: one of each state per parameter.

    Raises:
        MappingError: one is missing, or belongs to no parameter of the model.
    """
    stored = {t.name for t in side.tensors}
    used = set()
    hint = "--optimizer-format none leaves the optimizer out"
    for name in expected:
        used.add(name)
        if name not in stored:
            _, spelled, key = split_state(name)
            raise MappingError(
                f"the optimizer's state is incomplete: {key!r} has no {spelled!r}",
                tensor=name,
                hint=hint,
            )
    for name in sorted(stored - used):
        _, spelled, key = split_state(name)
        if spelled:
            raise MappingError(
                f"the optimizer has {spelled!r} of {key!r}, which is no parameter of the model",
                tensor=name,
                hint=hint,
            )


def choose_bucket_settings(
    source: CheckpointSource, parallel: ParallelConfig, weights: Sequence[GlobalTensor]
) -> BucketSettings:
    """How the run that will load the checkpoint cuts its buckets, as far as the args state."""
    from megtool.tensors.buckets import BucketSettings, default_bucket_size

    args = saved_args(source.catalogue)
    floats = [t.dtype.name for t in weights if t.dtype.is_float]
    param = max(set(floats), key=floats.count) if floats else "float32"
    known = source.catalogue.metadata.get("bucket_dtypes")
    in_fp32 = args.get("accumulate_allreduce_grads_in_fp32", param == "bfloat16")
    grad = known[1] if known else ("float32" if in_fp32 else param)
    size = None
    if args.get("overlap_grad_reduce"):
        declared = args.get("ddp_bucket_size")
        replicas = parallel.dp * parallel.cp
        size = (
            declared
            if isinstance(declared, int) and declared > 0
            else default_bucket_size(replicas)
        )
    return BucketSettings(
        order=find_registration_order(source.catalogue),
        param_dtype=param,
        grad_dtype=grad,
        bucket_size=size,
        for_bandwidth=bool(args.get("ddp_pad_buckets_for_high_nccl_busbw")),
    )


def find_registration_order(catalogue: Catalogue) -> Order:
    """The order in which parameters are registered: the proved one, or the likely one."""
    order = catalogue.metadata.get("registration_order")
    if isinstance(order, Order):
        return order
    args = saved_args(catalogue)
    implementation = "local" if uses_local_layers(catalogue) else None
    conv_first = catalogue.metadata.get("conv_first", True)
    grouped = args.get("moe_grouped_gemm")
    return likely_orders(implementation, grouped, conv_first=conv_first)[0]


def warn_unknown_order(catalogue: Catalogue, order: Order) -> None:
    """Warn if the args do not state which layers will load state that depends on their order."""
    args = saved_args(catalogue)
    if not args or catalogue.metadata.get("registration_order") is not None:
        return
    has_experts = any(".experts." in t.name for t in catalogue.tensors)
    unstated = [
        name
        for name, matters in (("transformer_impl", True), ("moe_grouped_gemm", has_experts))
        if args.get(name) is None and matters
    ]
    if unstated and catalogue.format in RANK_SHARDED_FORMATS:
        _LOG.warning(
            "the args do not state %s: the optimizer is laid out for %s. Megatron would load it "
            "into other layers without an error, but wrong; --optimizer-format fully_reshardable "
            "fits all layers",
            " and ".join(unstated),
            order,
        )


def uses_local_layers(catalogue: Catalogue) -> bool:
    """Whether the model uses Megatron Core's local layers, not Transformer Engine's.

    The args say so, or the names: a first norm outside the next linear layer in rank files, a norm
    inside an MLP of experts in `torch_dist`.
    """
    implementation = saved_args(catalogue).get("transformer_impl")
    if implementation is not None:
        return bool(implementation == "local")
    names = [split_state(t.name)[2] for t in catalogue.tensors]
    if catalogue.format == "megatron":
        return any(".input_layernorm." in n for n in names) and not any(
            "_up_proj" in n for n in names
        )
    mlps = {n.partition(".mlp.")[0] for n in names if ".mlp.experts." in n}
    return any(n.partition(".mlp.")[0] in mlps for n in names if ".mlp.linear_fc1.layer_norm_" in n)
