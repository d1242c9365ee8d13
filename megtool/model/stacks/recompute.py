"""Activation recomputation: layers whose activations are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megtool.errors import UsageError
from megtool.kernels.attention.dot_product import OPERATION
from megtool.kernels.dispatch import requested_implementation, use
from megtool.kernels.transformer_engine.linear import Contexts, contexts_again
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.encoder_decoder import EncoderDecoder
from megtool.model.stacks.layer import TransformerLayer
from megtool.model.stacks.lora import Adapter
from megtool.model.stacks.unpacked_forward import UnpackedForward
from megtool.options.kernels import Implementation

Granularity = Literal["full", "selective"]

# What is dear to compute, and is kept by "selective": products of matrices, and attention.
_KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(torch.ops.aten, name)
) | {OPERATION}


def recompute(
    stages: Decoder | Sequence[Decoder], granularity: Granularity, num_layers: int | None = None
) -> int:
    """Compute the first `num_layers` layers of each stage (default: all, those of multi-token
    prediction as well) again when going back, and as many of an encoder.

    "full" keeps a layer's input alone; "selective" also what its matrix products and attention
    gave, so that only norms, rotations and activations are computed twice. Values and gradients
    stay what they were, bit for bit. Of a decoder that is not in training mode, or without
    gradients, nothing changes. Returns how many layers it is.

    Raises:
        UsageError: there is no such granularity, or fewer than one layer.
    """
    if granularity not in ("full", "selective"):
        raise UsageError(f"recompute is {granularity!r}", hint="full or selective")
    if num_layers is not None and num_layers < 1:
        raise UsageError(f"recompute is of {num_layers} layers", hint="1 or more")
    chosen: list[nn.Module] = []
    for decoder in [stages] if isinstance(stages, Decoder) else stages:
        chosen += [decoder.decoder.layers[str(n)] for n in decoder.stage.layers[:num_layers]]
        if isinstance(decoder, EncoderDecoder):
            chosen += list(decoder.encoder.layers.values())[:num_layers]
        if decoder.mtp is not None and num_layers is None:
            chosen += [m for m in decoder.mtp.modules() if isinstance(m, TransformerLayer)]
    for layer in chosen:
        layer.forward = _Again(layer, layer.forward, granularity)
    return len(chosen)


class _Again:
    """A layer's forward pass that is run a second time in the backward pass.

    By the kernels of the first time: what these save for the backward pass is their own, and a
    thread of autograd's does not know which were asked for. Where nothing learns, layer or what
    comes before, no backward pass comes, and nothing is kept for one.
    """

    def __init__(
        self, layer: nn.Module, forward: Callable[..., Tensor], granularity: Granularity
    ) -> None:
        self._layer, self._forward = layer, forward
        if isinstance(forward, UnpackedForward):
            forward.is_recomputed = True
        self._contexts: Any = contexts_again if granularity == "full" else _kept_products

    def __call__(self, x_TH: Tensor, frame: Any) -> Tensor:
        if not (self._layer.training and torch.is_grad_enabled() and self._learns(x_TH)):
            return self._forward(x_TH, frame)
        out: Tensor = checkpoint(
            self._by,
            requested_implementation(),
            x_TH,
            frame,
            use_reentrant=False,
            context_fn=self._contexts,
            determinism_check="none",
            # Other dropout has seeds of its own, and a CUDA graph cannot ask for the state.
            preserve_rng_state=any(
                isinstance(m, Adapter) and m.dropout for m in self._layer.modules()
            ),
        )
        return out

    def _by(self, kernels: Implementation, x_TH: Tensor, frame: Any) -> Tensor:
        with use(kernels):
            return self._forward(x_TH, frame)

    def _learns(self, x_TH: Tensor) -> bool:
        return x_TH.requires_grad or any(p.requires_grad for p in self._layer.parameters())


def _kept_products() -> Contexts:
    make: Callable[[Any], Contexts] = create_selective_checkpoint_contexts
    return make(_policy)


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
