"""Settings checks: ranges, and options of a training run that exclude or need each other."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from megtool.errors import UsageError

if TYPE_CHECKING:
    from megtool.train.config import TrainConfig


def option_flag(name: str) -> str:
    """How the command line says a field."""
    return "--" + name.replace("_", "-")


def check_train_config(settings: TrainConfig) -> None:
    """Refuse what no run can do, before anything is opened.

    Raises:
        UsageError: a value out of its range or of the wrong kind, or two that exclude each other.
        LayoutError: the parallel sizes do not fit each other.
    """
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is not None:
            _check_kind(field.name, value, hints[field.name], field.metadata["min"])
    _check_numbers(settings)
    _check_steps(settings)
    _check_feature_options(settings)
    _check_graphs(settings)
    _ = settings.layout


def _check_kind(name: str, value: Any, hint: Any, minimum: float | None) -> None:
    allowed = get_args(hint)
    words = [a for part in (hint, *allowed) for a in get_args(part) if isinstance(a, str)]
    if words and value not in words:
        raise UsageError(f"{option_flag(name)} {value!r}", hint=f"one of: {', '.join(words)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise UsageError(f"{option_flag(name)} {value}", hint="a finite number")
        if minimum is not None and value < minimum:
            raise UsageError(f"{option_flag(name)} {value}", hint=f"{minimum:g} or more")


def _check_numbers(s: TrainConfig) -> None:
    if (chosen := [n for n in DTYPE_FLAGS if getattr(s, n)])[1:]:
        raise UsageError(
            f"{option_flag(chosen[0])} and {option_flag(chosen[1])}", hint="a model computes in one type"
        )
    for name, below in (
        ("adam_beta1", 1.0),
        ("adam_beta2", 1.0),
        ("sgd_momentum", 1.0),
        ("muon_momentum", 1.0),
        ("hold_out", 1.0),
        ("lora_dropout", 1.0),
        ("hidden_dropout", 1.0),
        ("attention_dropout", 1.0),
    ):
        if not 0 <= getattr(s, name) < below:
            raise UsageError(f"{option_flag(name)} {getattr(s, name)}", hint="at least 0 and below 1")
    for name in ("distill_weight", "optimizer_offload_fraction"):
        if not 0 <= getattr(s, name) <= 1:
            raise UsageError(f"{option_flag(name)} {getattr(s, name)}", hint="from 0 to 1")
    if s.min_lr > s.lr:
        raise UsageError(f"--min-lr {s.min_lr} is above --lr {s.lr}")
    if s.lr_warmup_init > s.lr:
        raise UsageError(f"--lr-warmup-init {s.lr_warmup_init} is above --lr {s.lr}")
    if s.distill_temperature <= 0:
        raise UsageError(f"--distill-temperature {s.distill_temperature}", hint="above 0")
    if s.blend is not None:
        _check_blend(s)


def _check_blend(s: TrainConfig) -> None:
    try:
        shares = s.blend_shares or ()
    except ValueError:
        shares = ()
    if not shares or any(not math.isfinite(x) or x <= 0 for x in shares):
        raise UsageError(f"--blend {s.blend!r}", hint="positive numbers with commas: 0.7,0.3")
    if len(shares) != len(s.data):
        raise UsageError(
            f"--blend has {len(shares)} shares, and there are {len(s.data)} --data",
            hint="one share for each --data, in the same order",
        )


ALTERNATIVES = (
    ("train_iters", "epochs"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("eval_data", "hold_out"),
)
"""Options that say the same in two ways."""

DTYPE_FLAGS = ("bf16", "fp16", "fp32")


def _check_steps(s: TrainConfig) -> None:
    for first, second in ALTERNATIVES:
        if getattr(s, first) and getattr(s, second):
            raise UsageError(f"{option_flag(first)} and {option_flag(second)}", hint="one of them")
    if s.epochs is not None and s.epochs <= 0:
        raise UsageError(f"--epochs {s.epochs}", hint="above 0")
    if s.lr_warmup_fraction is not None and s.lr_warmup_fraction > 1:
        raise UsageError(f"--lr-warmup-fraction {s.lr_warmup_fraction}", hint="from 0 to 1")
    if s.lr_decay_style == "WSD" and s.lr_wsd_decay_iters is None:
        raise UsageError("--lr-decay-style WSD without --lr-wsd-decay-iters")
    if s.global_batch_size is not None and s.global_batch_size % s.micro_batch_size:
        raise UsageError(
            f"--global-batch-size {s.global_batch_size} is no multiple of "
            f"--micro-batch-size {s.micro_batch_size}"
        )
    if s.patience is not None and not (s.eval_data or s.eval_split):
        raise UsageError("--patience, and nothing to evaluate on", hint="--eval-data, --hold-out")


def _check_feature_options(s: TrainConfig) -> None:
    needs = (
        (s.calibration is not None and s.qat is None, "--calibration without --qat"),
        (s.fp8_param_gather and s.fp8_recipe is None, "--fp8-param-gather without --fp8-recipe"),
        (
            s.fp8_param_gather and s.fp8_recipe == "blockwise",
            "--fp8-param-gather with --fp8-recipe blockwise, whose weights have many scales",
        ),
        (
            s.fp8_recipe == "mxfp8" and s.kernels != "te",
            "--fp8-recipe mxfp8 without --kernels te: Transformer Engine alone has products of it",
        ),
        (
            s.fp8_param_gather and s.kernels == "te",
            "--fp8-param-gather and --kernels te: Transformer Engine makes FP8 of weights itself",
        ),
        (
            s.recompute_granularity == "selective"
            and s.fp8_recipe is not None
            and s.kernels == "te",
            "--recompute-granularity selective and --kernels te with --fp8-recipe: products of "
            "Transformer Engine cannot be kept; full computes whole layers again",
        ),
        (
            s.fp8_param_gather and s.use_distributed_optimizer is False,
            "--fp8-param-gather without --use-distributed-optimizer",
        ),
        (
            s.recompute_num_layers is not None and s.recompute_granularity is None,
            "--recompute-num-layers without --recompute-granularity",
        ),
        (s.loss_scale is not None and not s.fp16, "--loss-scale without --fp16"),
        (s.store_param_remainders and bool(s.fp16 or s.fp32), "--store-param-remainders: bf16 has"),
        (s.qat is not None and s.fp8_recipe is not None, "--qat and --fp8-recipe"),
        (s.qat is not None and s.lora_rank is not None, "--qat and --lora-rank"),
        (s.lora_alpha is not None and s.lora_rank is None, "--lora-alpha without --lora-rank"),
        (bool(s.lora_dropout) and s.lora_rank is None, "--lora-dropout without --lora-rank"),
        (s.lora_rank is not None and s.fp8_param_gather, "--lora-rank and --fp8-param-gather"),
        (
            s.lora_rank is not None and bool(s.freeze),
            "--freeze with --lora-rank, which freezes all of the model and trains adapters alone",
        ),
        (s.fp8_recipe is not None and bool(s.fp16), "--fp8-recipe and --fp16"),
        (
            bool(s.moe_router_bias_update_rate) and s.lora_rank is not None,
            "--moe-router-bias-update-rate and --lora-rank, which freezes all of the model",
        ),
        (
            bool(s.moe_aux_loss_coeff) and s.moe_router_load_balancing_type == "none",
            "--moe-aux-loss-coeff and --moe-router-load-balancing-type none",
        ),
        (
            s.moe_router_load_balancing_type not in (None, "none")
            and not (s.moe_aux_loss_coeff or s.moe_losses_from_checkpoint),
            "--moe-router-load-balancing-type without --moe-aux-loss-coeff",
        ),
    )
    for is_wrong, message in needs:
        if is_wrong:
            raise UsageError(message.replace(": bf16 has", " needs --bf16"))
    _check_dependent_options(s)
    if s.lora_alpha is not None and s.lora_alpha <= 0:
        raise UsageError(f"--lora-alpha {s.lora_alpha:g}", hint="above 0; default: 2 x --lora-rank")
    if s.overlap_param_gather and s.use_distributed_optimizer is False:
        raise UsageError("--overlap-param-gather without --use-distributed-optimizer")
    roles = ("qkv", "proj", "fc1", "fc2")
    if s.lora_rank is not None:
        roles_given = [role.strip() for role in s.lora_target.split(",")]
        for n, role in enumerate(roles_given):
            if role not in roles:
                raise UsageError(f"--lora-target {role!r}", hint=f"of {', '.join(roles)}")
            if role in roles_given[:n]:
                raise UsageError(f"--lora-target names {role!r} twice", hint=s.lora_target)


GRAPH_CONFLICTS = {
    "overlap_grad_reduce": "a graph has all passes' gradients before replicas add up",
    "overlap_param_gather": "a graph does not wait for parameters",
    "fp8_param_gather": "parameters of every step lie elsewhere, and a graph reads the same memory",
    "hidden_dropout": "a graph would leave out the same elements for ever",
    "attention_dropout": "a graph would leave out the same elements for ever",
    "lora_dropout": "a graph would leave out the same elements for ever",
    "qat": "weights are rounded anew in every step, and a graph repeats the first one's scales",
    "teacher": "the teacher's states are handed over by the host, batch by batch",
}
"""What a pass that is a CUDA graph cannot do, and why."""


def _check_graphs(s: TrainConfig) -> None:
    if s.cuda_graph_impl == "none":
        return
    hint = "without --cuda-graph-impl"
    for name, reason in GRAPH_CONFLICTS.items():
        if getattr(s, name):
            raise UsageError(f"--cuda-graph-impl local and {option_flag(name)}: {reason}", hint=hint)
    if s.pp > 1:
        raise UsageError(
            f"--cuda-graph-impl local and --pp {s.pp}: stages take turns, which the host decides",
            hint=hint,
        )
    if s.fp8_recipe is not None and s.kernels == "te":
        raise UsageError(
            "--cuda-graph-impl local and --kernels te with --fp8-recipe: Transformer Engine keeps "
            "scales of its own",
            hint=hint,
        )


DEPENDENT_OPTIONS = {
    "teacher": ("distill_weight", "distill_temperature"),
    "lora_rank": ("lora_target",),
    "fp8_recipe": (
        "fp8_format",
        "fp8_amax_history_len",
        "fp8_amax_compute_algo",
        "fp8_margin",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
    ),
}
"""Options without which others mean nothing."""


def _check_dependent_options(s: TrainConfig) -> None:
    usual = {f.name: f.default for f in fields(s)}
    for needed, names in DEPENDENT_OPTIONS.items():
        if getattr(s, needed) is None:
            for name in names:
                if getattr(s, name) != usual[name]:
                    raise UsageError(f"{option_flag(name)} without {option_flag(needed)}")
