"""Options of a training run, with Megatron's names, and the rules between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megtool.errors import LayoutError, UsageError
from megtool.model.loss_options import LossOptions
from megtool.optim.config import DATA_PARALLEL, MEMORY, OPTIMIZER, PRECISION, OptimizerConfig
from megtool.optim.fp8.config import Fp8Config
from megtool.options.effects import check_effects, excludes, requires, unused_with
from megtool.options.field import LAYOUT, OptionCondition, group, option
from megtool.options.groups import (
    INPUT,
    RUNNING,
    SourceOptions,
    TextRecords,
    TokenizerChoice,
)
from megtool.options.kernels import Implementation
from megtool.options.layout import ParallelConfig
from megtool.train.options.data import RowBuildingOptions
from megtool.train.options.data_parallel import DataParallelOptions
from megtool.train.options.eagle import TRAINS_HEAD
from megtool.train.options.layout import TrainLayoutOptions
from megtool.train.options.lora import LoraOptions
from megtool.train.options.model_facts import HAS_TOKENS, IS_DECODER
from megtool.train.options.overlap import OverlapOptions
from megtool.train.options.profile import ProfileOptions

TRAINING = "Training"
CHECKPOINTS, EVALUATION = "Checkpoints", "Evaluation and logs"
QAT = "Quantization-aware training and distillation"

QAT_SOURCE = "source"
"""What `--qat` is in place of a recipe, for the quantizers of SRC."""

_IS_DISTILLED = requires("teacher")
_NOT_FP8_BY_TE = OptionCondition(
    holds=lambda options, facts: options.fp8_recipe is None or options.kernels != "te",
    reason="and --kernels te with --fp8-recipe exclude each other: Transformer Engine updates its "
    "own scales in every pass, and its products cannot be kept",
    hint="leave out one of them; or --recompute-granularity full",
    values=("local", "selective"),
    is_conflict=True,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TokenizerChoice):
    """The options of a training run. Steps are optimizer steps; a sample is a row of `seq_length`.

    None stands for the default, which each option's help describes. The command line, YAML files
    and `finetune` use these names.

    Raises:
        UsageError: a value is out of its range, or two options exclude each other.
        LayoutError: the parallel sizes do not fit each other.
    """

    panels: ClassVar = (
        *(INPUT, TRAINING, PRECISION, MEMORY, LAYOUT, RUNNING, CHECKPOINTS, EVALUATION, QAT),
        *(OPTIMIZER, DATA_PARALLEL),
    )
    extra_needs: ClassVar = {IS_DECODER: ("fp8_recipe",)}
    rivals: ClassVar = (
        ("train_iters", "epochs"),
        ("lr_warmup_iters", "lr_warmup_fraction"),
        ("eval_data", "eval_split"),
        ("bf16", "fp16", "fp32"),
    )

    # ---- Input
    data: tuple[str, ...] = option(
        INPUT,
        "Training data: text, JSON lines, parquet, Megatron's .bin, or a data set "
        "NAME[:CONFIG][:SPLIT]; repeatable.",
        (),
        metavar="FILE",
    )
    blend: str | None = option(
        INPUT, "Weights of several --data: 0.7,0.3; default: their sizes.", metavar="LIST"
    )
    records: TextRecords = group(TextRecords)
    eval_data: str | None = option(INPUT, "Validation data, in the same formats.", metavar="FILE")
    eval_split: float = option(
        INPUT, "Share of --data to use as the validation split.", 0.0, minimum=0, below=1
    )
    overflow: Literal["split", "truncate", "error"] = option(
        INPUT, "What to do with samples longer than --seq-length.", "split"
    )
    packing: bool | None = option(
        INPUT,
        "Pack several texts into a row, each with its own attention; default, except with --eagle.",
    )
    all_turns: bool = option(
        INPUT, "Train on the users' turns as well, not only on the assistant's.", False
    )
    # ---- Training
    train_iters: int | None = option(
        TRAINING, "Steps; default: as many as --epochs take.", metavar="N", minimum=1
    )
    epochs: float | None = option(
        TRAINING, "Passes over the data; default: 1.", metavar="X", above=0
    )
    seq_length: int | None = option(
        TRAINING,
        "Tokens of a row; default: the model's positions, at most 2048.",
        metavar="N",
        minimum=1,
    )
    decoder_seq_length: int | None = option(
        TRAINING,
        "Tokens of a target (T5; --seq-length are those of its source); default: as many as texts "
        "with spans left out need, and --seq-length for prompts with completions.",
        metavar="N",
        minimum=1,
    )
    micro_batch_size: int = option(
        TRAINING, "Rows of a forward and backward pass.", 1, metavar="N", minimum=1
    )
    global_batch_size: int | None = option(
        TRAINING,
        "Rows of a step over all replicas; default: those of the resumed run, else one micro "
        "batch for each replica.",
        metavar="N",
        minimum=1,
    )
    seed: int = option(
        TRAINING,
        "Random seed of the order of the data and of dropout.",
        1234,
        metavar="N",
        minimum=0,
    )
    hidden_dropout: float = option(
        TRAINING,
        "Dropout of embeddings, and of the outputs of attention and MLP; Megatron's default is "
        "0.1.",
        0.0,
        metavar="X",
        minimum=0,
        below=1,
    )
    attention_dropout: float = option(
        TRAINING,
        "Dropout of attention weights; Megatron's default is 0.1.",
        0.0,
        metavar="X",
        minimum=0,
        below=1,
    )
    freeze: tuple[str, ...] = option(
        TRAINING,
        "Do not train parameters that match, by Megatron's names; repeatable.",
        (),
        metavar="GLOB",
        needs=unused_with({"lora_rank": "which trains adapters only"}),
    )
    exit_signal_handler: bool = option(
        TRAINING, "Exit with status 0 when SIGTERM has ended the run, which is saved.", False
    )
    exit_duration_in_mins: float | None = option(
        TRAINING, "Save and stop after so many minutes.", metavar="X"
    )
    # ---- Precision
    bf16: bool | None = option(PRECISION, "Train in bfloat16; default on a GPU.")
    fp16: bool | None = option(PRECISION, "Train in float16, with a loss scale.")
    fp32: bool | None = option(PRECISION, "Train in float32; default on a CPU.")
    # ---- Memory and overlap
    recompute_granularity: Literal["full", "selective"] | None = option(
        MEMORY,
        "Recompute activations in the backward pass: all, or all except matrix products.",
        needs=(_NOT_FP8_BY_TE,),
    )
    recompute_num_layers: int | None = option(
        MEMORY,
        "Layers of each stage to recompute; default: all.",
        metavar="N",
        minimum=1,
        needs=(requires("recompute_granularity"),),
    )
    sharding: DataParallelOptions = group(DataParallelOptions)
    optimizer: OptimizerConfig = group(OptimizerConfig)
    cuda_graph_impl: Literal["none", "local"] = option(
        MEMORY,
        "local: on a GPU, replay the forward and backward passes of each micro batch as one CUDA "
        "graph; gradients are then reduced after the last one.",
        "none",
        needs=(
            *excludes(
                {
                    "overlap_grad_reduce": "gradients are reduced after the graphs of all passes",
                    "overlap_param_gather": "a graph cannot wait for parameters",
                    "tp_comm_overlap": "rows of single ranks are waited for in a product",
                    "attention_dropout": "a graph cannot seed the generator of torch's attention",
                    "lora_dropout": "a graph cannot seed the generator of adapters",
                    "teacher": "the host passes the teacher's hidden states on for each batch",
                }
            ),
            _NOT_FP8_BY_TE,
            IS_DECODER,
            HAS_TOKENS,
        ),
    )
    # ---- Parallel layout
    parallel: TrainLayoutOptions = group(TrainLayoutOptions)
    # ---- Running
    device: str | None = option(RUNNING, "cpu, cuda or cuda:N; default: cuda if there is one.")
    kernels: Implementation = option(
        RUNNING,
        "Which implementation of fused operations runs. te: Transformer Engine's, with its modules "
        "for norms with linear layers, MLPs, experts and attention, as --dry-run lists them, and "
        "Adam. fla, mamba-ssm, causal-conv1d, liger, flash-attn, flash-attn-3: that package's, "
        "where it has the operation; auto takes the first four on a GPU, if they are installed.",
        "auto",
    )
    threads: int | None = option(RUNNING, "Threads; default: as many as torch uses.", minimum=1)
    # ---- Checkpoints
    load: Path | None = option(
        CHECKPOINTS,
        "Resume from the checkpoint of another run, in any format and layout.",
        metavar="CKPT",
    )
    resume: bool = option(CHECKPOINTS, "Resume from the newest checkpoint in DST.", True)
    save_interval: int | None = option(
        CHECKPOINTS,
        "Steps between checkpoints; default: save at the end only.",
        metavar="N",
        minimum=1,
    )
    most_recent_k: int | None = option(
        CHECKPOINTS, "Number of newest checkpoints to keep; default: all.", metavar="N", minimum=1
    )
    async_save: bool = option(CHECKPOINTS, "Continue training while a checkpoint is written.", True)
    dist_ckpt_optim_format: Literal["fully_reshardable", "dp_reshardable"] = option(
        CHECKPOINTS, "Format of optimizer state.", "fully_reshardable"
    )
    to: Literal["torch_dist", "hf"] = option(
        CHECKPOINTS,
        "hf: at the end, also write the model to DST/hf as a Hugging Face folder.",
        "torch_dist",
    )
    fsync: bool = option(CHECKPOINTS, "Make checkpoints survive a power failure.", True)
    # ---- Evaluation and logs
    eval_interval: int | None = option(
        EVALUATION,
        "Steps between evaluations; default: a tenth of the run.",
        metavar="N",
        minimum=1,
    )
    eval_iters: int | None = option(
        EVALUATION, "Global batches in an evaluation; default: all.", metavar="N", minimum=1
    )
    patience: int | None = option(
        EVALUATION,
        "Stop after so many evaluations without improvement.",
        metavar="N",
        minimum=1,
        needs=(requires(("eval_data", "eval_split")),),
    )
    log_interval: int = option(EVALUATION, "Steps between log messages.", 10, minimum=1)
    tensorboard: bool = option(EVALUATION, "Also log to DST/tensorboard.", False)
    # ---- Quantization-aware training and distillation
    qat: str | None = option(
        QAT,
        "Fake-quantize weights and inputs with this recipe, whose scales are learned by lsq; "
        "source: with the quantizers of SRC, a checkpoint of `quantize --to torch_dist` or "
        "ModelOpt's, which are saved as well.",
        metavar="RECIPE",
        needs=(*excludes({"fp8_recipe": "", "te_precision_config_file": ""}), IS_DECODER),
    )
    calibration: Path | None = option(
        QAT,
        "The calibration file of --qat.",
        metavar="FILE",
        needs=(
            requires("qat"),
            *unused_with({f"qat={QAT_SOURCE}": "whose quantizers are calibrated"}),
        ),
    )
    teacher: Path | None = option(
        QAT, "Distill from this checkpoint.", metavar="SRC", needs=(IS_DECODER, HAS_TOKENS)
    )
    teacher_tokenizer: Path | None = option(
        QAT,
        "A folder with the teacher's tokenizer; default: the one with it.",
        metavar="FOLDER",
        needs=(_IS_DISTILLED,),
    )
    distill_loss: Literal["kl", "uld", "gold"] = option(
        QAT,
        "kl: of models with one vocabulary; uld and gold: of models with different tokenizers, by "
        "spans of text that both share; uld compares sorted probabilities, gold those of common "
        "tokens by name.",
        "kl",
        needs=(_IS_DISTILLED,),
    )
    distill_temperature: float = option(
        QAT,
        "Temperature of both models' softmax.",
        1.0,
        metavar="X",
        above=0,
        needs=(_IS_DISTILLED,),
    )
    distill_weight: float = option(
        QAT,
        "Weight of the distillation loss; the loss on the data has the rest.",
        0.5,
        minimum=0,
        maximum=1,
        needs=(_IS_DISTILLED,),
    )
    distill_hidden_weight: float = option(
        QAT,
        "Weight of 1 - cos between both models' states behind layers.",
        0.0,
        minimum=0,
        needs=(_IS_DISTILLED,),
    )
    distill_layers: str | None = option(
        QAT,
        "Layers compared, of both models: 3:7,5:11; default: as deep in both.",
        metavar="LIST",
        needs=(requires("distill_hidden_weight"),),
    )

    # ---- Groups of single features
    fp8: Fp8Config = group(Fp8Config)
    overlap: OverlapOptions = group(OverlapOptions)
    losses: LossOptions = group(LossOptions)
    lora: LoraOptions = group(LoraOptions)
    eagle: str | None = option(
        "Speculative decoding",
        "Train an EAGLE-3 draft head through ModelOpt instead of the model's weights: ModelOpt's "
        "recipe of it, or default.",
        metavar="RECIPE",
        needs=TRAINS_HEAD,
    )
    profile: ProfileOptions = group(ProfileOptions)
    rows: RowBuildingOptions = group(RowBuildingOptions)
    source: SourceOptions = group(SourceOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_effects(self)
        _check_shares(self)
        _check_batch(self)
        _check_head(self)

    @property
    def layout(self) -> ParallelConfig:
        """The parallel layout; `dp` is the least that fits until `fit` fills the processes."""
        return self.parallel.layout

    @property
    def is_packed(self) -> bool:
        """Whether a row holds several texts."""
        return self.eagle is None if self.packing is None else self.packing

    @property
    def keeps_quantizers(self) -> bool:
        """Whether the run goes on with the quantizers of SRC, and saves them."""
        return self.qat == QAT_SOURCE

    @property
    def blend_shares(self) -> tuple[float, ...] | None:
        """The shares of `blend`, one for each of `data`."""
        if self.blend is None:
            return None
        return tuple(float(x) for x in self.blend.split(","))


def _check_shares(s: TrainConfig) -> None:
    try:
        shares = s.blend_shares
    except ValueError:
        shares = ()
    if shares is None:
        return
    if not shares or any(not math.isfinite(x) or x <= 0 for x in shares):
        raise UsageError(f"--blend is {s.blend!r}", hint="positive numbers with commas: 0.7,0.3")
    if len(shares) != len(s.data):
        raise UsageError(
            f"--blend has {len(shares)} shares, and there are {len(s.data)} --data",
            hint="one share for each --data, in the same order",
        )


def _check_batch(s: TrainConfig) -> None:
    if s.global_batch_size is not None and s.global_batch_size % s.micro_batch_size:
        raise UsageError(
            f"--global-batch-size {s.global_batch_size} is not a multiple of "
            f"--micro-batch-size {s.micro_batch_size}"
        )


def _check_head(s: TrainConfig) -> None:
    """Check that ranks of a run with a draft head have whole models and rows."""
    sizes = {axis: getattr(s.layout, axis) for axis in ("tp", "pp", "cp")}
    if wrong := [f"{axis}={size}" for axis, size in sizes.items() if size > 1 and s.eagle]:
        raise LayoutError(
            f"--eagle at {', '.join(wrong)}: each process has whole states and logits",
            hint="--tp 1 --pp 1 --cp 1; --dp splits the rows",
        )
