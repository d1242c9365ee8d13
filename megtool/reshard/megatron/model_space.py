"""Model space: whatever Megatron stores by rank or by bucket, as tensors of the model."""

from __future__ import annotations

import logging
from dataclasses import replace

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.megatron_metadata import args_of
from megtool.checkpoint.param_groups import BY_DP, FULLY
from megtool.config import ModelConfig, ParallelConfig
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.parallel_args import parallel_from_args
from megtool.convert.pre_core_names import core_names
from megtool.errors import FormatError, LayoutError, MegtoolError
from megtool.reshard.megatron.dp_reshardable import from_buckets, has_buckets
from megtool.reshard.megatron.fully_sharded_model_space import from_fragments, has_fragments
from megtool.reshard.megatron.rank_files import from_ranks

_LOG = logging.getLogger(__name__)


def in_model_space(
    catalogue: Catalogue, config: ModelConfig | None, *, whole: bool = False, lenient: bool = False
) -> Catalogue:
    """The catalogue with all tensors in model space; as it is where nothing else is in it.

    With `lenient` what cannot be decoded stays as it is stored, with a warning that says why, and
    copies that differ are left to whoever compares `Catalogue.replicas`.

    Raises:
        FormatError: optimizer state of an unknown format, that cannot be decoded, or is of another
            model.
    """
    if catalogue.format == "deepspeed":
        return _by_core_names(catalogue)
    if not lenient:
        _check_kind(catalogue)
    catalogue = _unflattened(catalogue, lenient)
    if not has_buckets(catalogue) and catalogue.format != "megatron":
        return catalogue
    try:
        return _decoded(catalogue, config, whole, not lenient)
    except MegtoolError as e:
        if not lenient:
            raise
        _LOG.warning("optimizer state stays in its buckets: %s", e.message)
        return catalogue


def _by_core_names(catalogue: Catalogue) -> Catalogue:
    """Megatron-DeepSpeed's tensors by the names of Megatron's core; others as they are."""
    names = core_names([t.name for t in catalogue.tensors])
    if not names:
        return catalogue
    tensors = [replace(t, name=names[t.name]) for t in catalogue.tensors]
    return replace(catalogue, tensors=tensors, _index={})


def _unflattened(catalogue: Catalogue, lenient: bool) -> Catalogue:
    """The catalogue with state of cores up to 0.15 in its own shapes."""
    try:
        return from_fragments(catalogue) if has_fragments(catalogue) else catalogue
    except FormatError as e:
        if not lenient:
            raise
        _LOG.warning("optimizer state stays flattened: %s", e.message)
        return catalogue


KINDS = (
    FULLY,
    BY_DP,
    "dp_zero_gather_scatter",
    "fully_sharded_model_space",
    "fully_sharded_bucket_space",
    "fsdp_dtensor",
)
"""What Megatron has called the ways in which it stores its distributed optimizer."""


def _check_kind(catalogue: Catalogue) -> None:
    """Refuse state that is stored in a way that no known version of Megatron does."""
    content = catalogue.metadata.get("content_metadata")
    kind = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    if kind is None or kind in KINDS:
        return
    held = [t.name for t in catalogue.tensors if is_optimizer_state(t.name)]
    if held:
        raise FormatError(
            f"an optimizer format {kind!r:.60} that is not known",
            file=catalogue.root,
            tensor=held[0],
            hint=f"known are {', '.join(KINDS)}; --optimizer none leaves the optimizer out",
        )


def _decoded(
    catalogue: Catalogue, config: ModelConfig | None, whole: bool, alike: bool
) -> Catalogue:
    if config is None:
        what = "files per rank" if catalogue.format == "megatron" else "optimizer buckets"
        raise FormatError(
            f"{what} need the model's configuration, and the checkpoint's args lack it",
            file=catalogue.root,
            hint="--like HF_FOLDER gives it, or --optimizer none leaves the optimizer out",
        )
    try:
        read = from_ranks if catalogue.format == "megatron" else from_buckets
        return read(catalogue, config, saved_layout(catalogue), whole=whole, alike=alike)
    except LayoutError as e:
        raise FormatError(
            f"the checkpoint's args contradict themselves: {e.message}",
            file=catalogue.root,
            hint="--optimizer none leaves the optimizer out",
        ) from e


def saved_layout(catalogue: Catalogue) -> ParallelConfig:
    """The layout a checkpoint was saved at, by its args."""
    return parallel_from_args(args_of(catalogue))
