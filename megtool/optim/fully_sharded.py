"""The optimizer of parameters that torch's `fully_shard` has sharded over replicas (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.optim.config import OptimizerConfig
from megtool.optim.param_groups import ParamInfo
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.optim.segments import Segment, Span
from megtool.parallel.process_groups import ProcessGroups
from megtool.tensors.dtensor_shards import is_sharded, local_shard, shard_ranges

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class FullyShardedOptimizer(ReplicatedOptimizer):
    """Updates this rank's shards, which are fp32 and their own main parameters.

    torch sums their gradients over replicas in every backward pass. Parameters that are not sharded
    (the same on all replicas) are updated as a ReplicatedOptimizer does it. `modules` are those
    that `fully_shard` was applied to.

    Raises (by `__init__`, in addition to those of `Optimizer`):
        UsageError: a setting is for optimizers of whole parameters.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerConfig,
        groups: ProcessGroups,
        *,
        modules: Sequence[FSDPModule] = (),
        loss_scale_unit: float = 1.0,
    ) -> None:
        if settings.store_param_remainders:
            raise UsageError(
                "sharded parameters are fp32, and have no remainders",
                hint="without --store-param-remainders",
            )
        self._modules = list(modules)
        super().__init__(named_parameters, settings, groups, loss_scale_unit=loss_scale_unit)

    def _make_segment(self, f: ParamInfo) -> Segment:
        if not is_sharded(f.parameter):
            return super()._make_segment(f)
        flat = local_shard(f.parameter).view(-1)
        self._flat.append(flat)
        ranges = shard_ranges(cast("DTensor", f.parameter))
        offsets = accumulate((stop - start for start, stop in ranges), initial=0)
        spans = tuple(
            Span(param_info=f, start=start, stop=stop, offset=offset)
            for (start, stop), offset in zip(ranges, offsets, strict=False)
            if start < stop
        )
        return Segment(group=self.group_of[f.name], spans=spans, main=flat)

    def _gradient(self, f: ParamInfo) -> Tensor:
        if not is_sharded(f.parameter):
            return super()._gradient(f)
        if f.parameter.grad is None:
            return torch.zeros_like(local_shard(f.parameter)).view(-1)
        return local_shard(f.parameter.grad).reshape(-1)

    def begin_pass(self, is_last: bool) -> None:
        """Let instances of replicas sum the shards of the last pass, with those before in them."""
        if self.groups.instances.size > 1:
            for module in self._modules:
                module.set_requires_all_reduce(is_last, recurse=False)

    def sum_in_place(self) -> None:
        """Refuse to make backward passes repeatable.

        Raises:
            UsageError: always.
        """
        raise UsageError("passes that gather parameters cannot be a graph")

    def wait_for_parameters(self) -> None:
        """Free gathered parameters: those of the modules are the shards."""
        for module in self._modules:
            module.reshard()

    @torch.no_grad()
    def reload_parameters(self) -> None:
        """See `Optimizer.reload_parameters`; shards are their own main parameters."""
        self.wait_for_parameters()
        for f, segment in zip(self.param_infos, self.segments, strict=True):
            if not is_sharded(f.parameter):
                values = f.parameter.detach().flatten()
                segment.write_main(0, segment.numel, values.to(segment.device, torch.float32))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy main parameters to those that are not sharded; free what was gathered before."""
        self.wait_for_parameters()
        super().publish()
