"""Convert FP8's delayed scaling state for another checkpoint: release, history, columns.

States follow their layers and experts by name (`checkpoint_objects`); those of several ranks are
merged when they are read (`merge_ranks`). Weights are read only to rebuild states.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from megtool.errors import UsageError
from megtool.fp8_state.experts import group_by_expert, separate_expert_states
from megtool.fp8_state.rebuild import rebuild_states
from megtool.megatron_state.extra_states.amax_report import (
    RELEASES,
    AmaxFinding,
    AmaxReport,
    AmaxTarget,
)
from megtool.megatron_state.extra_states.fp8_faults import (
    find_faults,
    has_equal_tensors,
    is_unused,
    make_finding,
    module_label,
)
from megtool.megatron_state.extra_states.merge_ranks import read_merge
from megtool.megatron_state.extra_states.names import (
    EMPTY,
    is_empty_value,
    is_extra_state,
    parse_site,
)
from megtool.megatron_state.extra_states.te_grouped_state import mix_expert_states
from megtool.megatron_state.extra_states.te_state import (
    ExtraState,
    convert_release,
    decode,
    resize_history,
    to_tree,
)
from megtool.megatron_state.saved_objects import read_object
from megtool.number_formats.delayed_scaling import Columns
from megtool.options.target import TargetOptions
from megtool.run_state.checkpoint_objects import CarriedObjects
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.catalogue import StoredObject

LONGEST = 1 << 20
"""The longest history that is written, in steps."""

_RELEASE = re.compile(r"(\d)(?:\.(\d+))?(?:\.\w+)*")
_LEAST_STATE_BYTES = 2048
"""A saved object with fewer bytes has no scales."""


def resolve_amax(options: TargetOptions) -> AmaxTarget:
    """Return what to do with FP8's scaling state.

    `te_version` is `1`, `2` or one of them with its minor number: 2.0 to 2.2 lay the columns of
    grouped experts out as 1.x does, 2.3 and later do not. `2` alone keeps them as they are in
    states of 2.x, and means 2.3 for those of 1.x.

    Raises:
        UsageError: a value is invalid.
    """
    release, columns = _parse_release(options.te_version)
    history = options.amax_history
    if history is not None and history > LONGEST:
        raise UsageError(
            f"an amax history cannot have {history} steps", hint=f"from 1 to {LONGEST}"
        )
    return AmaxTarget(mode=options.amax, release=release, history=history, columns=columns)


def _parse_release(text: str | None) -> tuple[int | None, Columns | None]:
    """The release to write for, and its column layout if the minor number says it."""
    if text is None:
        return None, None
    match = _RELEASE.fullmatch(text)
    if match is None or int(match[1]) not in RELEASES:
        raise UsageError(
            f"--te-version is {text!r}, which is no release of Transformer Engine",
            hint="1 for releases 1.x, 2.2 for 2.0 to 2.2, 2.3 for 2.3 and later; 2 for any of 2.x",
        )
    if match[1] == "1":
        return 1, "blocked"
    if match[2] is None:
        return 2, None
    return 2, "blocked" if int(match[2]) < 3 else "interleaved"


class ExtraStateTransfer:
    """The extra states for one target: converted to its form, counted and checked.

    `experts_per_rank` is the number of experts whose states Megatron-Core will join when it loads
    the target; 1 where each state has a module of its own, or states are joined here.
    """

    def __init__(
        self,
        source: CheckpointSource,
        carried: CarriedObjects,
        options: AmaxTarget,
        *,
        experts_per_rank: int = 1,
    ) -> None:
        self.findings: list[AmaxFinding] = []
        self._source, self._carried, self._options = source, carried, options
        self._merged = read_merge(source.catalogue)
        self._experts_per_rank = experts_per_rank
        self._raw: dict[str, ExtraState] = {}
        self._columns: Columns | None = None
        self._ambiguous: frozenset[str] = frozenset()
        self._delayed: dict[str, ExtraState] = {}
        self._empty: list[str] = []
        self._changed: dict[str, Any] = {}
        self._rewritten: set[str] = set()
        self._counts = dict.fromkeys(
            ("modules", "stateless", "merged", "differing", "rebuilt", "stripped"), 0
        )
        self._ranks = 1
        self._releases: set[int] = set()
        self._history = (0, 0)

    @property
    def release(self) -> int | None:
        """The release of Transformer Engine to write for; None where there are no states."""
        return self._options.release or max(self._releases, default=None)

    @property
    def columns(self) -> Columns:
        """The column layout for states of experts that share a module, as written.

        Without an option or a hint in the source, that of releases since 2.3.
        """
        return self._known_columns or "interleaved"

    @property
    def _known_columns(self) -> Columns | None:
        if self._options.columns is not None:
            return self._options.columns
        if self.release == 1:
            return "blocked"
        if max(self._releases, default=2) == 2:
            return self._columns
        return "interleaved"  # 1.x converted to any release of 2.x

    def note_assumed_columns(self) -> None:
        """Report the assumed layout if states of single experts are joined in an unknown one."""
        if self._known_columns is None:
            text = (
                "as Transformer Engine 2.3 and later lays them out; --te-version 2.2 for 2.0 to 2.2"
            )
            self.findings.append(AmaxFinding(module="experts", kind="assumed", text=text))

    def empty_state(self) -> Any:
        """The state of a module without FP8: None for 1.x, which 2.0 to 2.7 refuse."""
        return None if self.release in (None, 1) else to_tree(None, release=2)

    def convert(self, required: Collection[str]) -> None:
        """Convert the carried states; a state that needs no change keeps its bits.

        `required` names the objects that Megatron loads, with or without content.

        Raises:
            FormatError: a state is damaged or hostile.
        """
        options = self._options
        self._read()
        corrected = separate_expert_states(self._source.catalogue, self._raw)
        self._columns, self._ambiguous = corrected.columns, corrected.ambiguous
        self.findings += corrected.findings
        for name, state in self._raw.items():
            self._examine(name, corrected.states.get(name, state))
        if options.mode == "rebuild" and self._delayed:
            self._rebuild()
        if self._experts_per_rank > 1 and self.columns == "interleaved":
            self._mix_experts()
            if group_by_expert(self._delayed):
                self.note_assumed_columns()
        if options.mode == "strip":
            self._strip(required)
        elif options.release is not None:
            for name in self._empty:
                self._changed.setdefault(name, self.empty_state())
        self._store_changes()
        self.findings[:0] = self._merged.findings

    def _read(self) -> None:
        """Read the carried states, and list the empty ones."""
        options, catalogue = self._options, self._source.catalogue
        for name, stored in self._carried.objects.items():
            is_short = stored.extent is not None and stored.extent[2] < _LEAST_STATE_BYTES
            if is_short and options.release is None and options.mode != "strip":
                continue
            if not is_extra_state(name):
                continue
            file = catalogue.path(stored.extent[0]) if stored.extent else self._source.path
            value = read_object(catalogue, stored)
            state = decode(value, file=file)
            if state is not None:
                self._raw[name] = state
            elif is_empty_value(value):
                self._empty.append(name)

    def _examine(self, name: str, state: ExtraState) -> None:
        """Count one state, find its faults and convert it."""
        options, stored = self._options, self._carried.objects[name]
        self._releases.add(state.release)
        self._counts["modules" if state.is_delayed else "stateless"] += 1
        ranks = self._merged.ranks.get(id(stored.value), 1)
        self._ranks = max(self._ranks, ranks)
        self._counts["merged"] += ranks > 1
        if id(stored.value) in self._merged.differing:
            self._counts["differing"] += 1
            self._rewritten.add(name)
        module = module_label(name)
        if name not in self._ambiguous:
            self.findings += [make_finding(module, f, state) for f in find_faults(name, state)]
        new = self._reshape_state(module, state)
        if new is not None and new.is_delayed:
            self._delayed[name] = new
            before, after = self._history
            self._history = (
                max(before, state.history_length),
                max(after, new.history_length),
            )
        if new is not self._raw[name]:
            self._changed[name] = to_tree(new, release=None if new else options.release)

    def _reshape_state(self, module: str, state: ExtraState) -> ExtraState | None:
        """The state at the requested history and release; None where the release has no such."""
        options = self._options
        out: ExtraState | None = state
        if (
            options.history is not None
            and state.is_delayed
            and state.history_length != options.history
        ):
            out = resize_history(state, options.history)
        if options.release is not None and out is not None:
            out = convert_release(out, options.release)
            if out is None:
                text = f"Transformer Engine 1.x has no {state.recipe_name or 'recipe'}: left out"
                self.findings.append(AmaxFinding(module=module, kind="recipe", text=text))
        return out

    def _rebuild(self) -> None:
        """Rebuild states that contradict their weights."""
        unambiguous = [n for n in self._delayed if n not in self._ambiguous]
        names = {parse_site(self._carried.objects[n].name): n for n in unambiguous}
        states = {site: self._delayed[n] for site, n in names.items() if site is not None}
        rebuilt, findings = rebuild_states(self._source, states)
        self.findings += findings
        for site, state in rebuilt.items():
            name = names[site]
            self._delayed[name] = state
            self._changed[name] = to_tree(state)
            self._counts["rebuilt"] += 1

    def _mix_experts(self) -> None:
        """Mix the states of a rank's experts so that Megatron-Core joins them to the right ones."""
        num_experts, num_incomplete = self._experts_per_rank, 0
        modules = group_by_expert(
            {n: s for n, s in self._delayed.items() if n not in self._ambiguous}
        )
        for module, name_of in modules.items():
            for first in range(0, max(name_of) + 1, num_experts):
                names = [name_of[k] for k in range(first, first + num_experts) if k in name_of]
                mixed_states = (
                    mix_expert_states([self._delayed[n] for n in names])
                    if len(names) == num_experts
                    else None
                )
                if mixed_states is None:
                    num_incomplete += bool(names)
                    continue
                for name, state in zip(names, mixed_states, strict=True):
                    if state.release == self._raw[name].release and has_equal_tensors(
                        state, self._raw[name]
                    ):  # unchanged from the source
                        self._changed.pop(name, None)
                    else:
                        self._changed[name] = to_tree(state)
            if num_incomplete:
                text = f"not all of the {num_experts} experts of a rank have a state that fits"
                self.findings.append(AmaxFinding(module=module, kind="missing", text=text))
                num_incomplete = 0
        if modules:
            text = (
                f"for {num_experts} experts on each rank: Megatron-Core joins states of "
                "Transformer Engine 2.3 and later correctly at no other number "
                "(megtool reshards them)"
            )
            module = f"{len(modules):,} modules of experts"
            self.findings.append(AmaxFinding(module=module, kind="experts", text=text))

    def _strip(self, required: Collection[str]) -> None:
        """Drop empty and unused states that Megatron does not need."""
        unused = [n for n, state in self._delayed.items() if is_unused(state)]
        for name in (*self._empty, *unused):
            if name in required:
                if name in self._delayed or self._options.release is not None:
                    self._changed[name] = self.empty_state()
                continue
            self._counts["stripped"] += 1
            stored = self._carried.objects.pop(name)
            self._changed.pop(name, None)
            self._rewritten.discard(name)
            self._carried.drop(stored.name, EMPTY, is_lost=False)
        dropped = {d.name for d in self._carried.dropped}
        self._carried.moved = [n for n in self._carried.moved if n not in dropped]

    def _store_changes(self) -> None:
        objects = self._carried.objects
        derived = {objects[n].name for n in (*self._changed, *self._rewritten)}
        for name, value in self._changed.items():
            objects[name] = StoredObject(name=objects[name].name, kind="object", value=value)
        self._rewritten |= self._changed.keys()
        self._carried.moved = [n for n in self._carried.moved if n not in derived]
        self._carried.derived += sorted(derived)

    def report(self) -> AmaxReport | None:
        """The report; None where there is no state of Transformer Engine."""
        counts = self._counts
        if not (counts["modules"] or counts["stateless"] or counts["stripped"] or self.findings):
            return None
        return AmaxReport(
            mode=self._options.mode,
            empty=len(self._empty),
            ranks=self._ranks,
            source_release=max(self._releases, default=None),
            release=self.release,
            source_history=self._history[0],
            history=self._history[1],
            rewritten=len(self._rewritten),
            findings=tuple(self.findings),
            **counts,
        )
