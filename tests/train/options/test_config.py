"""Settings: their ranges, what excludes what, and YAML files under the command line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from megtool.errors import FormatError, LayoutError, UsageError
from megtool.options.config_file import build_options, read_options
from megtool.options.field import LAYOUT, option_fields
from megtool.options.layout import LayoutOptions
from megtool.train.options.config import TrainConfig
from tests.support.errors import raises

# fmt: off
NAMES = (
    "train_iters", "seq_length", "micro_batch_size", "global_batch_size", "lr", "min_lr",
    "lr_warmup_iters", "weight_decay", "clip_grad", "seed", "lr_decay_style", "lr_decay_iters",
    "adam_beta1", "adam_beta2", "adam_eps", "bf16", "fp16", "loss_scale", "initial_loss_scale",
    "min_loss_scale", "loss_scale_window", "hysteresis", "recompute_granularity",
    "recompute_num_layers", "sequence_parallel", "overlap_grad_reduce", "overlap_param_gather",
    "use_distributed_optimizer", "save_interval", "eval_interval", "eval_iters", "log_interval",
    "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "lr_warmup_fraction",
    "lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_warmup_init", "grad_reduce_in_bf16",
    "fp8_recipe", "fp8_format", "fp8_margin", "fp8_amax_history_len", "exit_signal_handler",
    "exit_duration_in_mins", "data_cache_path", "load", "async_save", "sgd_momentum",
    "muon_momentum", "store_param_remainders", "optimizer_offload_fraction", "exp_avg_dtype",
    "dist_ckpt_optim_format", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    "gradient_accumulation_fusion", "ddp_pad_buckets_for_high_nccl_busbw",
)
# fmt: on


def test_options_have_megatrons_names() -> None:
    assert set(NAMES) <= {entry.name for entry in option_fields(TrainConfig)}


@pytest.mark.peers
def test_megatron_knows_these_options() -> None:
    arguments = pytest.importorskip("megatron.core.optimizer.optimizer_config")
    theirs = {f.name for f in fields(arguments.OptimizerConfig)}
    shared = {
        *("lr", "min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
        *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        *("bf16", "fp16", "sgd_momentum", "store_param_remainders", "optimizer_offload_fraction"),
        *("overlap_param_gather", "use_distributed_optimizer", "exp_avg_dtype", "optimizer"),
    }
    assert shared <= theirs
    config = arguments.OptimizerConfig()
    for name in ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "hysteresis"):
        assert getattr(config, name) == getattr(TrainConfig().optimizer, name), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": True, "fp16": True}, "--bf16 and --fp16"),
        ({"lr": -1.0}, "--lr is -1"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"lr": 1e-5, "min_lr": 1e-4}, "--min-lr is above --lr"),
        ({"adam_beta2": 1.0}, "--adam-beta2 is 1"),
        ({"train_iters": 0}, "--train-iters is 0"),
        ({"train_iters": 3, "epochs": 1.0}, "--train-iters and --epochs"),
        ({"micro_batch_size": 3, "global_batch_size": 4}, "not a multiple of --micro-batch-size 3"),
        ({"lr_decay_style": "step"}, "--lr-decay-style is 'step'"),
        ({"lr_decay_style": "WSD"}, "WSD needs --lr-wsd-decay-iters"),
        ({"patience": 2}, "without --eval-data"),
        ({"data": ("a", "b"), "blend": "0.5"}, "1 shares, and there are 2 --data"),
        ({"data": ("a",), "blend": "much"}, "--blend is 'much'"),
        ({"calibration": Path("x")}, "--calibration has no effect without --qat"),
        ({"recompute_num_layers": 2}, "without --recompute-granularity"),
        ({"loss_scale": 8.0}, "--loss-scale has no effect without --fp16"),
        ({"lora_rank": 4, "lora_target": "qkv,fc3"}, "--lora-target is 'fc3'"),
        ({"eval_split": 1.0}, "--eval-split is 1"),
        ({"lora_rank": 4, "lora_target": "qkv, qkv"}, "--lora-target names 'qkv' twice"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "--lora-alpha is 0"),
        ({"lora_rank": 4, "freeze": ("embedding*",)}, "--freeze has no effect with --lora-rank"),
        ({"lora_target": "qkv"}, "--lora-target has no effect without --lora-rank"),
        ({"distill_weight": 1.0}, "--distill-weight has no effect without --teacher"),
        ({"distill_temperature": 2.0}, "--distill-temperature has no effect without --teacher"),
        ({"distill_hidden_weight": 1.0}, "--distill-hidden-weight has no effect without --teacher"),
        (
            {"teacher": Path("x"), "distill_layers": "0:1"},
            "--distill-layers has no effect without --distill-hidden-weight",
        ),
        ({"fp8_format": "e4m3"}, "--fp8-format has no effect without --fp8-recipe"),
        (
            {"num_layers_at_start_in_bf16": 1},
            "--num-layers-at-start-in-bf16 has no effect without --fp8-recipe",
        ),
    ],
)
def test_what_no_run_can_do_is_refused_by_its_option(options, message) -> None:
    with pytest.raises(UsageError) as caught:
        build_options(TrainConfig, options)
    assert message in caught.value.message


def test_a_layout_that_does_not_fit_itself_is_refused() -> None:
    with pytest.raises(LayoutError, match="virtual stages"):
        _ = build_options(TrainConfig, {"pp": 1, "vpp": 2})


def test_a_run_restates_what_a_layout_is_without_options() -> None:
    layout = TrainConfig().parallel
    assert (layout.tp, layout.pp, layout.vpp, layout.dp) == (1, 1, None, None)
    entries = {entry.name: entry for entry in option_fields(TrainConfig)}
    others = {entry.name: entry for entry in option_fields(LayoutOptions)}
    assert (entries["tp"].default, others["tp"].default) == (1, None)
    assert entries["cp"].spec.alias
    assert entries["etp"].spec == others["etp"].spec
    names = [name for name in entries if entries[name].spec.panel == LAYOUT]
    assert names[:4] == ["tp", "pp", "encoder_pp", "vpp"]
    assert names[names.index("dp") + 1] == "sequence_parallel"


def test_a_yaml_takes_hyphens_and_underscores_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: text.jsonl\ntrain-iters: 20\nseq_length: 64\nlr: 2e-5\nmin-lr: 0\nbf16: true\n"
        "lr-warmup-steps: 3\nload:\nfreeze: ['*.bias', 'embedding*']\niteration: 7\n"
    )
    found = build_options(TrainConfig, {"train_iters": 5, "lr": None, "data": []}, file)
    rates = found.optimizer
    assert (found.train_iters, found.seq_length, rates.lr, rates.min_lr) == (5, 64, 2e-5, 0.0)
    assert (found.data, found.bf16, rates.lr_warmup_iters) == (("text.jsonl",), True, 3)
    assert (found.freeze, found.load) == (("*.bias", "embedding*"), None)
    assert found.source.iteration == "7"


@pytest.mark.parametrize(
    ("text", "kind", "message", "hint"),
    [
        ("train_iter: 3", UsageError, "no option 'train-iter'", "train-iters"),
        ("lr: fast", UsageError, "lr is 'fast'", "a number"),
        ("train-iters: 2.5", UsageError, "train-iters is 2.5", "a whole number"),
        ("bf16: 1", UsageError, "bf16 is 1", "true or false"),
        ("optimizer: adamw", UsageError, "optimizer is 'adamw'", "adam, sgd, muon"),
        ("data: {a: 1}", UsageError, "data is {'a': 1}", "a list of texts"),
        ("- lr", FormatError, "holds a list, not options", "train-iters: 100"),
        ("lr: [", FormatError, "not YAML", None),
        (
            "lr: 1.0\nlr-warmup-steps: 1\nlr_warmup_iters: 2",
            FormatError,
            "is given twice",
            None,
        ),
    ],
)
def test_a_yaml_with_a_fault_names_it_and_the_file(text, kind, message, hint, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(kind) as caught:
        read_options(TrainConfig, file)
    assert message in caught.value.message
    assert caught.value.file == str(file)
    assert hint is None or hint in caught.value.hint


def test_python_is_refused_like_a_yaml() -> None:
    with raises(UsageError, hint="train-iters"):
        build_options(TrainConfig, {"train_itres": 5})
