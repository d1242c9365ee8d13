"""Megatron-Core on a GPU: a Llama, its distributed optimizer, and a step of training."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.gpu import SHAPES


def why_not(*, te: bool = False) -> str | None:
    """Why it cannot run here, None if it can; with `te` by Transformer Engine's modules."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return "megatron-core is not installed"
    if not te:
        return None
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    try:
        import transformer_engine.pytorch  # noqa: F401
    # Its libraries may not be those of torch.
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine does not load: {str(error).strip().partition(chr(10))[0]}"
    return None


def start() -> None:
    """A world of this process alone, which Megatron needs before a model; once for a process."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)


def model(name: str, *, te: bool, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """A Llama of a shape on the GPU, and its configuration; weights are to be filled in."""
    import torch.nn.functional as F
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    layers, hidden, ffn, heads, key_heads, vocabulary = SHAPES[name]
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=key_heads,
        kv_channels=hidden // heads,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Its own fusions are torch's; these need Transformer Engine, and the first Apex for the
        # output layer, which is Megatron's own.
        gradient_accumulation_fusion=te and find_spec("fused_weight_gradient_mlp_cuda") is not None,
        apply_rope_fusion=te,
        masked_softmax_fusion=False,
        persist_layer_norm=te,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        cross_entropy_loss_fusion=True,
    )
    spec = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        if te
        else gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    )
    made: nn.Module = GPTModel(
        config,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=8192,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
    ).cuda()
    return config, made if dtype == torch.float32 else Float16Module(config, made)


@torch.no_grad()
def copy_weights(into: nn.Module, weights: dict[str, Tensor]) -> None:
    """Take a decoder's weights, which has Transformer Engine's names of norms."""
    for name, parameter in into.named_parameters():
        name = name.removeprefix("module.")
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if name not in weights:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        parameter.copy_(weights[name])


def step_of(
    config: Any,
    made: nn.Module,
    tokens: Tensor,
    *,
    lr: float,
    weight_decay: float,
    clip_grad: float,
) -> Callable[[], Tensor]:
    """A step of training on the same tokens, by its distributed optimizer; gives the mean loss."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        made,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=lr,
            weight_decay=weight_decay,
            clip_grad=clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [wrapped],
        use_gloo_process_groups=False,
    )
    optimizer.reload_model_params()
    for group in optimizer.param_groups:  # as its scheduler does: no decay of norms
        group["weight_decay"] = weight_decay * group["wd_mult"]
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)

    def step() -> Tensor:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss: Tensor = wrapped(inputs, positions, None, labels=labels).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        wrapped.finish_grad_sync()
        optimizer.step()
        return loss.detach()

    return step
