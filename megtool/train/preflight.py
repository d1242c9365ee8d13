"""Checks of a run against headers and options, before data are read and weights are loaded."""

from __future__ import annotations

from fnmatch import fnmatchcase

from megtool.convert.megatron.sharding import check_layout
from megtool.errors import LayoutError, UsageError
from megtool.inference.runtime import usual_device
from megtool.kernels.dispatch import require_package
from megtool.model.attention.context_parallel import check_exchange
from megtool.model.moe.router import check_trainable
from megtool.model.stacks.decoder import check_direction
from megtool.model.stacks.fully_shard import require_fully_shard
from megtool.model.stacks.pipeline import build_stages
from megtool.options.effects import check_effects
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups, check_instances
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import ModelConfig
from megtool.train.cuda_graph import check_graphs
from megtool.train.features.registry import add_feature_parameters, check_features
from megtool.train.options.config import TrainConfig
from megtool.train.options.model_facts import ModelFacts
from megtool.train.run_plan import plan_run, row_length


def check_run(source: CheckpointSource, settings: TrainConfig) -> None:
    """Check what headers alone can tell.

    Raises:
        LayoutError: the layout does not divide the model.
        UsageError: an option has no effect on the model or is not for it, CUDA graphs do not allow
            an option, a pattern matches no parameter, or experts are sampled in training.
        MissingPackageError: Transformer Engine is needed, and not installed, or torch is too old.
        MegtoolError: a feature does not fit; see `TrainingFeature.check`.
    """
    config = source.config
    check_layout(config, settings.layout)
    check_direction(config, settings.layout)
    check_exchange(config, settings.layout)
    check_trainable(config)
    if config.num_decoder_layers and settings.layout.cp > 1:
        raise LayoutError(
            f"cp is {settings.layout.cp}, and context parallelism is not for an encoder",
            hint="--tp splits it; context parallelism is for decoders",
        )
    check_effects(settings, ModelFacts.from_config(config))
    check_graphs(settings, config)
    require_package(settings.kernels, (settings.device or usual_device()).partition(":")[0])
    if settings.sharding.is_fully_sharded:
        require_fully_shard()
    check_features(settings, source)
    _check_patterns(settings, config)


def _check_patterns(settings: TrainConfig, config: ModelConfig) -> None:
    """Check that patterns of `--freeze`, `--lr-mult` and `--wd-mult` match a parameter.

    Raises:
        UsageError: one matches none, on any rank.
    """
    rules = [("--freeze", glob) for glob in settings.freeze]
    optimizer = settings.optimizer
    for option, texts in (("--lr-mult", optimizer.lr_mult), ("--wd-mult", optimizer.wd_mult)):
        rules += [(option, text.rpartition("=")[0]) for text in texts]
    if not rules:
        return
    stages = build_stages(config, ProcessGroups.alone("meta"))
    add_feature_parameters(settings, stages)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    for option, glob in rules:
        if glob and not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(
                f"{option} {glob!r} matches no parameter",
                hint="names are Megatron's, such as decoder.layers.0.mlp.linear_fc1.weight",
            )


def check_plan(source: CheckpointSource, settings: TrainConfig, layout: ParallelConfig) -> None:
    """Check the plan of a run on any data, before they are read.

    Raises:
        LayoutError: replicas and micro batches do not divide the global batch, ranks the rows, or
            instances the replicas.
        UsageError: the learning rate's schedule does not fit the number of steps.
    """
    check_instances(layout, settings.sharding.num_distributed_optimizer_instances)
    plan = plan_run(
        settings,
        seq_length=row_length(settings, source.config),
        num_samples=1,
        layout=layout,
    )
    if settings.train_iters is not None:
        plan.make_lr_schedule(settings.optimizer)
