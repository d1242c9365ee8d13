"""Comparison of the training state of two checkpoints: everything a resumed run continues from.

State is read into named entries, the same for every format, so that a format that nests or names it
differently does not differ. Values are compared as data: tensors inside objects by their bytes,
numbers as numbers. Moments and master weights are tensors and are compared with the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from megtool.commands.reports.verify import Difference, DifferenceKind, PartCheck
from megtool.commands.verification.attached_files import digest_file, parse_json
from megtool.formats.header_reader import list_names
from megtool.megatron_state.extra_states.names import (
    SUFFIX,
    Site,
    is_empty_value,
    is_extra_state,
    parse_site,
)
from megtool.megatron_state.extra_states.te_state import ExtraState, decode
from megtool.megatron_state.param_groups import is_group_object, scalar_value
from megtool.megatron_state.random_state import is_rerun_idle, is_rerun_object, is_rng_object
from megtool.megatron_state.ranks.objects import is_rank_object
from megtool.megatron_state.saved_objects import read_object, saved_args
from megtool.pickles.reader import Inert, PersistentRef, as_bytes, dict_items, is_global
from megtool.pickles.zip_reader import load_object
from megtool.run_state.common_state import read_iteration
from megtool.run_state.state_dict_groups import is_group_entry, read_any_groups
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import is_regular_file, opened, read_file
from megtool.tensors.catalogue import Catalogue

PART: Final = "training state"

_SCHEDULERS = ("opt_param_scheduler", "lr_scheduler")
_SAMPLES = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_BRIDGE_STATE = "train_state.pt"
_TRAINER_STATE = "trainer_state.json"
_TRAINER_ENTRIES = ("global_step", "epoch", "max_steps", "num_train_epochs", "train_batch_size")
_TRAINER_FILES = re.compile(
    r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|custom_checkpoint)"
    r"(_\d+)*\.(pt|pth|bin|pkl)"
)
"""Files of transformers' Trainer and of accelerate, beside weights."""
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Settings that tell one param group from another."""
_OF_LAYOUT = frozenset({"params", "is_expert_parallel", "is_vision_model_param"})
"""Entries of a param group that say where its parameters are, and nothing about the update."""
_IN_COMMON = ("args", "checkpoint_version", "num_floating", "iteration", *_SCHEDULERS)
_MEGATRON = ("torch_dist", "megatron")
_RANKS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_RANDOM = "random state "
_SHOWN_NAMES = 4
_RELATIVE = 1e-7  # float32 and float64 of one number


@dataclass(slots=True)
class TrainingState:
    """State of one checkpoint by name, and names of state that is not compared, with the reason."""

    path: str
    entries: dict[str, Any] = field(default_factory=dict)
    groups: dict[tuple[Any, ...], dict[str, list[Any]]] = field(default_factory=dict)
    extra_states: dict[Site | str, Any] = field(default_factory=dict)
    uncompared: dict[str, str] = field(default_factory=dict)


def compare_training_state(
    a: CheckpointSource, b: CheckpointSource
) -> tuple[PartCheck, list[Difference]]:
    """Compare iteration, scheduler, param groups, random state, sample counts, scaler, extra state.

    State that only one of the two holds is a difference where both are of one kind of format. A
    conversion between kinds loses what the other has no place for: that is named as not compared,
    and so is random state that belongs to the ranks of another layout.

    Raises:
        FormatError: an object is damaged, or names something hostile.
    """
    x, y = read_training_state(a), read_training_state(b)
    args = [saved_args(c) for c in (a.catalogue, b.catalogue)]
    kinds = {  # NeMo's saves are Megatron's without its args
        (_MEGATRON, "args" in (c.metadata.get("common") or ()))
        if c.format in _MEGATRON
        else c.format
        for c in (a.catalogue, b.catalogue)
    }
    layouts = [[known.get(name) for name in _RANKS] if known else None for known in args]
    outcome = _Outcome(
        x.path,
        y.path,
        is_one_kind=len(kinds) == 1,
        is_one_layout=layouts[0] is not None and layouts[0] == layouts[1],
    )
    outcome.compare_entries("", x.entries, y.entries)
    outcome.compare_groups(x, y)
    outcome.compare_extra_states(x, y)
    for state in (x, y):
        outcome.uncompared |= {
            f"{name} of {state.path}": reason for name, reason in state.uncompared.items()
        }
    return outcome.part(), outcome.differences


def read_training_state(source: CheckpointSource) -> TrainingState:
    """Read the training state of a checkpoint, whatever its format.

    Raises:
        FormatError: an object is damaged, or names something hostile.
    """
    catalogue = source.catalogue
    out = TrainingState(str(source.path))
    common = catalogue.metadata.get("common")
    common = common if isinstance(common, dict) else {}
    iteration: float | None = read_iteration(catalogue)
    if catalogue.root.name.isdigit() and "iteration" not in common:
        iteration = None  # a number that only the folder's name says is where it lies, no state
    if iteration is None and (stored := catalogue.objects.get("iteration")) is not None:
        iteration = scalar_value(read_object(catalogue, stored)) or None
    if iteration:  # 0 is that of a model that no run has trained, as a release has none
        out.entries["iteration"] = iteration
    args = saved_args(catalogue)
    if iteration or source.view.states:  # args of a release count no samples of a run
        out.entries |= {name: args[name] for name in _SAMPLES if args.get(name) is not None}
    for name in _SCHEDULERS:
        if (tree := _scheduler(catalogue, common, name)) is not None:
            out.entries |= {f"{name}.{k}": plain_value(v) for k, v in tree.items()}
    _read_bridge_state(catalogue, out)
    _read_trainer_files(catalogue, out)
    _read_groups(catalogue, out)
    for name in catalogue.objects:
        _read_object(catalogue, name, out)
    return out


def _scheduler(
    catalogue: Catalogue, common: Mapping[str, Any], name: str
) -> Mapping[str, Any] | None:
    """Return the learning rate scheduler's state: of the common state, a rank's file or objects."""
    trees = catalogue.metadata.get("rank_trees")
    trees = list(trees.values()) if isinstance(trees, Mapping) else []
    for tree in (common, *trees):
        state = next((v for k, v in dict_items(tree) or () if k == name), None)
        if (pairs := dict_items(state)) is not None:
            return {str(k): v for k, v in pairs}
    prefix = f"{name}."
    objects = {n: o for n, o in catalogue.objects.items() if n.startswith(prefix)}
    values = {n.removeprefix(prefix): read_object(catalogue, o) for n, o in objects.items()}
    return values or None


def _read_bridge_state(catalogue: Catalogue, out: TrainingState) -> None:
    """Take the step and the sample counts of Megatron-Bridge's train_state.pt."""
    path = catalogue.auxiliary_files.get(_BRIDGE_STATE)
    if path is None:
        return
    with opened(path) as fd:
        tree = load_object(fd, 0, path.stat().st_size, file=path)
    values = {str(k): scalar_value(v) for k, v in dict_items(tree) or ()}
    for name in _SAMPLES:
        if values.get(name) is not None:
            out.entries.setdefault(name, values[name])
    if values.get("step"):
        out.entries.setdefault("iteration", values["step"])


