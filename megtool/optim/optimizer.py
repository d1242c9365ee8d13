"""The base of optimizers: the protocol of a step, from gradients to updated parameters.

    optimizer.zero_grad()
    optimizer.begin(num_microbatches)
    for each microbatch: optimizer.scale_loss(loss).backward()     # loss: a sum over labels
    optimizer.finish(num_labels)                                   # of all microbatches and ranks
    result = optimizer.step(lr, weight_decay)

A subclass decides where parameters, gradients and states are in memory. It makes its segments in
`__init__`, passes them to `set_segments`, and implements the abstract methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megtool.errors import CheckpointError, MappingError, UsageError
from megtool.kernels.dispatch import requested_implementation
from megtool.optim.config import OptimizerConfig
from megtool.optim.fp8.weights import weight_values
from megtool.optim.grad_norm import (
    clip_coefficient,
    find_nonfinite,
    first_nonfinite_of_ranks,
    local_statistics,
)
from megtool.optim.muon import Muon, orthogonalize_matrices
from megtool.optim.param_groups import ParamGroup, ParamInfo, collect_param_infos, group_parameters
from megtool.optim.scaler import GradScaler, make_grad_scaler
from megtool.optim.segments import Segment, Span, StatePiece, copy_parts
from megtool.optim.update_rules import UpdateRule, make_update_rule, update_segments
from megtool.parallel.collectives import all_max, all_sum
from megtool.parallel.process_groups import SHARING_STAGES, Group, ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step.

    `ok`: parameters were updated; otherwise a gradient was NaN or Inf, only the loss scale changed,
    and `first_nonfinite` is the name of the first such parameter, with its rank. `grad_norm` is
    that of the unscaled gradient before clipping; `num_zeros` the zeros in it, where settings ask
    for them; `loss_scale` what was used.
    """

    ok: bool
    grad_norm: float
    num_zeros: int | None
    loss_scale: float
    first_nonfinite: str | None = None


