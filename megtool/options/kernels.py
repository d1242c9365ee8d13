"""Names of implementations of fused operations, as `--kernels` takes them."""

from __future__ import annotations

from typing import Literal

Peer = Literal["fla", "mamba-ssm", "causal-conv1d", "liger", "flash-attn", "flash-attn-3"]
"""Packages whose kernels stand for megtool's own (`megtool.kernels.peers`)."""
Implementation = Literal["auto", "torch", "triton", "compile", "te", Peer]