def _read_trainer_files(catalogue: Catalogue, out: TrainingState) -> None:
    """Take the files that transformers' Trainer and accelerate write beside weights."""
    if catalogue.format not in ("hf", "safetensors") or not catalogue.root.is_dir():
        return
    for name in list_names(catalogue.root):
        path = catalogue.root / name
        if _TRAINER_FILES.fullmatch(name) and is_regular_file(path):
            out.entries[name] = digest_file(path)
        elif name == _TRAINER_STATE and is_regular_file(path):
            value = parse_json(read_file(path))
            values = value if isinstance(value, dict) else {}
            out.entries |= {
                f"trainer_state.{k}": values[k]
                for k in _TRAINER_ENTRIES
                if values.get(k) is not None
            }


def _read_groups(catalogue: Catalogue, out: TrainingState) -> None:
    groups = read_any_groups(catalogue)
    for state in groups.chain if groups else ():
        optimizer = state.get("optimizer")
        listed = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
        for group in listed if isinstance(listed, list) else ():
            if not isinstance(group, Mapping):
                continue
            settings = {str(k): plain_value(v) for k, v in group.items() if k not in _OF_LAYOUT}
            values = out.groups.setdefault(tuple(settings.get(k) for k in _GROUP_KEYS), {})
            for key, value in settings.items():
                known = values.setdefault(key, [])
                if not any(_is_same(value, other) for other in known):
                    known.append(value)
        for key, value in dict_items(state.get("grad_scaler")) or ():
            out.entries.setdefault(f"grad_scaler.{key}", plain_value(value))


