"""Settings of a training run: every option once, with Megatron's name, its default and its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megtool.config import ParallelConfig
from megtool.train.config_checks import check_train_config

# ruff: noqa: RUF009 - `said` makes fields, as `dataclasses.field` does

INPUT, TRAINING, OPTIMIZER = "Input", "Training", "Optimizer"
EXPERTS = "Mixture of experts"
PRECISION, MEMORY, LAYOUT = "Numbers", "Memory and overlap", "Parallel layout"
RUNNING, CHECKPOINTS, EVALUATION = "Running", "Checkpoints", "Watching"
LORA, QAT = "LoRA", "Quantization-aware training and distillation"


def option(
    panel: str,
    help_text: str,
    default: Any = None,
    *,
    metavar: str | None = None,
    minimum: float | None = None,
    alias: str | None = None,
) -> Any:
    """A field that is an option: its panel and help, `least` allowed, and `also` another flag."""
    metadata = {"panel": panel, "help": help_text, "metavar": metavar, "min": minimum, "also": alias}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What a run is asked for. Steps are optimizer steps; a sample is one row of `seq_length`.

    None is "not given": what it then becomes is in the help of each. The command line, the YAML
    and `finetune` take these names.

    Raises:
        UsageError: a value is out of its range, or two options exclude each other.
        LayoutError: the parallel sizes do not fit each other.
    """

    # ---- Input
    data: tuple[str, ...] = option(
        INPUT,
        "Text to learn: text, JSON lines, parquet, Megatron's .bin, or a data set "
        "NAME[:CONFIG][:SPLIT]; repeatable.",
        (),
        metavar="FILE",
    )
    blend: str | None = option(
        INPUT, "Shares of several --data: 0.7,0.3; default: by their sizes.", metavar="LIST"
    )
    field: str | None = option(INPUT, "The field of a record with its text.", metavar="NAME")
    split: str | None = option(INPUT, "The split of a data set.", metavar="NAME")
    eval_data: str | None = option(INPUT, "Text to evaluate on, never learned.", metavar="FILE")
    eval_split: float = option(INPUT, "Keep this share of --data for evaluation.", 0.0, minimum=0)
    overflow: Literal["split", "truncate", "error"] = option(
        INPUT, "What becomes of samples longer than --seq-length.", "split"
    )
    packing: bool = option(INPUT, "Let several texts share a row; they do not see each other.", True)
    train_on_inputs: bool = option(INPUT, "Learn what users say too, not the answers alone.", False)
    data_cache_path: Path | None = option(
        INPUT, "Where encoded data is kept; default: in DST.", metavar="FOLDER"
    )
    tokenizer: Path | None = option(
        INPUT, "A folder with the tokenizer; default: the one beside SRC.", metavar="FOLDER"
    )
    iteration: str | None = option(
        INPUT, "Iteration of a save folder; default: the latest.", metavar="N"
    )
    family: str | None = option(
        INPUT, "The model family, if the checkpoint names none.", metavar="NAME"
    )
    like: Path | None = option(
        INPUT, "A Hugging Face folder to take config and tokenizer from.", metavar="FOLDER"
    )
    # ---- Training
    train_iters: int | None = option(
        TRAINING, "Steps; default: as many as --epochs take.", metavar="N", minimum=1
    )
    epochs: float | None = option(TRAINING, "Passes over the data; default: 1.", metavar="X")
    seq_length: int | None = option(
        TRAINING,
        "Tokens of a row; default: the model's positions, 2048 at most.",
        metavar="N",
        minimum=1,
    )
    micro_batch_size: int = option(TRAINING, "Rows of one pass.", 1, metavar="N", minimum=1)
    global_batch_size: int | None = option(
        TRAINING,
        "Rows of a step on all replicas together; default: those of the run that goes on, else one "
        "micro batch each.",
        metavar="N",
        minimum=1,
    )
    seed: int = option(
        TRAINING,
        "Decides the order of the data, and what dropout leaves out.",
        1234,
        metavar="N",
        minimum=0,
    )
    hidden_dropout: float = option(
        TRAINING,
        "Share left out of embeddings, and of what attention and MLP add to the residual; "
        "Megatron's own default is 0.1.",
        0.0,
        metavar="X",
        minimum=0,
    )
    attention_dropout: float = option(
        TRAINING,
        "Share of attention's weights left out; Megatron's own default is 0.1.",
        0.0,
        metavar="X",
        minimum=0,
    )
    freeze: tuple[str, ...] = option(
        TRAINING,
        "Leave parameters as they are, by Megatron's names; repeatable.",
        (),
        metavar="GLOB",
    )
    exit_signal_handler: bool = option(TRAINING, "On SIGTERM save, and end the run.", False)
    exit_duration_in_mins: float | None = option(
        TRAINING, "Save and end the run after so many minutes.", metavar="X"
    )
    # ---- Optimizer
    optimizer: Literal["adam", "sgd", "muon"] = option(
        OPTIMIZER,
        "adam is AdamW; muon: Muon for matrices (each expert's; q, k and v apart), AdamW for the "
        "rest.",
        "adam",
    )
    lr: float = option(OPTIMIZER, "Highest learning rate.", 1e-5, metavar="X", minimum=0)
    min_lr: float = option(OPTIMIZER, "Lowest learning rate.", 0.0, metavar="X", minimum=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        OPTIMIZER, "How the learning rate falls.", "linear"
    )
    lr_decay_iters: int | None = option(
        OPTIMIZER, "Steps until --min-lr; default: --train-iters.", metavar="N", minimum=1
    )
    lr_warmup_iters: int | None = option(
        OPTIMIZER,
        "Steps in which the learning rate rises.",
        metavar="N",
        minimum=0,
        alias="--lr-warmup-steps",
    )
    lr_warmup_fraction: float | None = option(
        OPTIMIZER, "The same as a share of --lr-decay-iters.", metavar="X", minimum=0
    )
    lr_warmup_init: float = option(OPTIMIZER, "The learning rate it rises from.", 0.0, metavar="X")
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = option(
        OPTIMIZER, "How WSD ends.", "exponential"
    )
    lr_wsd_decay_iters: int | None = option(OPTIMIZER, "Steps of WSD's end.", metavar="N", minimum=1)
    weight_decay: float = option(
        OPTIMIZER, "Decay of matrices; biases and norms have none.", 0.01, metavar="X", minimum=0
    )
    start_weight_decay: float | None = option(
        OPTIMIZER, "Decay at the first step; default: --weight-decay.", metavar="X", minimum=0
    )
    end_weight_decay: float | None = option(
        OPTIMIZER, "Decay at the last step; default: --weight-decay.", metavar="X", minimum=0
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        OPTIMIZER, "How decay goes from the first to the last.", "constant"
    )
    adam_beta1: float = option(OPTIMIZER, "Memory of Adam's first moment.", 0.9, metavar="X")
    adam_beta2: float = option(OPTIMIZER, "Memory of its second moment.", 0.999, metavar="X")
    adam_eps: float = option(OPTIMIZER, "Adam's epsilon.", 1e-8, metavar="X")
    sgd_momentum: float = option(OPTIMIZER, "Momentum of sgd.", 0.9, metavar="X")
    muon_momentum: float = option(OPTIMIZER, "Momentum of muon.", 0.95, metavar="X")
    clip_grad: float = option(
        OPTIMIZER, "Largest norm of all gradients; 0: any.", 1.0, metavar="X", minimum=0
    )
    lr_mult: tuple[str, ...] = option(
        OPTIMIZER,
        "Multiply the learning rate of parameters: '*.bias=0.1'; repeatable.",
        (),
        metavar="GLOB=X",
    )
    wd_mult: tuple[str, ...] = option(
        OPTIMIZER,
        "Multiply the weight decay of parameters; repeatable.",
        (),
        metavar="GLOB=X",
    )
    # ---- Mixture of experts
    moe_aux_loss_coeff: float = option(
        EXPERTS, "Weight of the loss that keeps experts evenly busy.", 0.0, metavar="X", minimum=0
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] | None = option(
        EXPERTS, "Busy over a micro batch, or in each of its rows; default: aux_loss."
    )
    moe_z_loss_coeff: float = option(
        EXPERTS, "Weight of the loss that keeps routers' logits small.", 0.0, metavar="X", minimum=0
    )
    moe_router_bias_update_rate: float = option(
        EXPERTS,
        "Move the bias that chooses experts so far a step, towards those with less to do.",
        0.0,
        metavar="X",
        minimum=0,
    )
    moe_losses_from_checkpoint: bool = option(
        EXPERTS, "Take the weights of both losses from the checkpoint, where none is given.", False
    )
    # ---- Numbers
    bf16: bool | None = option(PRECISION, "Compute in bfloat16; default on a GPU.")
    fp16: bool | None = option(PRECISION, "Compute in float16, with a loss scale.")
    fp32: bool | None = option(PRECISION, "Compute in float32; default on a CPU.")
    loss_scale: float | None = option(
        PRECISION, "A constant loss scale; default: one that adapts.", metavar="X"
    )
    initial_loss_scale: float = option(PRECISION, "Where it begins.", 65536.0, metavar="X", minimum=1)
    min_loss_scale: float = option(PRECISION, "Where it ends.", 1.0, metavar="X")
    loss_scale_window: int = option(
        PRECISION, "Good steps until it doubles.", 1000, metavar="N", minimum=1
    )
    hysteresis: int = option(PRECISION, "Bad steps until it halves.", 2, metavar="N", minimum=1)
    grad_reduce_in_bf16: bool = option(
        PRECISION, "Add gradients up in the model's type, not in float32.", False
    )
    store_param_remainders: bool = option(
        PRECISION, "Keep of master weights only what bfloat16 weights lack: 16 bits.", False
    )
    exp_avg_dtype: Literal["fp32", "bf16"] = option(PRECISION, "Type of both moments.", "fp32")
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = option(
        PRECISION,
        "Compute linear layers in FP8, by this recipe; with --kernels te by Transformer Engine, "
        "which alone has mxfp8.",
    )
    fp8_format: Literal["hybrid", "e4m3"] = option(PRECISION, "hybrid: gradients in e5m2.", "hybrid")
    fp8_amax_history_len: int = option(PRECISION, "Steps of delayed scaling.", 1024, minimum=1)
    fp8_amax_compute_algo: Literal["max", "most_recent"] = option(
        PRECISION, "Which of these steps tells.", "max"
    )
    fp8_margin: int = option(PRECISION, "Halve its scales so many times.", 0)
    fp8_param_gather: bool = option(PRECISION, "Gather parameters as FP8.", False)
    num_layers_at_start_in_bf16: int = option(PRECISION, "First layers without FP8.", 0, minimum=0)
    num_layers_at_end_in_bf16: int = option(PRECISION, "Last layers without FP8.", 0, minimum=0)
    # ---- Memory and overlap
    recompute_granularity: Literal["full", "selective"] | None = option(
        MEMORY, "Compute layers again backward: all, or all but their matrix products."
    )
    recompute_num_layers: int | None = option(
        MEMORY, "So many layers of each stage; default: all.", metavar="N", minimum=1
    )
    use_distributed_optimizer: bool | None = option(
        MEMORY, "Share optimizer state out over replicas; default: where there are several."
    )
    overlap_grad_reduce: bool = option(MEMORY, "Add gradients up during the backward pass.", False)
    overlap_param_gather: bool = option(MEMORY, "Gather parameters during the forward pass.", False)
    ddp_bucket_size: int | None = option(
        MEMORY, "Elements of a bucket of gradients.", metavar="N", minimum=1
    )
    optimizer_cpu_offload: bool = option(
        MEMORY, "Keep and update optimizer state on the CPU; all of it, if no share is told.", False
    )
    optimizer_offload_fraction: float = option(
        MEMORY, "Share of optimizer state that stays on the CPU.", 0.0, metavar="X", minimum=0
    )
    cuda_graph_impl: Literal["none", "local"] = option(
        MEMORY,
        "local: on a GPU, replay each micro batch there and back as one CUDA graph; replicas then "
        "add up after the last one.",
        "none",
    )
    # ---- Parallel layout
    tp: int = option(LAYOUT, "Tensor-parallel ranks, started by torchrun.", 1, minimum=1)
    pp: int = option(LAYOUT, "Pipeline-parallel ranks.", 1, minimum=1)
    vpp: int | None = option(LAYOUT, "Virtual pipeline stages per rank.", minimum=1)
    ep: int = option(LAYOUT, "Expert-parallel ranks.", 1, minimum=1)
    etp: int | None = option(LAYOUT, "Tensor-parallel ranks of experts; default: --tp.", minimum=1)
    cp: int = option(
        LAYOUT,
        "Context-parallel ranks, which share each row's tokens out.",
        1,
        minimum=1,
        alias="--context-parallel-size",
    )
    dp: int | None = option(LAYOUT, "Replicas; default: what fills the processes.", minimum=1)
    sequence_parallel: bool = option(LAYOUT, "Share tokens out over --tp between layers.", False)
    first_stage_layers: int | None = option(LAYOUT, "Layers of the first stage.", minimum=1)
    last_stage_layers: int | None = option(LAYOUT, "Layers of the last stage.", minimum=1)
    account_for_embedding: bool = option(LAYOUT, "Count the embedding as a layer.", False)
    account_for_loss: bool = option(LAYOUT, "Count the loss as a layer.", False)
    pipeline_layout: str | None = option(
        LAYOUT, "Layers of every stage in Megatron's words, such as Et*3|(tt|)*29L.", metavar="TEXT"
    )
    # ---- Running
    device: str | None = option(RUNNING, "cpu, cuda or cuda:N; default: cuda where there is one.")
    kernels: Literal["auto", "torch", "triton", "compile", "te"] = option(
        RUNNING, "Which implementation of fused operations runs.", "auto"
    )
    threads: int | None = option(RUNNING, "Threads; default: torch's own number.", minimum=1)
    # ---- Checkpoints
    load: Path | None = option(
        CHECKPOINTS, "Go on from this run's checkpoint, in any format and layout.", metavar="CKPT"
    )
    resume: bool = option(CHECKPOINTS, "Go on from the newest checkpoint in DST.", True)
    save_interval: int | None = option(
        CHECKPOINTS, "Steps between checkpoints; default: one at the end.", metavar="N", minimum=1
    )
    most_recent_k: int | None = option(
        CHECKPOINTS, "Keep so many checkpoints; default: all.", metavar="N", minimum=1
    )
    async_save: bool = option(CHECKPOINTS, "Train on while a checkpoint is written.", True)
    dist_ckpt_optim_format: Literal["fully_reshardable", "dp_reshardable"] = option(
        CHECKPOINTS, "Format of optimizer state.", "fully_reshardable"
    )
    to: Literal["torch_dist", "hf"] = option(
        CHECKPOINTS, "hf: write the model to DST/hf as well, at the end.", "torch_dist"
    )
    fsync: bool = option(CHECKPOINTS, "Make checkpoints survive a power cut.", True)
    # ---- Watching
    eval_interval: int | None = option(
        EVALUATION, "Steps between evaluations; default: ten in the run.", metavar="N", minimum=1
    )
    eval_iters: int | None = option(
        EVALUATION, "Global batches of an evaluation; default: all.", metavar="N", minimum=1
    )
    patience: int | None = option(
        EVALUATION, "End after so many evaluations without a better one.", metavar="N", minimum=1
    )
    log_interval: int = option(EVALUATION, "Steps between lines on the screen.", 10, minimum=1)
    tensorboard: bool = option(EVALUATION, "Also log to DST/tensorboard.", False)
    # ---- LoRA
    lora_rank: int | None = option(
        LORA, "Train matrices of this rank beside the linear layers.", metavar="N", minimum=1
    )
    lora_alpha: float | None = option(LORA, "Their scale is alpha / rank; default: 2 x rank.")
    lora_dropout: float = option(LORA, "Share of their inputs left out.", 0.0, minimum=0)
    lora_target: str = option(
        LORA,
        "Which layers: qkv (and latent attention's), proj, fc1, fc2 (and experts').",
        "qkv,proj,fc1,fc2",
        metavar="LIST",
    )
    # ---- Quantization-aware training and distillation
    qat: str | None = option(QAT, "Round weights and inputs by this recipe.", metavar="RECIPE")
    calibration: Path | None = option(QAT, "The calibration file of --qat.", metavar="FILE")
    teacher: Path | None = option(QAT, "A checkpoint whose logits are learned.", metavar="SRC")
    distill_temperature: float = option(QAT, "Temperature of both logits.", 1.0, metavar="X")
    distill_weight: float = option(
        QAT, "Share of the teacher in the loss; the rest is the text's.", 0.5, minimum=0
    )

    def __post_init__(self) -> None:
        check_train_config(self)

    @property
    def layout(self) -> ParallelConfig:
        """The parallel layout; `dp` may grow to fill the processes."""
        return ParallelConfig(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp or 0,
            ep=self.ep,
            etp=self.etp or 0,
            cp=self.cp,
            dp=self.dp or 0,
            first_stage_layers=self.first_stage_layers,
            last_stage_layers=self.last_stage_layers,
            account_for_embedding=self.account_for_embedding,
            account_for_loss=self.account_for_loss,
            pipeline_layout=self.pipeline_layout,
        )

    @property
    def blend_shares(self) -> tuple[float, ...] | None:
        """The shares of `blend`, one for each of `data`."""
        if self.blend is None:
            return None
        return tuple(float(x) for x in self.blend.split(","))