class Optimizer(ABC):
    """The parameters that are trained, their fp32 main parameters and states, and their update.

    `param_infos` are those of the trainable parameters, in the order of `named_parameters`.
    `param_groups` are the same on every rank; `segments` are what this process updates. Every rank
    of the world has to make its optimizer, and call its methods, at the same time. Loss scales of
    the settings, and saved ones, are `loss_scale_unit` times those that losses are multiplied by.

    Raises (by `__init__`):
        MappingError: a parameter is given twice, or has a dtype that cannot be trained.
        UsageError: a rule matches nothing, or settings do not fit the parameters.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerConfig,
        groups: ProcessGroups,
        *,
        loss_scale_unit: float = 1.0,
    ) -> None:
        self.settings = settings
        self.groups = groups
        self.param_infos: list[ParamInfo] = collect_param_infos(named_parameters)
        for f in self.param_infos:
            if f.parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise MappingError(
                    f"parameter {f.name!r} is {f.parameter.dtype}, which cannot be trained",
                    tensor=f.name,
                    hint="freeze it, or load the model as float32, bfloat16 or float16",
                )
            if f.parameter.dtype == torch.float16 and settings.store_param_remainders:
                raise UsageError(
                    f"parameter {f.name!r} is float16, and remainders need bfloat16",
                    hint="train in bfloat16, or keep main parameters as float32",
                )
        self.param_groups: list[ParamGroup] = group_parameters(
            self.param_infos, settings, groups.world
        )
        self.group_of: dict[str, ParamGroup] = {
            name: group for group in self.param_groups for name in group.names
        }
        self._facts_by_name = {f.name: f for f in self.param_infos}
        by_te = requested_implementation() == "te"
        self.updates: dict[str, UpdateRule] = {
            kind: make_update_rule(kind, settings, by_te=by_te)
            for kind in {g.update for g in self.param_groups}
        }
        self.segments: list[Segment] = []
        self.num_steps = 0
        # The same on every rank, though only some may have fp16 parameters.
        has_fp16 = float(any(f.parameter.dtype == torch.float16 for f in self.param_infos))
        any_fp16 = all_max(torch.tensor(has_fp16, device=groups.device), groups.world)
        self.scaler: GradScaler = make_grad_scaler(
            settings, has_fp16=bool(any_fp16), unit=loss_scale_unit
        )
        self._num_labels: Tensor | None = None
        self._rates: dict[int, tuple[float, float]] = {}

    # Implemented by subclasses.

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear the gradients, before the first backward pass of a step."""

    @abstractmethod
    def begin(self, num_microbatches: int) -> None:
        """Begin a step with so many backward passes of each stage until `finish`."""

    @abstractmethod
    def sum_in_place(self) -> None:
        """Make backward passes repeatable by a CUDA graph from now on.

        Every pass adds gradients to sums that never move and that `zero_grad` sets to zero;
        nothing is sent before `finish`. Sums are the same except for the sign of zeros.
        """

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Set the `grad` of every segment: the sum over micro batches and data-parallel replicas.

        It is fp32 and as long as the segment; zero for parameters without a gradient and padding.
        """

    @abstractmethod
    def publish(self) -> None:
        """Copy main parameters to parameters, on every replica."""

    def begin_pass(self, is_last: bool) -> None:  # noqa: B027 - not needed by all subclasses
        """Begin a backward pass, where passes follow each other: the last one of the step, or
        another."""

    def wait_for_parameters(self) -> None:  # noqa: B027 - not needed by all subclasses
        """Wait until all parameters are those of the last step; `publish` may return earlier."""

    def update_segments(self, segments: list[Segment]) -> None:
        """Update main parameters and states from the segments' gradients (reduced and clipped).

        Rates are those of `rates`; `num_steps` includes this step.
        """
        for group in self.param_groups:
            update = self.updates[group.update]
            group_segments = [s for s in segments if s.group is group and s.numel]
            lr, weight_decay = self.rates(group)
            update_segments(
                update, group_segments, lr=lr, weight_decay=weight_decay, step=self.num_steps
            )
            if isinstance(update, Muon):
                facts = [self._facts_by_name[name] for name in group.names]
                orthogonalize_matrices(update, facts, group_segments, self.groups, lr=lr)

    # Called by subclasses.

    def set_segments(self, segments: list[Segment]) -> None:
        """Set the segments, and create the states (zeros) that they lack.

        With an `offload_fraction` states have no memory until a HybridDeviceOptimizer places them.
        """
        is_later = self.settings.offload_fraction > 0
        dtype = torch.bfloat16 if self.settings.exp_avg_dtype == "bf16" else torch.float32
        for segment in segments:
            for state in self.updates[segment.group.update].states:
                if state not in segment.states:
                    device = torch.device("meta") if is_later else segment.device
                    segment.states[state] = torch.zeros(segment.numel, dtype=dtype, device=device)
        self.segments = segments

    def rates(self, group: ParamGroup) -> tuple[float, float]:
        """Learning rate and weight decay of a group in the current step."""
        return self._rates[id(group)]

    # The protocol.

    @property
    def bucket_size(self) -> int | None:
        """Elements of a bucket of the first stage, the same on every rank; None: there is one
        bucket."""
        return None

    @property
    def sums_in_fp32(self) -> bool:
        """Whether gradients of micro batches are summed in fp32, whatever the parameters' dtype."""
        return True

    @property
    def loss_scale(self) -> float:
        """The current loss scale."""
        return self.scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The scaled loss, to call `backward` on."""
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale

    @torch.no_grad()
    def finish(self, num_labels: Tensor) -> None:
        """Reduce the gradients of all segments, after the last backward pass.

        It sums over replicas, over tp for parameters with partial gradients, and for tied ones over
        the stages that have them. The gradient of the summed loss is divided by `num_labels` (one
        element, of all micro batches and replicas); less than 1 counts as 1.
        """
        self.reduce_gradients()
        self._sum_spans(lambda f: f.is_partial, self.groups.tp)
        for over in SHARING_STAGES:
            tied = partial(_is_tied, over=over)
            self._sum_spans(tied, getattr(self.groups, over))
        self._num_labels = num_labels

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> StepResult:
        """Check, unscale and clip the gradient, and update the parameters.

        `lr` is multiplied by each group's `lr_mult`, and `weight_decay` by its `wd_mult`.
        """
        if self._num_labels is None:
            raise RuntimeError("step was called without finish")
        scale = self.loss_scale
        # Read together: on a GPU each reading waits for the device.
        sums = local_statistics(
            self.segments, self.groups, count_zeros=self.settings.log_num_zeros_in_grad
        )
        sums = all_sum(sums, self.groups.world)
        labels = self._num_labels.reshape(1).to(sums)
        bad, squares, zeros, num_labels = torch.cat([sums, labels]).tolist()
        self._num_labels = None
        factor = 1.0 / (scale * max(num_labels, 1.0))
        norm = squares**0.5 * factor
        num_zeros = int(zeros) if self.settings.log_num_zeros_in_grad else None
        self.scaler.update(bad > 0)
        if bad > 0:
            return StepResult(
                ok=False,
                grad_norm=norm,
                num_zeros=num_zeros,
                loss_scale=scale,
                first_nonfinite=self._first_nonfinite(),
            )
        if self.settings.clip_grad > 0:
            factor *= clip_coefficient(norm, self.settings.clip_grad)
        if factor != 1.0:
            grads = [s.grad for s in self.segments if s.grad is not None and s.numel]
            if grads:  # a rank of a small model may have none
                torch._foreach_mul_(grads, factor)
        self.num_steps += 1
        for group in self.param_groups:
            self._rates[id(group)] = lr * group.lr_mult, weight_decay * group.wd_mult
        self.update_segments(self.segments)
        self.publish()
        return StepResult(ok=True, grad_norm=norm, num_zeros=num_zeros, loss_scale=scale)

    # State.

    @property
    def state_segments(self) -> list[Segment]:
        """The segments that hold main parameters and states, or the parts of offloaded ones."""
        return self.segments

    def pieces(self) -> Iterator[StatePiece]:
        """All state of this process: main parameters first, then the states of the update rule."""
        for segment in self.state_segments:
            for span in segment.spans:
                yield _piece("main", span, segment.read_main(span.offset, span.end))
        for segment in self.state_segments:
            for state, tensor in segment.states.items():
                for span in segment.spans:
                    yield _piece(state, span, tensor[span.offset : span.end])

    @torch.no_grad()
    def load(self, read: Callable[[str, str], Tensor]) -> None:
        """Load main parameters and states, and write the parameters.

        `read(state, parameter name)` returns the state of the whole local parameter, of any float
        dtype.

        Raises:
            CheckpointError: a state has another number of elements than its parameter.
        """
        for segment in self.state_segments:
            for span in segment.spans:
                values = _slice_for_span(read("main", span.param_info.name), "main", span)
                segment.write_main(span.offset, span.end, values.to(segment.device, torch.float32))
            for state, tensor in segment.states.items():
                for span in segment.spans:
                    values = _slice_for_span(read(state, span.param_info.name), state, span)
                    tensor[span.offset : span.end].copy_(values)
        self.publish()

    @torch.no_grad()
    def reload_parameters(self) -> None:
        """Copy parameters to main parameters, after weights were loaded into them."""
        for segment in self.state_segments:
            for span in segment.spans:
                values = weight_values(span.param_info.parameter).flatten()[span.start : span.stop]
                segment.write_main(span.offset, span.end, values.to(segment.device, torch.float32))

    def small_state(self) -> dict[str, Any]:
        """What Megatron saves in addition to tensors: `optimizer.param_groups`, and
        `grad_scaler`."""
        out: dict[str, Any] = {
            "optimizer": {"param_groups": [self._group_state(g) for g in self.param_groups]}
        }
        scaler = self.scaler.state_dict()
        if scaler:
            out["grad_scaler"] = scaler
        return out

    def load_small_state(self, state: dict[Any, Any] | list[Any]) -> None:
        """Load the number of steps and the loss scale from a state of `small_state` or Megatron.

        It may be that of one optimizer or of a chain, of any of Megatron's. Rates, decay and
        hyperparameters are those of this run.

        Raises:
            CheckpointError: it has no parameter groups.
        """
        members = _members(state)
        steps: list[int] = []
        for member in members:
            inner = member.get("optimizer", member)
            common = (inner.get("state") or {}).get("common_step")
            stored_steps = [common, *(g.get("step") for g in inner["param_groups"])]
            steps += [int(step) for step in stored_steps if step is not None]
            if member.get("grad_scaler"):
                self.scaler.load_state_dict(member["grad_scaler"])
        if not members:
            raise CheckpointError(
                f"the saved optimizer has no parameter groups, but a {type(state).__name__} of "
                f"{sorted(map(str, state))[:8]}",
                hint="start a new run from the checkpoint's weights",
            )
        self.num_steps = max(steps, default=0)

    # Parts of the above.

    def _sum_spans(self, is_summed: Callable[[ParamInfo], bool], group: Group) -> None:
        """Sum over a group the gradients of the spans that `is_summed` selects."""
        if group.size == 1:
            return
        parts = [
            s.grad[span.offset : span.end]
            for s in self.segments
            for span in s.spans
            if s.grad is not None and is_summed(span.param_info)
        ]
        # Both ends, or all tp ranks, have the same parameters, so all have something or nothing.
        if not parts:
            return
        total = all_sum(torch.cat(parts), group)
        copy_parts(total, parts)

    def _first_nonfinite(self) -> str | None:
        """The first parameter, over all ranks, whose gradient is NaN or Inf."""
        names = [f.name for f in self.param_infos]
        return first_nonfinite_of_ranks(find_nonfinite(self.segments, names), names, self.groups)

    def _group_state(self, group: ParamGroup) -> dict[str, Any]:
        settings = self.settings
        at_first = settings.lr * group.lr_mult, settings.weight_decay * group.wd_mult
        lr, weight_decay = self._rates.get(id(group), at_first)
        return {
            "wd_mult": group.wd_mult,
            "lr_mult": group.lr_mult,
            "is_expert_parallel": group.is_expert,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": settings.lr,
            "min_lr": settings.min_lr,
            "lr": lr,
            "weight_decay": weight_decay,
            "step": self.num_steps,
            **self.updates[group.update].hyperparameters,
        }


def _is_small_state(state: Any) -> bool:
    """Whether a state holds the parameter groups of one optimizer."""
    return isinstance(state, dict) and "param_groups" in state.get("optimizer", state)


def _members(state: Any) -> list[dict[str, Any]]:
    """The small states of one optimizer or of a chain, which Megatron numbers or lists."""
    if _is_small_state(state):
        return [state]
    values = state.values() if isinstance(state, dict) else state
    return [member for member in values if _is_small_state(member)]


def _piece(state: str, span: Span, tensor: Tensor) -> StatePiece:
    return StatePiece(
        state=state, parameter=span.param_info.name, start=span.start, stop=span.stop, tensor=tensor
    )


def _slice_for_span(tensor: Tensor, state: str, span: Span) -> Tensor:
    expected = span.param_info.parameter.numel()
    if tensor.numel() != expected:
        raise CheckpointError(
            f"state {state!r} has {tensor.numel()} elements, and its parameter {expected}",
            tensor=span.param_info.name,
            hint="the state has another model or layout than the parameters",
        )
    return tensor.detach().flatten()[span.start : span.stop]


def _is_tied(param_info: ParamInfo, *, over: str) -> bool:
    """Whether a group of stages has the parameter."""
    return param_info.is_tied and param_info.stages_summed == over
