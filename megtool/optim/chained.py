"""ChainedOptimizer: several optimizers that step as one, with one joint norm and loss scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megtool.errors import MappingError, UsageError
from megtool.optim.optimizer import Optimizer
from megtool.optim.param_groups import group_parameters
from megtool.optim.segments import Segment


class ChainedOptimizer(Optimizer):
    """Dense parameters and experts, each in an optimizer of its own, as Megatron keeps them.

    Gradients are checked, measured and clipped together, and either all members step or none.
    Members are made with `part=True`.

    Raises:
        UsageError: no members, members of other settings or groups than the first one's, or a rule
            that matches none of their parameters.
        MappingError: a parameter name is in two members.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        if not members:
            raise UsageError("a chain of no optimizers", hint="give one at least")
        first = members[0]
        if any(m.settings != first.settings or m.groups is not first.groups for m in members):
            raise UsageError(
                "members of a chain have other settings or groups than the first one",
                hint="make them all with the same OptimizerSettings and Groups",
            )
        self.members = tuple(members)
        self.settings = first.settings
        self.groups = first.groups
        self.param_infos = [f for m in members for f in m.param_infos]
        names = [f.name for f in self.param_infos]
        twice = next((n for n, times in Counter(names).items() if times > 1), None)
        if twice is not None:
            raise MappingError(
                f"parameter {twice!r} is in two members of a chain",
                tensor=twice,
                hint="each parameter is updated by one",
            )
        group_parameters(self.param_infos, self.settings, self.groups.world)  # refuses idle rules
        self.param_groups = [g for m in members for g in m.param_groups]
        self.group_of = {name: g for m in members for name, g in m.group_of.items()}
        self.updates = {kind: u for m in members for kind, u in m.updates.items()}
        self.segments = [s for m in members for s in m.segments]
        self.num_steps = first.num_steps
        dynamic = [m.scaler for m in members if m.scaler.state_dict()]
        self.scaler = dynamic[0] if dynamic else first.scaler
        self._num_labels = None
        self._rates = {}

    @property
    def stored(self) -> list[Segment]:
        """All members' segments, as they lie."""
        return [s for m in self.members for s in m.state_segments]

    @property
    def bucket_size(self) -> int | None:
        """See `Optimizer.bucket_size`; members have the same settings."""
        return self.members[0].bucket_size

    @property
    def sums_in_fp32(self) -> bool:
        """See `Optimizer.sums_in_fp32`."""
        return self.members[0].sums_in_fp32

    def zero_grad(self) -> None:
        """Forget the gradients of all members."""
        for m in self.members:
            m.zero_grad()

    def begin(self, num_microbatches: int) -> None:
        """Begin all members' step."""
        for m in self.members:
            m.begin(num_microbatches)

    def sum_in_place(self) -> None:
        """Let all members add up in place."""
        for m in self.members:
            m.sum_in_place()

    def reduce_gradients(self) -> None:
        """Reduce all members' gradients."""
        for m in self.members:
            m.reduce_gradients()

    def publish(self) -> None:
        """Write all members' parameters."""
        for m in self.members:
            m.publish()

    def update_segments(self, segments: list[Segment]) -> None:
        """Every member updates its own segments, in its own way."""
        for m in self.members:
            m.num_steps = self.num_steps
            m._rates = self._rates
            m.update_segments(m.segments)

    def load(self, read: Callable[[str, str], Tensor]) -> None:
        """Every member takes its own state."""
        for m in self.members:
            m.load(read)

    def reload_parameters(self) -> None:
        """Every member takes its main parameters from the parameters."""
        for m in self.members:
            m.reload_parameters()

    def small_state(self) -> dict[str, Any]:
        """Members' small states by their number, as Megatron keeps them."""
        for m in self.members:
            m.num_steps, m.scaler, m._rates = self.num_steps, self.scaler, self._rates
        return {str(i): m.small_state() for i, m in enumerate(self.members)}
