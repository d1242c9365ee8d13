"""Gathering: parameters on their way from the shards of replicas to whoever uses them next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from megtool.optim.buffers import ParamAndGradBucket
from megtool.optim.flat_shards import Pending, new_tag, start_all_gather


class ParamGather:
    """Gathers buckets of parameters in place, in the order given: that of the forward pass.

    With `overlap` they are on their way while the next forward pass runs, and a module waits for
    the buckets of its own parameters before it runs. Which module asks for a parameter is seen in
    the first step: the one that holds it, or the nearest around it that is called at all; but a
    module around may say of a parameter that it `reads` it itself, before it calls the holder. What
    is used without any module being called (a matrix that is read by name) comes first, and is
    waited for at once.

    `modules` are those that the forward passes of this process run through. `begin` starts one
    bucket, given a tag, where it is not to be gathered as it is.
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
        self._pending: dict[int, Pending] = {}  # by place in the order
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
            gathering = weakref.ref(self)  # a model does not keep its optimizer alive

            def before(module: nn.Module, _: Any) -> None:
                if (alive := gathering()) is not None:
                    alive._before(module)

            self._handles = [m.register_forward_pre_hook(before) for m in self._modules]

    @property
    def under_way(self) -> list[ParamAndGradBucket]:
        """What is not waited for yet."""
        return [self._buckets[i] for i in self._pending]

    def start(self) -> None:
        """Gather what the shards hold now."""
        self.wait()
        for i in sorted(range(len(self._buckets)), key=lambda i: i not in self._unhooked):
            bucket = self._buckets[i]
            if self._begin is not None:
                self._pending[i] = self._begin(bucket, self._tags[i])
            elif bucket.group.size > 1:
                self._pending[i] = start_all_gather(bucket.params, bucket.group, tag=self._tags[i])
        if not self.overlap or self._learning:
            self.wait()
        for i in self._unhooked & self._pending.keys():
            self._pending.pop(i).wait()

    def wait(self) -> None:
        """Wait for everything: all parameters are there from then on."""
        while self._pending:
            self._pending.pop(next(iter(self._pending))).wait()

    def forget_calls(self) -> None:
        """The first forward pass begins now."""
        if self._learning:
            self._called.clear()

    def learn(self) -> None:
        """The first forward pass is over: from now on it is known who uses what."""
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
        # A parameter of no module is one that nobody waits for.
        registered = {id(p) for module in self._modules for p in module.parameters(recurse=False)}
        self._unhooked |= {place for p, place in self._of.items() if p not in registered}

    def close(self) -> None:
        """Leave the modules alone."""
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
    """By module: the modules around it from its root on, and itself."""
    out: dict[int, list[int]] = {}

    def visit(module: nn.Module, above: list[int]) -> None:
        if id(module) not in out:
            out[id(module)] = [*above, id(module)]
            for child in module.children():
                visit(child, out[id(module)])

    for root in roots:
        visit(root, [])
    return out
