"""Declarative config keys for mixtures of experts, and keys whose values are computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Default, Setting, unsupported
from megtool.convert.language.expression import evaluate
from megtool.errors import MappingError
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class EitherKey(Setting):
    """A field under one of several keys, which releases of transformers disagree on.

    The first that is there is read; the first of all is written. Without a default one has to be
    there.
    """

    names_keys: ClassVar[tuple[str, ...]] = ("keys",)

    keys: tuple[str, ...]
    field: str
    default: Any = None

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The value of the first key that has one."""
        values = [stored[k] for k in self.keys if stored.get(k) is not None]
        if not values and self.default is None:
            raise MappingError(f"the configuration lacks {self.keys[0]!r}")
        into[self.field] = values[0] if values else self.default
        return self.keys

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The first key."""
        into[self.keys[0]] = config.get(self.field)


@dataclass(frozen=True, slots=True)
class Nullable(Setting):
    """A key whose null is the field's 0; `absent` is the field where the key is not there, if the
    field `needs`, read before it, is not 0."""

    key: str
    field: str
    absent: int = 0
    needs: str | None = None

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The value, or 0."""
        absent = self.absent if self.needs is None or into[self.needs] else 0
        into[self.field] = stored.get(self.key, absent) or 0
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The value, or null."""
        into[self.key] = config.get(self.field) or None


@dataclass(frozen=True, slots=True)
class ScoreNorm(Setting):
    """Whether scores of the chosen experts, which are no softmax, are divided by their sum.

    Null counts as false. Without a key they are. It comes after the number of experts per token:
    Megatron divides where there are several, which is no setting of the model.
    """

    key: str | None = "norm_topk_prob"
    default: bool = True

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The field; None where it is what Megatron does."""
        divides = bool(stored.get(self.key, self.default)) if self.key else True
        is_usual = divides == (into["num_experts_per_token"] > 1)
        into["router_normalized"] = None if is_usual else divides
        return (self.key,) if self.key else ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The flag; without a key nothing, but refuse that they are not divided."""
        divides = config.router.router_normalized
        if divides is None:
            divides = config.moe.num_experts_per_token > 1
        if self.key:
            into[self.key] = divides
        elif not divides and config.moe.num_experts:
            raise MappingError(
                "scores of the chosen experts are not divided by their sum (router_normalized)",
                hint="in this family they are",
                error_id="unsupported-model",
            )


@dataclass(frozen=True, slots=True)
class UpTo(Setting):
    """A number without effect up to a limit, an expression over the fields read before it.

    The key is kept verbatim in `extra`. `effect` says what a larger one would change.
    """

    key: str
    limit: str
    effect: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Refuse a larger number."""
        value = stored.get(self.key)
        if value is None:
            return ()
        limit = evaluate(self.limit, into)
        if isinstance(value, bool) or not isinstance(value, int | float) or value > limit:
            raise unsupported(self.key, value, f"and more than {limit:g} {self.effect}")
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Nothing."""

    def known_values(self) -> dict[str, str]:
        """The limit."""
        return {self.key: f"at most {self.limit}"}


@dataclass(frozen=True, slots=True)
class Alike(Setting):
    """A number, or a list that has the same one for every layer; a list is kept verbatim."""

    key: str
    field: str
    default: int

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The number."""
        value = self._number(stored, into["num_layers"])
        into[self.field] = self.default if value is None else value
        return () if isinstance(stored.get(self.key), list | tuple) else (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The number, unless a list that was kept says the same."""
        value = config.get(self.field)
        listed = isinstance(config.extra.get(self.key), list | tuple)
        if not listed or self._number(config.extra, config.num_layers) != value:
            into[self.key] = value

    def _number(self, stored: Mapping[str, Any], layers: int) -> Any:
        value = stored.get(self.key)
        if not isinstance(value, list | tuple):
            return value
        if len(value) < layers or any(v != value[0] for v in value[:layers]):
            raise MappingError(
                f"{self.key} is {str(value)[:80]}",
                hint=f"the same number for each of {layers} layers",
                error_id="unsupported-model",
            )
        return value[0]


@dataclass(frozen=True, slots=True)
class Inverted(Setting):
    """A key that is true where the field is false."""

    key: str
    field: str
    default: bool

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The opposite of the key, or of its default."""
        value = stored.get(self.key)
        into[self.field] = not (self.default if value is None else value)
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The opposite of the field."""
        into[self.key] = not config.get(self.field)


@dataclass(frozen=True, slots=True)
class Unless(Setting):
    """A key that is inactive (0), and preserved verbatim, if the key `switch` is `value`.

    A `switch` that is absent counts as `value`.
    """

    names_keys: ClassVar[tuple[str, ...]] = ("key", "switch")

    key: str
    field: str
    switch: str
    value: str | bool

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The key's value, or 0 where it is switched off."""
        is_off = stored.get(self.switch, self.value) == self.value
        into[self.field] = 0 if is_off else stored.get(self.key) or 0
        return () if is_off else (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The value, unless it is 0."""
        if value := config.get(self.field):
            into[self.key] = value


@dataclass(frozen=True, slots=True)
class Multiple(Setting):
    """A key that is the field as a multiple of `unit`: shared experts by their number.

    Null is 0, and `absent` the number where the key is not there.
    """

    key: str
    field: str
    unit: str
    absent: int = 0

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The key times the unit, a field read before."""
        into[self.field] = (stored.get(self.key, self.absent) or 0) * into[self.unit]
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The number of units; nothing where experts have none beside them."""
        value, unit = config.get(self.field), config.get(self.unit)
        if not value:
            into[self.key] = None if config.moe.num_experts else 0  # classes may take no null
            return
        if not unit or value % unit:
            raise MappingError(
                f"{self.field} is {value!r}, no multiple of {self.unit} {unit!r}",
                hint=f"the family says it by {self.key!r} alone",
            )
        into[self.key] = value // unit


@dataclass(frozen=True, slots=True)
class Assumed(Setting):
    """A field that means nothing to the family: it is read as an expression and never written."""

    field: str
    expression: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The expression over the fields read before it."""
        into[self.field] = evaluate(self.expression, into)
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Nothing."""

    def complete(self, into: dict[str, Any], unsaid: Collection[str]) -> tuple[str, ...]:
        """Set the field as `read` does."""
        return self.read({}, into) if self.field in unsaid else ()


@dataclass(frozen=True, slots=True)
class Implied(Setting):
    """A key implied by fields: preserved verbatim if it was read, computed if not.

    One that is not kept `verbatim`, since another setting reads it, is always computed.
    """

    key: str
    expression: str
    verbatim: bool = True

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Nothing; the key goes to `extra`, if it is kept."""
        return () if self.verbatim else (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The expression over the fields, unless the key was kept."""
        if self.key not in config.extra:
            into[self.key] = evaluate(self.expression, config)


@dataclass(frozen=True, slots=True)
class Noted(Setting):
    """A field from a key that is preserved verbatim in `extra`: only a forward pass needs it.

    `expression` computes the field from the key's value, which it calls `x`, and from fields read
    before; `default` (or `Default("expression")`) is the field where the key is absent, and
    where it is null, unless `null` says another value for that.
    """

    key: str
    field: str
    default: Any
    expression: str = "x"
    null: Any = None

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The field; the key goes to `extra`."""
        value, known = stored.get(self.key), self.default
        if value is not None:
            known = evaluate(self.expression, {**into, "x": value})
        elif self.key in stored and self.null is not None:
            known = self.null
        elif isinstance(known, Default):
            known = evaluate(known.expression, into)
        into[self.field] = known
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The key that reads as the field, unless the one that was kept does, or none."""
        fields = config.to_fields()
        want = fields[self.field]
        if want is None and self.field == "softmax_scale":
            want = config.attention.head_dim**-0.5
        if self._reads_as({**config.extra, **into}, fields, want):
            return
        for value in self._inverses(fields, want):
            if self._reads_as({self.key: value}, fields, want):
                into[self.key] = value
                return

    def _inverses(self, fields: Mapping[str, Any], want: Any) -> Iterator[Any]:
        """Values of the key that may read as the field's value; those of a flag come first."""
        if " if x" in self.expression:
            yield from (True, False)
        yield want
        if isinstance(want, float | int) and want > 0:
            if self.expression.startswith("x * "):
                yield want / evaluate(self.expression, {**fields, "x": 1.0})
            for inverse in (1 / want, want**-2):
                yield round(inverse) if math.isclose(inverse, round(inverse)) else inverse

    def _reads_as(self, stored: Mapping[str, Any], fields: Mapping[str, Any], want: Any) -> bool:
        out = dict(fields)
        try:
            self.read(stored, out)
        except (ArithmeticError, TypeError, MappingError):
            return False
        value = out[self.field]
        if isinstance(value, float | int) and isinstance(want, float | int):
            return math.isclose(value, want, rel_tol=1e-9)
        return bool(value == want)

    def complete(self, into: dict[str, Any], unsaid: Collection[str]) -> tuple[str, ...]:
        """Set the field to its default."""
        if self.field not in unsaid:
            return ()
        self.read({}, into)
        return (self.key,)


@dataclass(frozen=True, slots=True)
class MoeSpan(Setting):
    """Mixtures of experts are every n-th layer (by `step`) from the layer `first` to `last`.

    Absent, every layer from the second to the last is one; a `last` of -1 is the last layer.
    """

    names_keys: ClassVar[tuple[str, ...]] = ("first", "last", "step")

    first: str
    last: str
    step: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """`moe_layer_freq`: 1 where every layer is a mixture, else a 0 or 1 for each layer."""
        layers = into["num_layers"]
        first, last, step = (
            default if stored.get(key) is None else stored[key]
            for key, default in ((self.first, 1), (self.last, -1), (self.step, 1))
        )
        if any(isinstance(x, bool) or not isinstance(x, int) for x in (first, last, step)) or (
            step < 1 or first < 0
        ):
            raise MappingError(
                f"experts are in layers {first!r} to {last!r}, by steps of {step!r}",
                hint=f"integers: {self.first}, {self.last} and {self.step}",
            )
        end = layers if last == -1 else last + 1
        flags = tuple(int(first <= i < end and not (i + 1) % step) for i in range(layers))
        into["moe_layer_freq"] = 1 if all(flags) else flags
        return (self.first, self.last, self.step)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The three keys, if they can say it."""
        moe = sorted(layer_sets.moe_layers(config))
        steps = {b - a for a, b in itertools.pairwise(moe)} or {1}
        step, first = min(steps), moe[0] if moe else config.num_layers
        if len(steps) > 1 or (first + 1) % step:
            raise MappingError(
                f"moe_layer_freq is {config.moe.moe_layer_freq!r}",
                hint="in this family every n-th layer of a span is a mixture of experts",
            )
        last = moe[-1] if moe else config.num_layers - 1
        into |= {self.first: first, self.last: last, self.step: step}


_TYPES = ("dense", "sparse")


@dataclass(frozen=True, slots=True)
class MoeLayers(Setting):
    """Which layers are mixtures of experts, in all notations that configurations use.

    `step` names a key n: every n-th layer, beginning with the n-th. `first` names a key that
    counts dense layers before all others, `num_dense` where it is absent. `dense` and `moe` name
    lists of layers; a list of the mixtures overrules the rest. What is written is one list, or the
    count. `types` names a list with `dense` or `sparse` for every layer, which overrules all of
    them, and is preserved verbatim; `flags` one with a 0 or 1 for every layer, which is written
    beside it.
    """

    names_keys: ClassVar[tuple[str, ...]] = ("step", "first", "dense", "moe", "types", "flags")

    counts_layers: ClassVar[bool] = True

    step: str | None = None
    first: str | None = None
    dense: str | None = None
    moe: str | None = None
    types: str | None = None
    flags: str | None = None
    num_dense: int = 0

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """`moe_layer_freq`: 1 where every layer is a mixture, else a 0 or 1 for each layer."""
        layers = range(into["num_layers"])
        step = self._int(self.step, stored, 1)
        first = self._int(self.first, stored, self.num_dense, least=0)
        dense, listed = self._list(self.dense, stored) or (), self._list(self.moe, stored)
        for i in (*dense, *(listed or ())):
            if i not in layers:
                raise MappingError(
                    f"layer {i!r} is listed in {(self.moe if listed else self.dense)!r}, "
                    f"but there are {len(layers)} layers"
                )
        if listed is None:
            listed = [i for i in layers if not (i + 1) % step and i >= first and i not in dense]
        key, types = self.types, self._list(self.types, stored)
        if types is None and (numbers := self._list(self.flags, stored)) is not None:
            key, types = self.flags, [_TYPES[n] if n in (0, 1) else n for n in numbers]
        if types is not None:
            if len(types) != len(layers) or not set(map(str, types)) <= set(_TYPES):
                raise MappingError(
                    f"{key} is {str(stored.get(key or ''))[:80]}",
                    hint=f"{'dense or sparse' if key == self.types else '0 or 1'} for each layer",
                )
            listed = [i for i in layers if types[i] == _TYPES[1]]
        flags = tuple(int(i in listed) for i in layers)
        into["moe_layer_freq"] = 1 if all(flags) else flags
        if types is not None:
            return ()
        return tuple(k for k in (self.step, self.first, self.dense, self.moe) if k)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """A list of layers, or how many dense ones come first."""
        layers, moe = range(config.num_layers), layer_sets.moe_layers(config)
        if self.types:
            types = [_TYPES[i in moe] for i in layers]
            is_counted = self.first and moe == set(layers[min(moe, default=len(layers)) :])
            if config.extra.get(self.types) == types:
                return
            if self.types in config.extra or not is_counted:
                into[self.types] = types
                if self.flags:
                    into[self.flags] = [int(i in moe) for i in layers]
            if not is_counted:
                return
        if self.step:
            into[self.step] = 1
        if self.moe:
            into[self.moe] = sorted(moe)
        elif self.dense:
            into[self.dense] = [i for i in layers if i not in moe]
        elif self.first:
            first = min(moe, default=config.num_layers)
            if len(moe) != config.num_layers - first:
                raise MappingError(
                    f"moe_layer_freq is {config.moe.moe_layer_freq!r}",
                    hint="in this family all dense layers come before the mixtures of experts",
                )
            into[self.first] = first

    @staticmethod
    def _int(key: str | None, stored: Mapping[str, Any], default: int, *, least: int = 1) -> int:
        value = stored.get(key) if key else None
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise MappingError(f"{key} is {value!r}", hint=f"an integer of at least {least}")
        return value

    @staticmethod
    def _list(key: str | None, stored: Mapping[str, Any]) -> list[Any] | None:
        value = stored.get(key) if key else None
        if value is not None and not isinstance(value, list | tuple):
            raise MappingError(f"{key} is {value!r}", hint="a list of layers")
        return None if value is None else list(value)
