"""A checker of CUDA graph rules that runs without a GPU, with the interface of `CudaGraphs`.

At the first call of a shape the function runs once unseen (the warm-up: it may build its tables),
once watched (the capture: its operations are written down) and once more for the result; every
later call of the shape has to do exactly the same. What a call wrote into tensors from outside,
the result's call has to write again: counters, sums of gradients and all else that advances belong
into `state`, or are put back by `undo`.

What is seen are operations as torch dispatches them, and calls of its functions by their names. Not
seen are: work that goes past torch (compiled kernels, NumPy on a view, pickling); the destination
of `.to(torch.device("cpu"))`, for here that is where everything is (`.to("cpu")` is seen);
operations that wait inside of a CUDA kernel and are not in `WAITING_INSIDE`; and a write that gives
the same when it is repeated, but not when it is begun from another state.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megtool.errors import GraphRuleError
from megtool.kernels.graphs import cuda_graphs, graphed_passes
from megtool.kernels.graphs.cuda_graphs import (
    CudaGraphs,
    Function,
    Input,
    clone,
    copy_into,
    map_tensors,
)
from megtool.kernels.graphs.graphed_passes import GraphedPass, Inputs, run_backward

Rule = Literal[
    "no waiting for the host",
    "no data from the host",
    "no shapes that depend on data",
    "the same operations",
    "the same numbers",
    "the same storages",
    "no memory of the graph kept outside",
    "a repeatable result",
]

HINTS: dict[Rule, str] = {
    "no waiting for the host": "keep the value in a tensor (torch.where, masks), or take it after",
    "no data from the host": "make the tensor before the call, or with full, zeros or arange",
    "no shapes that depend on data": "use a mask (torch.where, masked_fill) of a fixed shape",
    "the same operations": "let tensors decide (torch.where), or call two graphs",
    "the same numbers": "a graph repeats the number it was captured with: give it as a tensor",
    "the same storages": "copy new values into the tensor that was there at the capture",
    "no memory of the graph kept outside": "return it, or copy it into a tensor made before",
    "a repeatable result": "the warm-up runs the function too: name what it advances in `state`",
}

T = torch.Tensor
# Past torch's dispatcher, or told better by the name that was called.
WAITING: set[Any] = {T.item, T.tolist, T.numpy, T.cpu, T.__bool__, T.__int__, T.__float__}
WAITING |= {T.__index__, T.__array__, T.__contains__, T.__complex__, T.__repr__, T.__format__}
FROM_HOST: set[Any] = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}
# Operations, all their overloads, that read a result on the host inside: errors of a factorisation
# (the first is what inv, solve, cholesky ... end in), a number of steps, a sum to be positive.
WAITING_INSIDE = {"aten::_linalg_check_errors", "aten::_linalg_eigh", "aten::_linalg_svd"}
WAITING_INSIDE |= {"aten::linalg_eig", "aten::linalg_pinv", "aten::linalg_matrix_exp"}
WAITING_INSIDE |= {"aten::multinomial", "aten::histc", "aten::embedding_renorm_"}
# Tagged as shaped by data because a mask may index; plain numbers do not.
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Gloo's threads say that a collective is done before they let go of its tensors: a moment later, or
# as late as others leave them a processor. What is held longer than this is kept.
COLLECTIVES, MOMENT_S, PATIENCE_S = "c10d::", 0.01, 10.0


@dataclass(frozen=True, slots=True)
class Operation:
    """One dispatched operation: its tensors (role, shape, strides, offset, dtype) and numbers."""

    name: str
    storages: tuple[Any, ...]
    numbers: tuple[Any, ...]


@dataclass(slots=True)
class Trace:
    """Everything one run did, and the tensors from outside that it used."""

    operations: list[Operation] = field(default_factory=list)
    outside: dict[int, Any] = field(default_factory=dict)
    written: dict[int, str] = field(default_factory=dict)  # which of them, by which operation
    random: bool = False


@dataclass(slots=True, kw_only=True)
class CheckedGraph:
    """The state that the capture of one shape would have kept."""

    inputs: list[Input]
    trace: Trace
    outputs: Any
    contents: dict[int, Tensor]  # of what was written outside of inputs and state, as bytes
    last_outputs: Any = None


class GraphRuleChecker(CudaGraphs):
    """Calls `function`, and raises GraphRuleError where a captured graph would go wrong.

    With `copies=False`, what the call before returned is filled with NaN (integers: the smallest
    number) by the next call of the shape, as a graph would overwrite it.
    """

    @staticmethod
    def can_capture(device: torch.device) -> bool:
        return True

    def _make_pool(self) -> Any:
        return None

    def _capture(self, inputs: Sequence[Input]) -> CheckedGraph:
        static = [clone(x) for x in inputs]
        before = [t.clone() for t in self.state]
        try:
            self.function(*static)
            self._put_back(before)
            copy_into(static, inputs)
            seed = torch.get_rng_state()
            outputs, trace = self._watch(static, None)
            state_storages = {t.untyped_storage()._cdata for t in self.state}
            contents = {
                n: _bytes(trace.outside[n]) for n in trace.written if n not in state_storages
            }
        finally:
            self._put_back(before)
        if trace.random:
            torch.set_rng_state(seed)
        return CheckedGraph(inputs=static, trace=trace, outputs=outputs, contents=contents)

    def _replay(self, captured: CheckedGraph, inputs: Sequence[Input]) -> Any:
        if captured.last_outputs is not None:
            map_tensors(_spoil, captured.last_outputs)
        copy_into(captured.inputs, inputs)
        outputs, _ = self._watch(captured.inputs, captured.trace)
        if captured.outputs is not None:
            _compare(captured.outputs, outputs)
            for number, was in captured.contents.items():
                if not torch.equal(was, _bytes(captured.trace.outside[number])):
                    name = captured.trace.written[number]
                    raise _broken("a repeatable result", name, "it advances a tensor from outside")
            captured.outputs = None
            captured.contents.clear()
        captured.last_outputs = None if self.copies else outputs
        return outputs

    def _watch(self, static: list[Input], expected: Trace | None) -> tuple[Any, Trace]:
        """Run once; returns copies of the outputs and what was done."""
        watch = Watch(static, expected)
        with not_on_host(), HostRules(), watch:
            raw = self.function(*static)
        watch.finish()
        outputs = map_tensors(lambda x: x.detach().clone(), raw)
        del raw
        watch.release()
        return outputs, watch.trace


class CheckedPass(GraphedPass):
    """The same on any device, which checks the rules of graphs: both passes have to do what they
    did when they were captured, on the same tensors from outside.

    Raises (by `forward` and `backward`):
        GraphRuleError: a captured graph would go wrong; it names the operation.
    """

    def _capture(self, inputs: Inputs, pool: Any, warmups: int) -> None:
        self._trace: Trace | None = None
        outputs = self.function(*self.inputs)  # the warm-up may build tables
        run_backward(outputs, [torch.zeros_like(x) for x in outputs], self.inputs)
        copy_into(self.inputs, inputs)
        del outputs
        copies = self._forward()
        self._backward([torch.zeros_like(x) for x in copies])
        self._trace = self._watch.trace

    def _forward(self) -> tuple[Tensor, ...]:
        self._watch = Watch(self.inputs, self._trace)
        self._outputs = self._watched(lambda: self.function(*self.inputs))
        return tuple(x.detach().clone() for x in self._outputs)

    def _backward(self, grads: Inputs) -> tuple[Tensor | None, ...]:
        static = [None if g is None else g.clone() for g in grads]
        # Filled before the replay, as the inputs are.
        self._watch.add_inputs(static, first=len(self.inputs))
        gradients = self._watched(lambda: run_backward(self._outputs, static, self.inputs))
        copies = tuple(None if g is None else g.clone() for g in gradients)
        self._outputs = ()
        del gradients
        for x in self.inputs:
            if x is not None:
                x.grad = None
        self._watch.finish()
        self._watch.release()
        return copies

    def _watched(self, run: Callable[[], Any]) -> Any:
        with torch.enable_grad(), not_on_host(), HostRules(), self._watch:
            return run()


def not_on_host() -> AbstractContextManager[Any]:
    """Make no tensor `is_cpu`: what code reads on the host where it may, it leaves alone inside.

    By torch's class, since a mode of torch functions does not reach into backward passes.
    """
    return mock.patch.object(torch.Tensor, "is_cpu", False)


class HostRules(TorchFunctionMode):
    """Catches calls that wait for the device or bring the host's data, by their Python names."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if func in WAITING:
            raise _broken("no waiting for the host", f"Tensor.{name}")
        named = [*args[1:], *(kwargs or {}).values()]
        if func is T.to and any(isinstance(x, str) and x.startswith("cpu") for x in named):
            raise _broken("no waiting for the host", 'Tensor.to("cpu")')
        if func in (torch.tensor_split, T.tensor_split) and any(isinstance(x, T) for x in named):
            raise _broken("no waiting for the host", "torch.tensor_split", "by a tensor")
        if func in FROM_HOST and not (args and isinstance(args[0], Tensor)):
            raise _broken("no data from the host", f"torch.{name}")
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation, and compares it with the one expected where there is one."""

    def __init__(self, inputs: Sequence[Input], expected: Trace | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.expected = expected
        self.roles: dict[int, tuple[str, int]] = {}
        # Held for the run, so that no address is used twice; `release` lets them go.
        self.created_storages: list[tuple[Any, str]] = []
        self.add_inputs(inputs)

    def add_inputs(self, inputs: Sequence[Input], first: int = 0) -> None:
        """Give tensors the roles of inputs, from number `first` on."""
        for number, x in enumerate(inputs, first):
            if x is not None:
                self.roles[x.untyped_storage()._cdata] = ("input", number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        self._check(func, name, args)
        storages: list[Any] = []
        numbers: list[Any] = []
        _take_apart(
            (args, tuple(kwargs.items())), lambda x: storages.append(self._role(x)), numbers
        )
        self._note(Operation(func.name(), tuple(storages), tuple(numbers)))
        self._note_writes(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.trace.random = True
        result = func(*args, **kwargs)
        _take_apart(result, lambda x: self._make(x, func.name()), [])
        return result

    def finish(self) -> None:
        """The run is over: was something left undone?"""
        if self.expected is not None:
            done, planned = self.trace.operations, self.expected.operations
            if len(done) < len(planned):
                name = planned[len(done)].name
                raise _broken("the same operations", name, f"operation {len(done)} is missing")

    def release(self) -> None:
        """Release the run's tensors, and list what is still referenced elsewhere."""
        created: list[tuple[Any, str]] = []
        for storage, name in self.created_storages:
            created.append((StorageWeakRef(storage), name))  # type: ignore[no-untyped-call]
            del storage
        self.created_storages.clear()
        waits = any(done.name.startswith(COLLECTIVES) for done in self.trace.operations)
        leaked = _still_held(created, MOMENT_S if waits else 0.0)
        if leaked:
            gc.collect()  # a cycle of dead objects holds nothing
            leaked = _still_held(leaked, PATIENCE_S if waits else 0.0)
        if leaked:
            raise _broken("no memory of the graph kept outside", leaked[0][1])

    def _note_writes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Which tensors from outside the operation writes into."""
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                _take_apart(value, lambda x: self._write(x, func.name()), [])

    def _write(self, x: Tensor, name: str) -> None:
        number = x.untyped_storage()._cdata
        if number in self.trace.outside:
            self.trace.written.setdefault(number, name)

    def _check(self, func: Any, name: str, args: Any) -> None:
        """Rules that one operation breaks by itself."""
        if torch.Tag.data_dependent_output in func.tags or name in WAITING_INSIDE:
            raise _broken("no waiting for the host", func.name())
        if name in INDEXING:
            if any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
                raise _broken("no shapes that depend on data", func.name(), "a mask as an index")
        elif torch.Tag.dynamic_output_shape in func.tags:
            raise _broken("no shapes that depend on data", func.name())

    def _note(self, now: Operation) -> None:
        """Write an operation down; it has to be the one of the capture."""
        index = len(self.trace.operations)
        self.trace.operations.append(now)
        if self.expected is None:
            return
        planned = self.expected.operations
        if index >= len(planned) or planned[index].name != now.name:
            planned_storage = planned[index].name if index < len(planned) else "the end"
            raise _broken(
                "the same operations", now.name, f"operation {index} was {planned_storage}"
            )
        if planned[index].numbers != now.numbers:
            changed = f"{planned[index].numbers} became {now.numbers}"
            raise _broken("the same numbers", now.name, f"operation {index}: {changed}")
        for planned_storage, current in zip(planned[index].storages, now.storages, strict=False):
            if planned_storage != current:
                change = (
                    "another tensor"
                    if planned_storage[0] != current[0]
                    else f"{planned_storage[1:]} became {current[1:]}"
                )
                raise _broken("the same storages", now.name, f"operation {index}: {change}")

    def _role(self, x: Tensor) -> tuple[Any, ...]:
        """The origin of a tensor's storage, and the tensor's layout in it."""
        storage = x.untyped_storage()
        number = storage._cdata
        role = self.roles.get(number)
        if role is None:
            role = ("outside", number)
            self.trace.outside[number] = storage
        return role, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype

    def _make(self, x: Tensor, name: str) -> None:
        """Note the storage of a result, unless it is known."""
        storage = x.untyped_storage()
        number = storage._cdata
        if number not in self.roles and number not in self.trace.outside:
            self.roles[number] = ("made", len(self.created_storages))
            self.created_storages.append((storage, name))


def _still_held(created: list[tuple[Any, str]], patience_s: float) -> list[tuple[Any, str]]:
    """The storages that are still referenced; waits until none is, or for `patience_s`."""
    until = time.monotonic() + patience_s
    while True:
        created = [(reference, name) for reference, name in created if not reference.expired()]
        if not created or time.monotonic() >= until:
            return created
        time.sleep(1e-4)


def _take_apart(nest: Any, see: Callable[[Tensor], Any], numbers: list[Any]) -> None:
    """Show every tensor of nested arguments to `see`, and list everything else."""
    if isinstance(nest, Tensor):
        see(nest)
    elif isinstance(nest, tuple | list):
        for part in nest:
            _take_apart(part, see, numbers)
    elif isinstance(nest, int | float | complex | str | None):
        # NaN is unlike itself, 1 is like True.
        numbers.append(repr(nest))
    elif isinstance(nest, torch.dtype | torch.device | torch.layout | torch.memory_format):
        numbers.append(str(nest))
    else:
        numbers.append(type(nest).__name__)


def _compare(first: Any, second: Any) -> None:
    """Check that two runs on the same inputs give the same bits."""
    firsts: list[Tensor] = []
    seconds: list[Tensor] = []
    _take_apart(_values(first), firsts.append, [])
    _take_apart(_values(second), seconds.append, [])
    for number, (a, b) in enumerate(zip(firsts, seconds, strict=True)):
        if not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            raise _broken("a repeatable result", f"output {number}")


def _values(nest: Any) -> Any:
    """Dicts as tuples of their values, at every depth."""
    if isinstance(nest, dict):
        return tuple(_values(value) for value in nest.values())
    if isinstance(nest, tuple | list):
        return tuple(_values(value) for value in nest)
    return nest


def _bytes(storage: Any) -> Tensor:
    """A copy of a storage's bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone()