def _read_object(catalogue: Catalogue, name: str, out: TrainingState) -> None:
    """Take one object, unless it is read with the groups, the scheduler or the args."""
    if is_group_object(name) or is_group_entry(name) or name.startswith(_IN_COMMON):
        return
    if is_rerun_object(name):
        if not is_rerun_idle(catalogue):
            out.uncompared["rerun state"] = "it belongs to ranks of one layout"
    elif is_rank_object(name):
        out.uncompared["ModelOpt's state of ranks"] = "it belongs to modules of one layout"
    elif is_extra_state(name):
        value = read_object(catalogue, catalogue.objects[name])
        if not is_empty_value(value):
            state = decode(value)
            out.extra_states[parse_site(name) or name] = state or plain_value(value)
    else:
        key = f"{_RANDOM}{name.rpartition('/')[2]}" if is_rng_object(name) else name
        out.entries[key] = plain_value(read_object(catalogue, catalogue.objects[name]))


def plain_value(node: Any) -> Any:
    """Return inert data as plain data that compares by value.

    Tensors and arrays become their bytes with the numbers beside them; names of the functions that
    rebuild them, devices and storage keys are left out.
    """
    if node is None or isinstance(node, str | int | float | bytes):
        return node
    if isinstance(node, PersistentRef):
        return node.data
    if is_global(node):
        return node.qualname
    if (data := as_bytes(node)) is not None:
        return data
    if (pairs := dict_items(node)) is not None:
        return {str(k): plain_value(v) for k, v in pairs}
    if isinstance(node, list | tuple | set | frozenset):
        return [plain_value(v) for v in node]
    if isinstance(node, Inert):
        if node.module.startswith("torch._utils"):  # a tensor
            number = scalar_value(node)
            reference = next((a for a in node.args if isinstance(a, PersistentRef)), None)
            data = reference.data if reference is not None else None
            is_single = number is not None and data is not None and len(data) <= 8
            return number if is_single else plain_value(list(node.args[:1]))
        parts = [*node.args, *node.kwargs.values(), *node.items, *node.pairs, node.state]
        return [plain_value(part) for part in parts]
    return repr(node)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a == b)
    if isinstance(a, int | float) and isinstance(b, int | float):
        both_nan = a != a and b != b
        return both_nan or a == b or math.isclose(a, b, rel_tol=_RELATIVE)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[k], b[k]) for k in a)
    return bool(a == b)


