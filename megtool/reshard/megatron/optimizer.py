"""Optimizer: in which format its state is asked for, and what a run that loads it expects."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.formats import CUT_BY_RANKS
from megtool.checkpoint.megatron_metadata import args_of
from megtool.checkpoint.param_groups import BY_DP, FULLY
from megtool.config import ParallelConfig
from megtool.convert.dialects import CanonicalView, TargetView, is_optimizer_state
from megtool.convert.megatron import MAIN, split_state
from megtool.dtypes import DType
from megtool.errors import MappingError, UsageError
from megtool.reshard.megatron.dp_reshardable_writer import Run
from megtool.reshard.open_source import CheckpointSource
from megtool.tensors.buckets import default_bucket_size
from megtool.tensors.registration_order import Order, likely_orders
from megtool.tensors.sharded import GlobalTensor

_LOG = logging.getLogger(__name__)
NONE, LEGACY = "none", "legacy"
KINDS = (FULLY, BY_DP, LEGACY, NONE)
_FORMATS = {FULLY: "torch_dist", BY_DP: "torch_dist", LEGACY: "megatron"}


def choose_optimizer(asked: str | None, source: Catalogue, side: CanonicalView, to: str) -> str | None:
    """The format of the optimizer state to write; None where it stays as it is spelled.

    Raises:
        UsageError: an unknown format, one that the target cannot hold, or one that is cut by
            weights which are not there.
    """
    if asked is not None and asked not in KINDS:
        raise UsageError(f"optimizer format {asked!r}", hint=f"one of {', '.join(KINDS)}")
    home = _FORMATS.get(asked or "")
    if home is not None and home != to:
        raise UsageError(
            f"optimizer format {asked!r} belongs to --to {home}, not to {to!r}",
            hint=f"--to {home}, or leave --optimizer out",
        )
    if asked == NONE:
        return None
    if asked is not None and not any(
        is_optimizer_state(n) for n in (*side.canonical, *side.states)
    ):
        raise UsageError(
            f"optimizer format {asked!r}, and the source has no optimizer state",
            hint="leave --optimizer out",
        )
    if not side.states:
        return None
    by_weights = to == "megatron" or asked == BY_DP
    if by_weights and not any(":" not in name for name in side.canonical):
        raise UsageError(
            f"optimizer state as {LEGACY if to == 'megatron' else asked!r} goes by the weights, "
            "and there are none",
            hint=f"--to torch_dist --optimizer {FULLY} holds state alone",
        )
    if by_weights and MAIN not in side.states:
        kind = LEGACY if to == "megatron" else asked
        raise UsageError(
            f"optimizer state as {kind!r} needs master weights, and the source has only "
            f"{', '.join(side.states)}: nothing could tell where a parameter's state lies",
            hint=f"--optimizer none leaves the state out; --to torch_dist --optimizer {FULLY} "
            "holds it as it is",
        )
    if to == "megatron":
        return LEGACY
    if to != "torch_dist":
        return None
    if asked is not None:
        return asked
    is_distributed = sharding_type(source) is not None or source.format == "megatron"
    return FULLY if is_distributed or side.states.get(MAIN) == "param" else None


def sharding_type(source: Catalogue) -> str | None:
    """How a checkpoint says its distributed optimizer is stored; None where it has none."""
    content = source.metadata.get("content_metadata")
    found = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None


def states_of(side: TargetView) -> dict[str, DType]:
    """The optimizer states among stored tensors, as they are spelled, and their dtypes."""
    out: dict[str, DType] = {}
    for t in side.tensors:
        state, spelled, _ = split_state(t.name)
        if state:
            out.setdefault(spelled, t.dtype)
    return out


def require_states(side: TargetView, wanted: Iterable[str]) -> None:
    """Demand the state tensors that flat buffers are filled with, one of each state a parameter.

    Raises:
        MappingError: one is missing, or is of no parameter of the model; names state and tensor.
    """
    held = {t.name for t in side.tensors}
    asked = set()
    hint = "--optimizer none leaves the optimizer out"
    for name in wanted:
        asked.add(name)
        if name not in held:
            _, spelled, key = split_state(name)
            raise MappingError(
                f"the optimizer's state is incomplete: {key!r} has no {spelled!r}",
                tensor=name,
                hint=hint,
            )
    for name in sorted(held - asked):
        _, spelled, key = split_state(name)
        if spelled:
            raise MappingError(
                f"the optimizer has {spelled!r} of {key!r}, which is no parameter of the model",
                tensor=name,
                hint=hint,
            )


def run_of(
    source: CheckpointSource, parallel: ParallelConfig, weights: Sequence[GlobalTensor]
) -> Run:
    """How the run that will load the checkpoint cuts its buckets, as far as the source says."""
    args = args_of(source.catalogue)
    floats = [t.dtype.name for t in weights if t.dtype.is_float]
    param = max(set(floats), key=floats.count) if floats else "float32"
    known = source.catalogue.metadata.get("bucket_dtypes")
    in_fp32 = args.get("accumulate_allreduce_grads_in_fp32", param == "bfloat16")
    grad = known[1] if known else ("float32" if in_fp32 else param)
    size = None
    if args.get("overlap_grad_reduce"):
        given = args.get("ddp_bucket_size")
        replicas = parallel.dp * parallel.cp
        size = given if isinstance(given, int) and given > 0 else default_bucket_size(replicas)
    return Run(
        order=registration_order(source.catalogue),
        param_dtype=param,
        grad_dtype=grad,
        bucket_size=size,
    )


def registration_order(catalogue: Catalogue) -> Order:
    """In which order the parameters are registered: as found, or as the args make likely."""
    found = catalogue.metadata.get("registration_order")
    if isinstance(found, Order):
        return found
    args = args_of(catalogue)
    implementation = "local" if has_own_layers(catalogue) else None
    return likely_orders(implementation, args.get("moe_grouped_gemm"))[0]


def warn_of_order(catalogue: Catalogue, order: Order) -> None:
    """Say so where nothing tells which layers will load state that is laid out in their order."""
    args = args_of(catalogue)
    if not args or catalogue.metadata.get("registration_order") is not None:
        return
    has_experts = any(".experts." in t.name for t in catalogue.tensors)
    unsaid = [
        name
        for name, matters in (("transformer_impl", True), ("moe_grouped_gemm", has_experts))
        if args.get(name) is None and matters
    ]
    if unsaid and catalogue.format in CUT_BY_RANKS:
        _LOG.warning(
            "the args do not say %s: the optimizer is laid out for %s. Megatron would load it into "
            "other layers without an error, and wrong; --optimizer fully_reshardable fits all",
            " and ".join(unsaid),
            order,
        )


def has_own_layers(catalogue: Catalogue) -> bool:
    """The model is of megatron-core's own layers, not of Transformer Engine's.

    The args say so, or the names: of a first norm outside the linear layer behind it in rank files,
    of a norm inside an MLP of experts in `torch_dist`.
    """
    said = args_of(catalogue).get("transformer_impl")
    if said is not None:
        return bool(said == "local")
    names = [split_state(t.name)[2] for t in catalogue.tensors]
    if catalogue.format == "megatron":
        return any(".input_layernorm." in n for n in names) and not any(
            "_up_proj" in n for n in names
        )
    mlps = {n.partition(".mlp.")[0] for n in names if ".mlp.experts." in n}
    return any(n.partition(".mlp.")[0] in mlps for n in names if ".mlp.linear_fc1.layer_norm_" in n)
