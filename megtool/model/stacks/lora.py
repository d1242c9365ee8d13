"""LoRA: trainable low-rank matrices next to the frozen linear layers of attention and MLP.

A layer `y = W x + b` becomes `y = W x + b + alpha / rank * B A x` (Hu et al., 2021). A fused layer
(queries, keys and values; gate and up) has one A, and the rows of its B lie as those of its weight.
Layers of experts have matrices for each (`megtool.model.stacks.lora`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megtool.errors import UsageError
from megtool.kernels.experts.grouped_gemm import grouped_linear
from megtool.model.attention.mla import DownLinear
from megtool.model.layers.linear import ColumnLinear, RowLinear, column_product
from megtool.model.layers.param_attributes import mark
from megtool.model.moe.experts import ExpertLinear
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.collectives import copy_to, reduce_from, reduce_scatter_rows
from megtool.parallel.process_groups import ALONE, Group
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.dtensor_shards import local_shard, own_shard, with_local_shard

if TYPE_CHECKING:
    from megtool.model.moe.experts import ExpertLinear

Linear = ColumnLinear | RowLinear | DownLinear

_LATENT = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
_MLPS = ("mlp", "mlp.experts.experts", "mlp.shared_experts")
ROLES = {
    "qkv": (
        *(f"self_attention.linear_{name}" for name in ("qkv", *_LATENT)),
        "self_attention.in_proj",
        "mixer.in_proj",
        "mamba_mixer.in_proj",
        "short_conv.in_proj",
    ),
    "proj": (
        "self_attention.linear_proj",
        "self_attention.out_proj",
        "mixer.out_proj",
        "mamba_mixer.out_proj",
        "short_conv.out_proj",
    ),
    "fc1": tuple(f"{mlp}.linear_fc1" for mlp in _MLPS),
    "fc2": tuple(f"{mlp}.linear_fc2" for mlp in _MLPS),
}
"""Where the linear layers of a role are in a layer, those of them that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Which layers get adapters, by role, and how large those are.

    `seed` decides about the A matrices, which do not depend on the layout.

    Raises:
        UsageError: a value is out of its range, or there is no such role.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    roles: tuple[str, ...] = tuple(ROLES)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"the rank of LoRA is {self.rank}", hint="1 or more")
        if not 0 <= self.dropout < 1:
            raise UsageError(
                f"the dropout of LoRA is {self.dropout}", hint="at least 0 and below 1"
            )
        if not self.roles:
            raise UsageError("LoRA is for no layer", hint=f"of {', '.join(ROLES)}")
        for role in self.roles:
            if role not in ROLES:
                raise UsageError(f"LoRA cannot be for {role!r}", hint=f"of {', '.join(ROLES)}")

    @property
    def scale(self) -> float:
        """The factor of the product of both matrices."""
        return self.alpha / self.rank