class _Outcome:
    """The comparison so far."""

    def __init__(self, a: str, b: str, *, is_one_kind: bool, is_one_layout: bool) -> None:
        self.a, self.b = a, b
        self.is_one_kind, self.is_one_layout = is_one_kind, is_one_layout
        self.compared: list[str] = []
        self.uncompared: dict[str, str] = {}
        self.differences: list[Difference] = []

    def compare_entries(self, place: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
        """Compare entries of one name."""
        for name in (*a, *(n for n in b if n not in a)):
            if name in a and name in b:
                self.compared.append(f"{place}{name}")
                if not _is_same(a[name], b[name]):
                    self.differ(f"{place}{name}", _describe(a[name], b[name], self.a, self.b))
            else:
                self.leave(f"{place}{name}", is_in_a=name in a)

    def compare_groups(self, a: TrainingState, b: TrainingState) -> None:
        """Compare param groups that have the same multipliers."""
        left, right = ({k: v for k, v in s.groups.items()} for s in (a, b))
        only_a, only_b = [k for k in left if k not in right], [k for k in right if k not in left]
        if len(only_a) == len(only_b) and only_a:  # the multipliers themselves differ
            for key_a, key_b in zip(only_a, only_b, strict=True):
                right[key_a] = right.pop(key_b)
        for key in (*left, *(k for k in right if k not in left)):
            name = _group_name(key) if len(left) > 1 or len(right) > 1 else "param group"
            if key not in left or key not in right:
                self.leave(name, is_in_a=key in left)
                continue
            group_a, group_b = (
                {k: v[0] if len(v) == 1 else v for k, v in side[key].items()}
                for side in (left, right)
            )
            self.compare_entries(f"{name}: ", group_a, group_b)

    def compare_extra_states(self, a: TrainingState, b: TrainingState) -> None:
        """Compare scaling state by module."""
        left, right = a.extra_states, b.extra_states
        both = [site for site in left if site in right]
        for site in both:
            name = f"{_module(site)}{SUFFIX}"
            self.compared.append(name)
            if (text := _compare_states(left[site], right[site])) is not None:
                self.differ(name, text)
        for is_in_a, state, other in ((True, left, right), (False, right, left)):
            only = [_module(site) for site in state if site not in other]
            if only:
                names = ", ".join(only[:_SHOWN_NAMES]) + (" …" if len(only) > _SHOWN_NAMES else "")
                self.leave(f"extra state of {names}", is_in_a=is_in_a)

    def leave(self, name: str, *, is_in_a: bool) -> None:
        """Record state that only one of the two has."""
        has, lacks = (self.a, self.b) if is_in_a else (self.b, self.a)
        of_layout = name.startswith(_RANDOM) and not self.is_one_layout
        if self.is_one_kind and not of_layout:
            self.compared.append(name)
            self.differ(name, f"{has} has it, and {lacks} does not", kind="missing")
            return
        reason = (
            "it belongs to ranks of its layout" if of_layout else "the formats are of two kinds"
        )
        self.uncompared[name] = f"{has} alone has it, and {reason}"

    def differ(self, name: str, text: str, kind: DifferenceKind = "state") -> None:
        """Record a difference."""
        self.differences.append(
            Difference(tensor=name, stored=name, kind=kind, text=text, part=PART)
        )

    def part(self) -> PartCheck:
        """Return the verdict."""
        uncompared = self.uncompared
        if not self.compared and not uncompared:
            uncompared = {PART: "neither of the two holds any"}
        return PartCheck.of(PART, self.compared, uncompared, self.differences)


def _group_name(key: tuple[Any, ...]) -> str:
    known = (f"{k}={v}" for k, v in zip(_GROUP_KEYS, key, strict=True) if v is not None)
    return f"param group {' '.join(known)}".rstrip()


def _module(site: Site | str) -> str:
    if isinstance(site, str):
        return site.partition(SUFFIX)[0]
    return site.module if site.expert is None else f"{site.module} of expert {site.expert}"


def _compare_states(a: Any, b: Any) -> str | None:
    """Return how two extra states differ; None if their numbers are the same.

    Facts beside the tensors are those of a release of Transformer Engine.
    """
    if not isinstance(a, ExtraState) or not isinstance(b, ExtraState):
        is_same = not isinstance(a, ExtraState) and not isinstance(b, ExtraState) and _is_same(a, b)
        return None if is_same else "its contents differ"
    wrong = []
    for name in a.tensors.keys() & b.tensors.keys():
        x, y = a.tensors[name], b.tensors[name]
        if x.shape != y.shape:
            wrong.append(f"{name} has the shapes {list(x.shape)} and {list(y.shape)}")
        elif not np.array_equal(x, y, equal_nan=True):
            count = int((~((x == y) | ((x != x) & (y != y)))).sum())
            wrong.append(f"{count} of {x.size} numbers of {name} differ")
    if a.is_delayed != b.is_delayed:
        wrong.append("one of the two has no scales")
    return "; ".join(sorted(wrong)) or None


def _describe(a: Any, b: Any, path_a: str, path_b: str) -> str:
    simple = (str, int, float, bool, type(None))
    is_short = all(
        isinstance(v, simple)
        or (isinstance(v, list) and len(v) <= 4 and all(isinstance(x, simple) for x in v))
        for v in (a, b)
    )
    if is_short:
        return f"{a!r:.80} in {path_a}, {b!r:.80} in {path_b}"
    return f"differs in {', '.join(_paths(a, b))}" if isinstance(a, dict | list) else "differs"


def _paths(a: Any, b: Any, place: str = "") -> Iterator[str]:
    """Yield the names of the entries that differ, at most a few."""
    num_yielded = 0
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(f"{place}.{k}" if place else k, a.get(k), b.get(k)) for k in {**a, **b}]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(f"{place}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    for name, x, y in pairs:
        if num_yielded < _SHOWN_NAMES and not _is_same(x, y):
            num_yielded += 1
            yield next(_paths(x, y, name), name)
    if not pairs:
        yield place or "its contents"
