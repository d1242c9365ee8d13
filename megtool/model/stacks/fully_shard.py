"""Parameters and gradients of a model sharded over replicas by torch's `fully_shard` (FSDP2).

Each layer is gathered before it is run and freed behind it, and what is outside of layers (the
embedding, the last norm, the output layer) stays from the forward pass to the end of the backward
pass. Gradients are summed into this rank's shard at the end of a layer's backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from megtool.errors import MissingPackageError
from megtool.model.attention.relative_bias import RelativeBias
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.param_attributes import is_marked
from megtool.model.moe.experts import Experts
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.layer import TransformerLayer
from megtool.parallel.process_groups import ProcessGroups
from megtool.tensors.dtensor_shards import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard


def require_fully_shard() -> None:
    """Check that torch has all that is used of `fully_shard`.

    Raises:
        MissingPackageError: it is older.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        is_complete = False
    else:
        is_complete = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    if not is_complete:
        raise MissingPackageError(
            f"torch {torch.__version__} cannot sum the gradients of sharded parameters without "
            "dividing them",
            hint="pip install 'torch>=2.9', or --data-parallel-sharding-strategy optim",
        )


@dataclass(slots=True, kw_only=True)
class FullyShard:
    """Shards the parameters of loaded decoders over `groups.shards`, of experts over their own.

    Trained parameters become fp32 shards, which are cast to the decoder's dtype when they are
    gathered; frozen ones keep their dtype. Parameters of another dtype than the decoder's and
    frozen vectors (the bias that chooses experts) stay whole on every rank, as do experts without
    replicas. With `reshard_after_forward` layers are
    freed after the forward pass and gathered again in the backward pass (ZeRO-3), otherwise freed
    after the backward pass (ZeRO-2). Gradients are sent in fp32, or `in_param_dtype`. Several
    instances of replicas have the same shards, and sum their gradients (HSDP). `prepare` is called
    with decoders before they are loaded; it may freeze parameters.

    Raises:
        MissingPackageError: torch's own is too old.
    """

    groups: ProcessGroups
    reshard_after_forward: bool
    in_param_dtype: bool = False
    prepare: Callable[[Sequence[Decoder]], object] | None = None
    _meshes: dict[bool, DeviceMesh] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_fully_shard()

    def shard_layers(self, decoder: Decoder) -> None:
        """Shard the layers whose parameters are all loaded, and which are not sharded yet."""
        for layer in decoder.modules():
            is_loaded = not any(p.is_meta for p in layer.parameters())
            if is_layer(layer) and is_loaded and not is_fully_sharded(layer):
                self._shard_layer(decoder, layer)

    def shard_rest(self, decoder: Decoder) -> None:
        """Shard what is outside of layers, after these."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        if self.groups.shards.size > 1:
            self._shard(decoder, decoder, reshard_after_forward=False)
            for method in ("advance", "hidden"):
                register_fsdp_forward_method(decoder, method)

    def _shard_layer(self, decoder: Decoder, layer: nn.Module) -> None:
        is_again = self.reshard_after_forward
        if self.groups.expert_shards.size > 1:
            for module in layer.modules():
                if isinstance(module, Experts):
                    self._shard(decoder, module, reshard_after_forward=is_again, is_expert=True)
        if self.groups.shards.size > 1:
            self._shard(decoder, layer, reshard_after_forward=is_again)
            # torch replaces arguments that need gradients by others, in copies of dataclasses, and
            # layers share what is in the context of their pass.
            layer.register_forward_pre_hook(_hide_context, prepend=True)
            layer.register_forward_pre_hook(_show_context)

    def _shard(
        self,
        decoder: Decoder,
        module: nn.Module,
        *,
        reshard_after_forward: bool,
        is_expert: bool = False,
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = decoder.dtype
        marks = {name: dict(p.__dict__) for name, p in module.named_parameters()}
        # A pass computes all layers' position biases before it runs the first one.
        biases = [m for m in module.modules() if isinstance(m, RelativeBias)]
        ignored = {p for m in biases for p in m.parameters() if module is not decoder}
        for p in module.parameters():
            if is_sharded(p) or p in ignored:
                continue
            is_small = p.dim() == 0 or (p.dim() == 1 and not p.requires_grad)
            if p.dtype != dtype or is_small or is_expert == is_marked(p, "allreduce"):
                ignored.add(p)
            elif p.requires_grad:
                p.data = p.data.float()
        mesh = self._mesh(is_expert=is_expert)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=partial(_place_experts, mesh.size(-1)) if is_expert else None,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype,
                reduce_dtype=dtype if self.in_param_dtype else torch.float32,
                cast_forward_inputs=False,
            ),
            ignored_params=ignored,
        )
        for name, p in module.named_parameters():
            p.__dict__.update(marks[name] | p.__dict__)
        sharded = cast("FSDPModule", module)
        sharded.set_gradient_divide_factor(1.0)  # losses are sums over tokens, not means
        sharded.set_force_sum_reduction_for_comms(True)
        if hasattr(sharded, "set_reduce_scatter_unused_params"):
            sharded.set_reduce_scatter_unused_params(True, recurse=False)

    def _mesh(self, *, is_expert: bool) -> DeviceMesh:
        """The mesh that parameters are sharded over: of all replicas, or of instances of them."""
        from torch.distributed.device_mesh import DeviceMesh

        groups = self.groups
        replicas = groups.expert_dp if is_expert else groups.replicas
        shards = groups.expert_shards if is_expert else groups.shards
        instances = groups.expert_instances if is_expert else groups.instances
        if is_expert not in self._meshes:
            if instances.size == 1:
                mesh = DeviceMesh.from_group(
                    cast(Any, shards.handle), groups.device.type, mesh_dim_names=("shard",)
                )
            else:
                mesh = DeviceMesh.from_group(
                    cast(Any, [instances.handle, shards.handle]),
                    groups.device.type,
                    mesh=torch.tensor(replicas.ranks).view(instances.size, shards.size),
                    mesh_dim_names=("replicate", "shard"),
                )
            self._meshes[is_expert] = mesh
        return self._meshes[is_expert]


def is_layer(module: nn.Module) -> bool:
    """Whether a module's parameters are gathered and freed together."""
    return isinstance(module, TransformerLayer)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module itself."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def sharded_modules(stages: Iterable[nn.Module]) -> list[FSDPModule]:
    """All modules that `fully_shard` was applied to."""
    if "torch.distributed.fsdp" not in sys.modules:  # so it was applied to none
        return []
    from torch.distributed.fsdp import FSDPModule

    return [m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)]


def _place_experts(num_shards: int, weight: nn.Parameter) -> Shard:
    """The dim of stacked experts that is sharded: that of experts, unless another one is even."""
    from torch.distributed.tensor import Shard

    even = (d for d in range(weight.dim()) if weight.shape[d] % num_shards == 0)
    return Shard(next(even, 0))


class _HiddenContext:
    """An argument that torch does not look into."""

    def __init__(self, context: Any) -> None:
        self.context = context


def _hide_context(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_HiddenContext(a) if isinstance(a, ForwardContext) else a for a in arguments)


def _show_context(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.context if isinstance(a, _HiddenContext) else a for a in arguments)
