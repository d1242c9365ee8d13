"""Read what Megatron stores by rank or by bucket as tensors of the model."""

from __future__ import annotations

import logging
from dataclasses import replace

from megtool.convert.config.hybrid import hybrid_form, needs_hybrid
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron.hybrid_pattern import pattern_of
from megtool.convert.megatron.names import BUCKET, is_encoder_decoder
from megtool.convert.megatron.parallel_args import parallel_from_args
from megtool.convert.megatron.pre_core import core_names
from megtool.errors import FormatError, LayoutError, MegtoolError
from megtool.megatron_state.optimizer.fully_sharded_model_space import (
    has_flattened_cells,
    read_fully_sharded_model_space,
)
from megtool.megatron_state.param_groups import DP_RESHARDABLE, FULLY_RESHARDABLE
from megtool.megatron_state.saved_objects import saved_args
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.catalogue import Catalogue

_LOG = logging.getLogger(__name__)


def to_model_space(
    catalogue: Catalogue,
    config: ModelConfig | None,
    *,
    verify_master_weights: bool = False,
    lenient: bool = False,
) -> Catalogue:
    """The catalogue with all tensors in model space; unchanged if they are there already.

    With `lenient`, what cannot be decoded stays as it is stored, with a warning, and copies that
    differ are not refused (`Catalogue.replicas` can be compared later).

    Raises:
        FormatError: optimizer state of an unknown format, that cannot be decoded, or is of another
            model.
    """
    if catalogue.format == "deepspeed":
        return _use_core_names(catalogue)
    if not lenient:
        _check_sharding_type(catalogue)
    catalogue = _unflatten(catalogue, lenient)
    has_buckets = any(BUCKET.fullmatch(t.name) for t in catalogue.tensors)
    if not has_buckets and catalogue.format != "megatron":
        return catalogue
    try:
        return _decode(catalogue, config, verify_master_weights, not lenient)
    except MegtoolError as e:
        if not lenient:
            raise
        _LOG.warning("optimizer state stays in its buckets: %s", e.message)
        return catalogue


def _use_core_names(catalogue: Catalogue) -> Catalogue:
    """Megatron-DeepSpeed's tensors under Megatron Core's names; others unchanged."""
    names = core_names([t.name for t in catalogue.tensors])
    if not names:
        return catalogue
    tensors = [replace(t, name=names[t.name]) for t in catalogue.tensors]
    return replace(catalogue, tensors=tensors, _index={})


def _unflatten(catalogue: Catalogue, lenient: bool) -> Catalogue:
    """The catalogue with flattened state of cores up to 0.15 in its original shapes."""
    try:
        return (
            read_fully_sharded_model_space(catalogue)
            if has_flattened_cells(catalogue)
            else catalogue
        )
    except FormatError as e:
        if not lenient:
            raise
        _LOG.warning("optimizer state stays flattened: %s", e.message)
        return catalogue


SHARDING_TYPES = (
    FULLY_RESHARDABLE,
    DP_RESHARDABLE,
    "dp_zero_gather_scatter",
    "fully_sharded_model_space",
    "fully_sharded_bucket_space",
    "fsdp_dtensor",
)
"""The names of Megatron's formats of distributed optimizer state, past and present."""


def _check_sharding_type(catalogue: Catalogue) -> None:
    """Refuse optimizer state of an unknown format."""
    content = catalogue.metadata.get("content_metadata")
    kind = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    if kind is None or kind in SHARDING_TYPES:
        return
    names = [t.name for t in catalogue.tensors if is_optimizer_state(t.name)]
    if names:
        raise FormatError(
            f"the optimizer format {kind!r:.60} is unknown",
            file=catalogue.root,
            tensor=names[0],
            hint=f"known are {', '.join(SHARDING_TYPES)}; "
            "--optimizer-format none leaves the optimizer out",
        )


def _decode(
    catalogue: Catalogue,
    config: ModelConfig | None,
    verify_master_weights: bool,
    require_equal_copies: bool,
) -> Catalogue:
    if config is None:
        item = "files per rank" if catalogue.format == "megatron" else "optimizer buckets"
        raise FormatError(
            f"{item} need the model's configuration, and the checkpoint's args lack it",
            file=catalogue.root,
            hint="--like HF_FOLDER gives it, or --optimizer-format none leaves the optimizer out",
        )
    if _is_hybrid(catalogue, config):
        config = hybrid_form(config)
    decoder = saved_args(catalogue).get("decoder_num_layers")
    if isinstance(decoder, int) and is_encoder_decoder(t.name for t in catalogue.tensors):
        config = config.with_fields(num_decoder_layers=decoder)
    try:
        if catalogue.format == "megatron":
            from megtool.megatron_state.ranks.files import read_rank_files as read
        else:
            from megtool.megatron_state.optimizer.dp_reshardable import read_dp_reshardable as read
        return read(
            catalogue,
            config,
            read_saved_layout(catalogue),
            verify_master_weights=verify_master_weights,
            require_equal_copies=require_equal_copies,
        )
    except LayoutError as e:
        raise FormatError(
            f"the checkpoint's args contradict themselves: {e.message}",
            file=catalogue.root,
            hint="--optimizer-format none leaves the optimizer out",
        ) from e


def _is_hybrid(catalogue: Catalogue, config: ModelConfig) -> bool:
    """Whether layers are numbered as HybridModel's are."""
    if layer_sets.parallel_layers(config):
        return False
    if needs_hybrid(config) or pattern_of(saved_args(catalogue)) is not None:
        return True
    return any(".final_norm." in t.name for t in catalogue.tensors)


def read_saved_layout(catalogue: Catalogue) -> ParallelConfig:
    """The layout a checkpoint was saved at, by its args."""
    return parallel_from_args(saved_args(catalogue))