def _spoil(x: Tensor) -> Tensor:
    """Overwrite what a graph would overwrite, with recognizable values."""
    if x.dtype == torch.bool:
        return x.logical_not_()
    worst = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min
    return x.fill_(worst)


def _broken(rule: Rule, operation: str, detail: str = "") -> GraphRuleError:
    """The error for a broken rule."""
    return GraphRuleError(
        f"a captured graph needs {rule}, and {operation} breaks it"
        + (f": {detail}" if detail else ""),
        hint=HINTS[rule],
    )


def graphed(function: Function, device: torch.device | str, **options: Any) -> CudaGraphs:
    """Return `CudaGraphs` of the function on a CUDA device, its `GraphRuleChecker` elsewhere."""
    if torch.device(device).type == "cuda":
        return CudaGraphs(function, **options)
    return GraphRuleChecker(function, **options)


@contextmanager
def check_graphs(device: torch.device | str = "cpu") -> Iterator[None]:
    """Put the checkers in the place of CUDA graphs; on a CUDA device graphs stay graphs."""
    if torch.device(device).type == "cuda":
        yield
        return
    with (
        mock.patch.object(cuda_graphs, "CudaGraphs", GraphRuleChecker),
        mock.patch.object(graphed_passes, "GraphedPass", CheckedPass),
    ):
        yield
