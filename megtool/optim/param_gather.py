"""All-gather of parameters from the shards of replicas, before modules use them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from megtool.optim.buffers import ParamAndGradBucket
from megtool.optim.flat_shards import Pending, new_tag, start_all_gathers


class ParamGather:
    """Gathers buckets of parameters in place, in the given order, that of the forward pass.

    With `overlap` this happens during the next forward pass, and a module waits for the buckets of
    its own parameters before it runs. The first step shows which module uses a parameter: the one
    that has it, or the nearest enclosing module that is called; but an enclosing module may list a
    parameter in `reads` if it reads that itself. Parameters that are used without a call of a
    module (a matrix that is read by name) are gathered first, and waited for immediately.

    `modules` are those of the forward passes of this process. `begin` starts the gather of one
    bucket, given a tag, if it is not to be gathered in its own dtype.
    """

    def __init__(
        self,
        buckets: Sequence[ParamAndGradBucket],
        modules: Sequence[nn.Module],
        *,
        overlap: bool,
        begin: Callable[[ParamAndGradBucket, int], Pending] | None = None,
    ) -> None:
        self.overlap = overlap
        self._begin = begin
        self._buckets = list(buckets)
        self._tags = [new_tag() for _ in buckets]
        self._pending: dict[int, Pending] = {}  # by position in the order
        self._of = {
            id(member.param_info.parameter): i
            for i, bucket in enumerate(self._buckets)
            for member in bucket.members
        }
        self._modules = [module for root in modules for module in root.modules()]
        self._path = _paths(modules)
        self._called: set[int] = set()
        self._learning = overlap
        self._unhooked: set[int] = set()
        self._buckets_of_module: dict[int, set[int]] = {}
        self._handles: list[RemovableHandle] = []
        if overlap:
            gathering = weakref.ref(self)  # so that the model does not keep its optimizer alive

            def before(module: nn.Module, _: Any) -> None:
                if (alive := gathering()) is not None:
                    alive._before(module)

            self._handles = [m.register_forward_pre_hook(before) for m in self._modules]

    @property
    def under_way(self) -> list[ParamAndGradBucket]:
        """The buckets that are still being gathered."""
        return [self._buckets[i] for i in self._pending]

    def start(self) -> None:
        """Gather the current values of the shards; without `overlap` all buckets of a communicator
        as one collective, where the backend can."""
        self.wait()
        together: dict[int, list[int]] = {}
        for i in sorted(range(len(self._buckets)), key=lambda i: i not in self._unhooked):
            bucket = self._buckets[i]
            if self._begin is not None:
                self._pending[i] = self._begin(bucket, self._tags[i])
            elif bucket.group.size > 1:
                key = i if self.overlap else -id(bucket.group.handle)
                together.setdefault(key, []).append(i)
        for places in together.values():
            pending = start_all_gathers(
                [self._buckets[i].params for i in places],
                self._buckets[places[0]].group,
                tags=[self._tags[i] for i in places],
            )
            self._pending |= dict(zip(places, pending, strict=True))
        if not self.overlap or self._learning:
            self.wait()
        for i in self._unhooked & self._pending.keys():
            self._pending.pop(i).wait()

    def wait(self) -> None:
        """Wait until all parameters have arrived."""
        while self._pending:
            self._pending.pop(next(iter(self._pending))).wait()

    def forget_calls(self) -> None:
        """Start recording calls: the first forward pass begins."""
        if self._learning:
            self._called.clear()

    def learn(self) -> None:
        """Derive from the recorded calls which module uses which parameter."""
        if not self._learning:
            return
        self._learning = False
        readers = {
            id(p): id(module) for module in self._modules for p in getattr(module, "reads", tuple)()
        }
        for module in self._modules:
            for parameter in module.parameters(recurse=False):
                place = self._of.get(id(parameter))
                if place is None:
                    continue
                path = self._path[id(module)]
                if id(parameter) in readers:
                    path = path[: path.index(readers[id(parameter)]) + 1]
                asks = [m for m in path if m in self._called]
                if asks:
                    self._buckets_of_module.setdefault(asks[-1], set()).add(place)
                else:
                    self._unhooked.add(place)
        # No module waits for a parameter that belongs to none.
        registered = {id(p) for module in self._modules for p in module.parameters(recurse=False)}
        self._unhooked |= {place for p, place in self._of.items() if p not in registered}

    def close(self) -> None:
        """Wait, and remove the hooks."""
        self.wait()
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module) -> None:
        if self._learning:
            self._called.add(id(module))
        elif self._pending:
            for i in self._buckets_of_module.get(id(module), set()) & self._pending.keys():
                self._pending.pop(i).wait()


def _paths(roots: Sequence[nn.Module]) -> dict[int, list[int]]:
    """By module: its enclosing modules from the root on, and itself."""
    out: dict[int, list[int]] = {}

    def visit(module: nn.Module, above: list[int]) -> None:
        if id(module) not in out:
            out[id(module)] = [*above, id(module)]
            for child in module.children():
                visit(child, out[id(module)])

    for root in roots:
        visit(root, [])
    return out