class Adapter(nn.Module):
    """The LoRA matrices of a layer: `lora_A` `[rank, in]` and `lora_B` `[out, rank]`, on this rank.

    Of a column-parallel layer B is cut as its rows are, of a row-parallel one A as its columns;
    the other matrix is whole on all ranks. Between the two, the ranks exchange `[T, rank]`. Of a
    layer that all ranks have whole both are.
    Dropout leaves out the same inputs at every tp size, where torch's generators are in the same
    state on all tp ranks. While the adapter `is_merged`, its part is in the layer's weight: it adds
    zeros, through which its matrices get their gradients, as if the weight's passed on to them.

    Of a layer whose inputs are divided by a `smoothing_scale` `[in]`, and whose weight is stored
    multiplied by it, the matrices are those for the weight and the inputs as they were before.
    """

    smoothing_scale: Tensor | None = None

    def __init__(self, linear: Linear, settings: LoraSettings) -> None:
        super().__init__()
        self.group, self.sequence_parallel = linear.group, linear.sequence_parallel
        self.is_column = isinstance(linear, ColumnLinear)
        self.is_whole = isinstance(linear, DownLinear)
        self.scale, self.dropout, self.is_merged = settings.scale, settings.dropout, False
        weight, is_full_sequence = linear.weight, self.sequence_parallel
        out, inner = weight.shape

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))

        column = self.is_column
        self.lora_A = mark(
            new(settings.rank, inner),
            split_dim=1 if self.is_row else None,
            partial=not self.is_row and is_full_sequence,
        )
        self.lora_B = mark(
            new(out, settings.rank),
            split_dim=0 if column else None,
            partial=not column and is_full_sequence,
        )

    @property
    def is_row(self) -> bool:
        """Ranks have other inputs each."""
        return not (self.is_column or self.is_whole)

    @torch.no_grad()
    def reset(self, seed: int, name: str) -> None:
        """Initialize: B is zero, A as in PEFT, determined by `seed` and the layer's `name`."""
        rank, inner = self.lora_A.shape
        full_inner = inner * self.group.size if self.is_row else inner
        begin = self.group.rank * inner if self.is_row else 0
        self.lora_A.copy_(drawn(rank, full_inner, f"{seed} {name}")[:, begin : begin + inner])
        self.lora_B.zero_()

    def forward(self, x_TI: Tensor) -> Tensor:
        """The addition to the layer's output, in this rank's rows and columns."""
        if self.is_merged:
            y = self._product(x_TI.detach())
            return y - y.detach()
        return self._product(x_TI)

    def _product(self, x_TI: Tensor) -> Tensor:
        x_TI = self._dropped(x_TI)
        h_TR = F.linear(x_TI, _smoothed(self.lora_A, self.smoothing_scale)) * self.scale
        if self.is_column:
            return column_product(h_TR, self.lora_B, None, self.group, self.sequence_parallel)
        if self.group.size > 1 and self.is_row:
            if self.sequence_parallel:
                h_TR = reduce_scatter_rows(h_TR, self.group)
            else:
                h_TR = reduce_from(h_TR, self.group)
        return F.linear(h_TR, self.lora_B)

    def delta(self) -> Tensor:
        """The addition to the layer's weight, float32, on this rank."""
        lora_A = _smoothed(self.lora_A.detach().float(), self.smoothing_scale)
        return self.lora_B.detach().float() @ lora_A * self.scale

    def _dropped(self, x_TI: Tensor) -> Tensor:
        """Inputs without those that are left out; drawn for all ranks' rows and columns."""
        if not self.training or not self.dropout:
            return x_TI
        rows, columns = ALONE, ALONE
        if not self.is_row and self.sequence_parallel:
            rows = self.group
        elif self.is_row:
            columns = self.group
        keep_mask = _local_part(_drawn(x_TI, rows, columns, 1 - self.dropout), x_TI, rows, columns)
        return x_TI * keep_mask.to(x_TI.dtype).mul_(1 / (1 - self.dropout))

    def extra_repr(self) -> str:
        """Shapes of this rank, human-readable."""
        return f"rank={self.lora_A.shape[0]}, scale={self.scale:g}, dropout={self.dropout:g}"


def _smoothed(lora_A: Tensor, smoothing_scale: Tensor | None) -> Tensor:
    """A for inputs that are divided by a smoothing scale, in its own dtype."""
    if smoothing_scale is None:
        return lora_A
    return (lora_A.float() * smoothing_scale.unsqueeze(-2)).to(lora_A.dtype)


def drawn(rank: int, width: int, name: str) -> Tensor:
    """A random A matrix as PEFT initializes it, determined by a name."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    bound = 1 / math.sqrt(width)  # kaiming_uniform_(a=sqrt(5))
    generator = torch.Generator().manual_seed(number)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


def _drawn(x_TI: Tensor, rows: Group, columns: Group, share: float) -> Tensor:
    shape = (x_TI.shape[0] * rows.size, x_TI.shape[1] * columns.size)
    return torch.empty(shape, dtype=torch.bool, device=x_TI.device).bernoulli_(share)


def _local_part(full: Tensor, x_TI: Tensor, rows: Group, columns: Group) -> Tensor:
    if rows.size == columns.size == 1:
        return full
    t, i = x_TI.shape
    return full[rows.rank * t :][:t, columns.rank * i :][:, :i].clone()


def check_experts(config: ModelConfig, settings: LoraSettings) -> None:
    """Refuse options that adapters of experts do not support.

    Raises:
        UsageError: dropout, which PEFT has none of where all experts are one parameter.
    """
    if layer_sets.moe_layers(config) and settings.dropout and {"fc1", "fc2"} & set(settings.roles):
        raise UsageError(
            f"LoRA dropout {settings.dropout:g} for experts, which take none",
            hint="--lora-dropout 0, or --lora-target qkv,proj",
        )


def add_adapters(stages: Sequence[Decoder], settings: LoraSettings) -> int:
    """Freeze a model and add adapters to its linear layers; returns the number of local elements.

    To be called when the weights are loaded: adapters have their type and device.

    Raises:
        UsageError: dropout for experts.
    """
    check_experts(stages[0].config, settings)
    added = 0
    for decoder in stages:
        decoder.requires_grad_(False)
        for name, linear in list(layers_for(decoder, settings)):
            adapter: Adapter | ExpertAdapter
            if isinstance(linear, ExpertLinear):
                adapter = ExpertAdapter(linear, decoder.groups.ep, settings)
            else:
                adapter = Adapter(linear, settings)
            adapter.reset(settings.seed, name)
            adapter.train(linear.training)
            linear.adapter = adapter
            added += adapter.lora_A.numel() + adapter.lora_B.numel()
    return added


def layers_for(
    decoder: Decoder, settings: LoraSettings
) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """The layers of this rank that settings ask adapters for, by Megatron's names.

    Raises:
        UsageError: one of them is a part of another module.
    """
    modules = dict(decoder.named_modules())
    for number in decoder.stage.layers:
        for place in (p for role in settings.roles for p in ROLES[role]):
            name = f"decoder.layers.{number}.{place}"
            linear = modules.get(name)
            if linear is None:
                continue
            if not isinstance(linear, Linear | ExpertLinear):
                raise UsageError(f"LoRA for {name}, which is not a separate linear layer")
            yield name, linear


def adapters_of(
    decoder: Decoder,
) -> Iterator[tuple[str, Linear | ExpertLinear, Adapter | ExpertAdapter]]:
    """The layers that have adapters, by Megatron's names."""
    for name, module in decoder.named_modules():
        if not isinstance(module, Linear | ExpertLinear):
            continue
        if isinstance(module.adapter, Adapter | ExpertAdapter):
            yield name, module, module.adapter


