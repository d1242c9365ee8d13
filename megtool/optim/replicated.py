"""The optimizer without sharding: every replica updates all parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megtool.errors import MappingError
from megtool.kernels.wgrad_accumulation import GradientSum, set_gradient_sums
from megtool.optim.config import OptimizerConfig
from megtool.optim.optimizer import Optimizer
from megtool.optim.param_groups import ParamInfo
from megtool.optim.segments import Segment, Span, copy_parts
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.tensors.dtensor_shards import is_sharded

# Elements that are summed over replicas by one collective.
_REDUCED_NUMEL = 16 * 2**20


class ReplicatedOptimizer(Optimizer):
    """Sums gradients over replicas; each replica does the same update.

    fp32 parameters are their own main parameters, and their `grad` is used directly. Gradients of
    bf16 and fp16 parameters are summed in fp32 after each micro batch, and `grad` is freed.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerConfig,
        groups: ProcessGroups,
        *,
        loss_scale_unit: float = 1.0,
    ) -> None:
        super().__init__(named_parameters, settings, groups, loss_scale_unit=loss_scale_unit)
        self._flat: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}
        self._begun: set[int] = set()
        self._in_place = False
        handles: list[RemovableHandle] = []
        fused: list[tuple[nn.Parameter, GradientSum]] = []
        segments = [self._make_segment(f) for f in self.param_infos]
        for f in self.param_infos:
            if f.parameter.dtype != torch.float32:
                handles.append(_register(f.parameter, _summing(self._sums, self._begun)))
            if settings.gradient_accumulation_fusion and not is_sharded(f.parameter):
                total = _GradientSum(f.parameter, self._sums, self._begun)
                fused.append((f.parameter, total))
        self.set_segments(segments)
        # Hooks of a deleted optimizer would take gradients away from the next one.
        weakref.finalize(self, _remove, handles)
        set_gradient_sums(self, fused)

    def _make_segment(self, f: ParamInfo) -> Segment:
        """The segment of a parameter; its elements are added to `_flat`."""
        if not f.parameter.is_contiguous():
            raise MappingError(
                f"parameter {f.name!r} is not contiguous",
                tensor=f.name,
                hint="replace it by parameter.contiguous() before the optimizer is made",
            )
        flat = f.parameter.detach().view(-1)
        self._flat.append(flat)
        span = Span(param_info=f, start=0, stop=flat.numel(), offset=0)
        segment = Segment(group=self.group_of[f.name], spans=(span,), replicated=True)
        if flat.dtype == torch.bfloat16 and self.settings.store_param_remainders:
            segment.high = flat
            segment.low = torch.zeros_like(flat, dtype=torch.int16)
        else:
            segment.main = flat.float()  # the parameter itself where it is fp32
        return segment

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Clear the gradients."""
        for segment in self.segments:
            segment.grad = None
        if self._in_place:
            if self.param_infos:
                torch._foreach_zero_(self._places())
            return
        self._begun.clear()
        for f in self.param_infos:
            f.parameter.grad = None

    @torch.no_grad()
    def sum_in_place(self) -> None:
        self._in_place = True
        for f in self.param_infos:
            p = f.parameter
            if p.dtype == torch.float32:
                p.grad = torch.zeros_like(p)
            else:
                p.grad = None
                self._sums[id(p)] = torch.zeros(p.numel(), dtype=torch.float32, device=p.device)
                self._begun.add(id(p))

    def _places(self) -> list[Tensor]:
        """The tensors that gradients are added to in place."""
        grads = [p.grad for p in (f.parameter for f in self.param_infos) if p.grad is not None]
        return [*grads, *self._sums.values()]

    def begin(self, num_microbatches: int) -> None:
        """Do nothing: gradients are reduced in `finish`."""

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum over replicas, of dense parameters and of experts separately."""
        for f, segment in zip(self.param_infos, self.segments, strict=True):
            segment.grad = self._gradient(f)
        for is_expert, group in ((False, self.groups.replicas), (True, self.groups.expert_dp)):
            members = [s for s in self.segments if s.replicated and s.group.is_expert is is_expert]
            _sum_in_place([s.grad for s in members if s.grad is not None], group)

    def _gradient(self, f: ParamInfo) -> Tensor:
        """This rank's gradient of a parameter (fp32, 1-D)."""
        p = f.parameter
        if p.dtype == torch.float32:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            return p.grad.reshape(-1)
        if id(p) in self._begun:
            return self._sums[id(p)]
        return torch.zeros(p.numel(), dtype=torch.float32, device=p.device)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy main parameters to parameters of another dtype."""
        pairs = [
            (flat, s.main)
            for flat, s in zip(self._flat, self.segments, strict=True)
            if s.main is not None and s.main is not flat
        ]
        if pairs:
            torch._foreach_copy_([flat for flat, _ in pairs], [main for _, main in pairs])


class _GradientSum(GradientSum):
    """A parameter's `grad` or fp32 sum, for layers that add their products themselves."""

    def __init__(self, parameter: nn.Parameter, sums: dict[int, Tensor], begun: set[int]) -> None:
        self._parameter, self._sums, self._begun = parameter, sums, begun

    def begin(self) -> tuple[Tensor, bool]:
        p = self._parameter
        if p.dtype == torch.float32:
            is_new = p.grad is None
            if p.grad is None:
                p.grad = torch.empty_like(p)
            return p.grad, is_new
        if id(p) not in self._sums:
            self._sums[id(p)] = torch.empty(p.numel(), dtype=torch.float32, device=p.device)
        is_new = id(p) not in self._begun
        self._begun.add(id(p))
        return self._sums[id(p)].view(p.shape), is_new

    def end(self) -> None:
        """Nothing waits for gradients here."""


def _summing(sums: dict[int, Tensor], begun: set[int]) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient to its fp32 sum, and frees it."""

    def add(p: Tensor) -> None:
        if p.grad is None:
            return
        flat = p.grad.detach().reshape(-1)
        if id(p) not in begun:
            begun.add(id(p))
            if id(p) in sums:
                sums[id(p)].copy_(flat)
            else:
                sums[id(p)] = flat.float()
        else:
            sums[id(p)].add_(flat)
        p.grad = None

    return add


def _register(p: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _sum_in_place(grads: list[Tensor], group: Group) -> None:
    """Sum fp32 tensors over a group, many at a time."""
    if group.size == 1:
        return
    batch: list[Tensor] = []
    for i, grad in enumerate(grads):
        batch.append(grad)
        if sum(g.numel() for g in batch) >= _REDUCED_NUMEL or i == len(grads) - 1:
            total = all_sum(torch.cat(batch), group)
            copy_parts(total, batch)
            batch = []