def merged_weight(
    linear: Linear | ExpertLinear, adapter: Adapter | ExpertAdapter, weight: Tensor | None = None
) -> Tensor:
    """The weight (`weight` if the layer does not hold it) with its adapter's part in it, rounded
    once to the weight's type; sharded as it is."""
    weight = linear.weight.detach() if weight is None else weight
    if isinstance(weight, DTensor):
        merged = local_shard(weight).float() + own_shard(adapter.delta(), weight)
        return with_local_shard(weight, merged.to(weight.dtype))
    return (weight.float() + adapter.delta()).to(weight.dtype)


@torch.no_grad()
def merge(stages: Sequence[Decoder]) -> None:
    """Put adapters into the weights, and take them away."""
    for decoder in stages:
        for _, linear, adapter in list(adapters_of(decoder)):
            linear.weight.copy_(merged_weight(linear, adapter))
            linear.adapter = None


class ExpertAdapter(nn.Module):
    """The LoRA matrices for a layer of all local experts: `lora_A` `[E, rank, in]`, `lora_B` `[E,
    out, rank]`.

    Where etp cuts the outputs (`split_dim` 1) B is cut as they are, else A as the inputs are.
    `smoothing_scale` is `[E, in]`.
    """

    smoothing_scale: Tensor | None = None

    def __init__(self, linear: ExpertLinear, ep: Group, settings: LoraSettings) -> None:
        super().__init__()
        self.ep, self.etp, self.split_dim = ep, linear.group, linear.split_dim
        self.scale, self.is_merged, weight = settings.scale, False, linear.weight
        experts, out, inner = weight.shape

        def new(*shape: int, split: int | None) -> nn.Parameter:
            parameter = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
            return mark(parameter, split_dim=split if self.etp.size > 1 else None, expert=True)

        column = self.is_column
        self.lora_A = new(experts, settings.rank, inner, split=None if column else 2)
        self.lora_B = new(experts, out, settings.rank, split=1 if column else None)

    @property
    def is_column(self) -> bool:
        """Ranks of an etp group have other outputs each, not other inputs."""
        return self.split_dim == 1

    @torch.no_grad()
    def reset(self, seed: int, name: str) -> None:
        """Initialize as `Adapter` does; each expert has its own values."""
        from megtool.model.stacks.lora import drawn

        if self.lora_A.is_meta:  # shapes alone
            return
        experts, rank, inner = self.lora_A.shape
        full_inner = inner if self.is_column else inner * self.etp.size
        begin = 0 if self.is_column else self.etp.rank * inner
        for e in range(experts):
            number = self.ep.rank * experts + e
            matrix = drawn(rank, full_inner, f"{seed} {name}.{number}")
            self.lora_A[e].copy_(matrix[:, begin : begin + inner])
        self.lora_B.zero_()

    def forward(self, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        """The addition to the rows of the layer's result, which are sorted by expert."""
        if self.is_merged:
            y = self._product(rows_RI.detach(), counts_E)
            return y - y.detach()
        return self._product(rows_RI, counts_E)

    def _product(self, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        lora_A: Tensor = _smoothed(self.lora_A, self.smoothing_scale)
        lora_B: Tensor = self.lora_B
        if self.is_column:
            lora_A = copy_to(lora_A, self.etp)
        else:
            lora_B = copy_to(lora_B, self.etp)
        h_RK = grouped_linear(rows_RI, lora_A, counts_E) * self.scale
        return grouped_linear(h_RK, lora_B, counts_E)

    def delta(self) -> Tensor:
        """The addition to the layer's weight, float32, on this rank."""
        lora_A = _smoothed(self.lora_A.detach().float(), self.smoothing_scale)
        return self.lora_B.detach().float() @ lora_A * self.scale

    def extra_repr(self) -> str:
        """Shapes of this rank, human-readable."""
        experts, rank, _ = self.lora_A.shape
        return f"{experts} experts, rank={rank}, scale={self.scale:g}"
