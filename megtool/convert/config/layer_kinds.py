"""Declarative config keys that say which branches every layer has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.hybrid import kinds_of, moe_flags, paired
from megtool.convert.config.keys import Setting, num_layers
from megtool.errors import MappingError
from megtool.spec import layer_sets
from megtool.spec.layer_symbols import ATTENTION, EXPERTS, MAMBA, MLP
from megtool.spec.model_config import MOST_LAYERS, ModelConfig


@dataclass(frozen=True, slots=True)
class LayerKinds(Setting):
    """A list with the kind of every layer.

    `kinds` are the symbols of `ModelConfig.layer_kinds` by what the list calls them, the name that
    is written first. With `feeds`, each layer also has an MLP, or the experts that were read
    before. Where all of these mix tokens by attention, `layer_kinds` is None; where some have a
    Mamba-2 mixer, every branch is a layer of its own, as in Megatron's HybridModel, and
    `count_key` counts pairs (see `mapping.in_branches`). Without the list,
    `pattern_key` has the symbols themselves as text; or every layer but each `every`-th
    (`every_key`) is of the first kind, and that of the second; or `numbers_key` has the numbers of
    the layers of the second kind, which all are where it is missing, too. With `by_number` the list
    has the numbers of the layers of the second kind alone, and no list means none. With `counts`
    the list says how many layers there are. The keys are kept verbatim in `extra`.
    """

    key: str
    kinds: tuple[tuple[str, str], ...]
    feeds: bool = False
    counts: bool = False
    pattern_key: str | None = None
    every_key: str | None = None
    every: int = 0
    by_number: bool = False
    numbers_key: str | None = None
    count_key: str = "num_hidden_layers"

    def numbers_branches(self) -> bool:
        """True unless its layers are a mixer and an MLP or experts."""
        return not self.feeds

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Symbols of every layer; no key counts as understood, so that all are kept."""
        symbols = self._symbols(stored, None if self.counts else num_layers(into))
        if self.counts:
            into["num_layers"] = len(symbols)
        if self.feeds and set(symbols) == {ATTENTION}:
            into["layer_kinds"] = None
            return ()
        if self.feeds:
            moe = moe_flags(into, len(symbols))
            symbols = [s + (EXPERTS if m else MLP) for s, m in zip(symbols, moe, strict=True)]
            if any(MAMBA in s for s in symbols):
                symbols = list("".join(symbols))
                into["num_layers"] = len(symbols)
        into["layer_kinds"] = tuple(symbols)
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The list, unless what was kept says the same."""
        kinds = kinds_of(config)
        if self.feeds and all(len(k) == 1 for k in kinds):
            kinds = paired(kinds)
            into[self.count_key] = len(kinds)
        symbols = [k.rstrip(MLP + EXPERTS) if self.feeds else k for k in kinds]
        names = {symbol: name for name, symbol in reversed(self.kinds)}
        if unknown := [s for s in symbols if s not in names]:
            raise MappingError(
                f"a layer is of the kind {unknown[0]!r}, and the family knows {', '.join(names)}",
                error_id="unsupported-model",
            )
        keys = (self.key, self.pattern_key, self.every_key, self.numbers_key)
        is_kept = any(config.extra.get(k) is not None for k in keys if k)
        is_kept |= self.by_number and self.key in config.extra
        if is_kept and self._symbols(config.extra, len(symbols)) == symbols:
            return
        if self.by_number:
            into[self.key] = [i for i, s in enumerate(symbols) if s == self.kinds[1][1]]
            return
        into[self.key] = [names[s] for s in symbols]
        if self.numbers_key and self.numbers_key in config.extra:
            into[self.numbers_key] = [i for i, s in enumerate(symbols) if s == self.kinds[1][1]]
        if self.pattern_key and self.pattern_key in config.extra:
            into[self.pattern_key] = "".join(symbols)

    def _symbols(self, stored: Mapping[str, Any], layers: int | None) -> list[str]:
        listed, by_name = stored.get(self.key), dict(self.kinds)
        if self.by_number and layers is not None:
            return self._numbered(listed or (), layers, self.key)
        if listed is None and self.pattern_key and stored.get(self.pattern_key) is not None:
            listed, by_name = stored[self.pattern_key], {s: s for _, s in self.kinds}
        if listed is None and self.every and layers is not None:
            every = (stored.get(self.every_key) if self.every_key else None) or self.every
            linear, full = self.kinds[0][1], self.kinds[1][1]
            return [linear if (i + 1) % every else full for i in range(layers)]
        if listed is None and self.numbers_key and layers is not None:
            numbers = stored.get(self.numbers_key)
            everywhere = range(layers) if numbers is None else numbers
            return self._numbered(everywhere, layers, self.numbers_key)
        by_pattern = self.key not in stored and stored.get(self.pattern_key or "") is not None
        key = (self.pattern_key if by_pattern else None) or self.key
        if not isinstance(listed, Sequence) or not 0 < len(listed) <= MOST_LAYERS:
            problem = f"is {str(listed)[:80]!r}" if listed is not None else "is missing"
            raise MappingError(f"{key} {problem}", hint="one kind for each layer")
        if unknown := [k for k in listed if not isinstance(k, str) or k not in by_name]:
            raise MappingError(
                f"{key} has a layer of the kind {unknown[0]!r}",
                hint=f"known: {', '.join(by_name)}",
                error_id="unsupported-model",
            )
        if layers is not None and len(listed) != layers:
            raise MappingError(
                f"{key} has {len(listed)} layers, and num_layers is {layers}",
                hint="one kind for each layer",
            )
        return [by_name[k] for k in listed]

    def _numbered(self, listed: Any, layers: int, key: str) -> list[str]:
        """Symbols of every layer by the numbers of those of the second kind."""
        is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
        if not is_list or any(i not in range(layers) for i in listed):
            raise MappingError(
                f"{key} is {str(listed)[:80]}",
                hint=f"a list of numbers of layers, of which there are {layers}",
            )
        others, second = self.kinds[0][1], self.kinds[1][1]
        return [second if i in listed else others for i in range(layers)]


@dataclass(frozen=True, slots=True)
class EveryLayer(Setting):
    """All layers have the same branches, which no key says."""

    kind: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The symbols, for every layer."""
        into["layer_kinds"] = (self.kind,) * num_layers(into)
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Nothing, but refuse other layers."""
        if odd := set(kinds_of(config)) - {self.kind}:
            raise MappingError(
                f"a layer is of the kind {min(odd)!r}",
                hint=f"in this family all layers are of the kind {self.kind!r}",
                error_id="unsupported-model",
            )


@dataclass(frozen=True, slots=True)
class KindKey(Setting):
    """A key that means something where a layer is of `kind`; elsewhere the field is 0.

    Then the key is preserved verbatim. Null is 0, too, and absence is `default`.
    """

    key: str
    field: str
    kind: str
    default: int = 0

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The key's value, or 0."""
        if not _has_kind(into, self.kind):
            into[self.field] = 0
            return ()
        into[self.field] = stored.get(self.key, self.default) or 0
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The field, if a layer is of the kind; 0 as the default, or null."""
        if any(self.kind in k for k in kinds_of(config)):
            into[self.key] = config.get(self.field) or self.default or None


@dataclass(frozen=True, slots=True)
class MambaHeads(Setting):
    """Number and size of the heads of Mamba-2 mixers, which have `expand` * hidden size channels.

    The size may be `auto`: as many channels as there are, cut evenly. Where the family has the key
    `inner`, that says the number of channels (`channels` where it is absent), unless it is null.
    The keys are kept verbatim in `extra`. Without such layers both fields are 0.
    """

    names_keys: ClassVar[tuple[str, ...]] = ("heads", "head_dim", "expand", "inner")

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    expand: str = "mamba_expand"
    inner: str | None = None
    channels: int | None = None

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Both fields; no key counts as understood."""
        into["mamba_num_heads"], into["mamba_head_dim"] = 0, 0
        if _has_kind(into, MAMBA):
            into["mamba_num_heads"], into["mamba_head_dim"] = self._sizes(stored, into)
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The keys, unless those that were kept say the same."""
        if not layer_sets.mamba_layers(config):
            return
        heads, size, hidden = (
            config.mamba.mamba_num_heads,
            config.mamba.mamba_head_dim,
            config.hidden_size,
        )
        stored, sizes = config.extra, (heads, size)
        if self.heads in stored and self._sizes(stored, {"hidden_size": hidden}) == sizes:
            return
        if self.inner:
            into |= {self.heads: heads, self.head_dim: size, self.inner: heads * size}
            return
        if heads * size % hidden:
            raise MappingError(
                f"mixers have {heads} heads of {size}, which is no multiple of the hidden size "
                f"{hidden}",
                hint=f"the family says it by {self.expand!r} alone",
                error_id="unsupported-model",
            )
        into |= {self.heads: heads, self.head_dim: size, self.expand: heads * size // hidden}

    def _sizes(self, stored: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[int, int]:
        """Number and size of the heads.

        Raises:
            MappingError: heads do not share out the channels.
        """
        heads, size = stored.get(self.heads, 128), stored.get(self.head_dim, "auto")
        expand, inner = stored.get(self.expand, 2), None
        if self.inner:
            inner = stored.get(self.inner, self.channels)
        numbers = [heads, expand if inner is None else inner]
        if size != "auto":
            numbers.append(size)
        channels = 0
        if all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
            channels = inner or expand * fields["hidden_size"]
            size = channels // heads if size == "auto" else size
        if not channels or heads * size != channels:
            raise MappingError(
                f"{self.heads} is {heads!r} and {self.head_dim} {size!r}, and "
                + (f"{self.expand} {expand!r}" if inner is None else f"{self.inner} {inner!r}"),
                hint=f"heads share out {self.inner or self.expand + ' * hidden_size'} channels "
                "evenly",
            )
        return heads, size


@dataclass(frozen=True, slots=True)
class MtpKind(Setting):
    """A list with the branches of each layer of multi-token prediction, named as `kinds` says.

    Without the list, `pattern_key` has the symbols as text. The keys are kept verbatim.
    """

    key: str
    kinds: tuple[tuple[str, str], ...]
    pattern_key: str
    default: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The symbols, where there are such layers."""
        named = dict(self.kinds)
        listed = stored.get(self.key)
        if listed is None:
            listed = stored.get(self.pattern_key) or self.default
            named = {s: s for s in named.values()}
        if not isinstance(listed, str | list | tuple) or any(k not in named for k in listed):
            raise MappingError(
                f"{self.key} is {str(listed)[:80]!r}", hint=f"known: {', '.join(named)}"
            )
        into["mtp_kind"] = "".join(named[k] for k in listed) if into["num_mtp_layers"] else ""
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The list, unless a key was kept."""
        if config.mtp.num_mtp_layers and not {self.key, self.pattern_key} & config.extra.keys():
            names = {symbol: name for name, symbol in reversed(self.kinds)}
            into[self.key] = [names[s] for s in layer_sets.mtp_branches(config)]


@dataclass(frozen=True, slots=True)
class NotedList(Setting):
    """Fields that are the numbers of a list, in order; the key is preserved verbatim in `extra`.

    Absence, or null, leaves their defaults.
    """

    key: str
    fields: tuple[str, ...]

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The numbers; no key counts as understood."""
        values = read_numbers(stored, self.key, len(self.fields))
        into |= dict(zip(self.fields, values or (), strict=False))
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The numbers, unless the key was kept or all are 1."""
        values = [config.get(name) for name in self.fields]
        if self.key not in config.extra and values != [1.0] * len(values):
            into[self.key] = values


@dataclass(frozen=True, slots=True)
class MambaScales(Setting):
    """Multipliers of the five parts of a mixer's projection (`key`) and of its input (`common`).

    The keys are preserved verbatim in `extra`.
    """

    names_keys: ClassVar[tuple[str, ...]] = ("key", "common")

    key: str
    common: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Their products, or None where all are 1."""
        (common,) = read_numbers({self.common: [stored.get(self.common, 1.0)]}, self.common, 1)
        values = [v * common for v in read_numbers(stored, self.key, 5) or [1.0] * 5]
        into["mamba_in_scales"] = None if values == [1.0] * 5 else tuple(values)
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The five, unless a key was kept."""
        if (
            config.mamba.mamba_in_scales is not None
            and not {self.key, self.common} & config.extra.keys()
        ):
            into[self.key] = list(config.mamba.mamba_in_scales)


@dataclass(frozen=True, slots=True)
class StepLimit(Setting):
    """The smallest and the largest step (dt) of Mamba-2; the key is preserved verbatim in `extra`.

    Infinity is a number, or an object with its name, as transformers 5 writes it.
    """

    key: str = "time_step_limit"

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Both, or None where they limit nothing."""
        listed = stored.get(self.key)
        if isinstance(listed, list | tuple):
            infinity = {"__float__": "Infinity"}
            listed = [math.inf if v == infinity else v for v in listed]
        values = tuple(read_numbers({self.key: listed}, self.key, 2))
        into["mamba_step_limit"] = values if values and values != (0.0, math.inf) else None
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Both, unless the key was kept."""
        if config.mamba.mamba_step_limit is not None and self.key not in config.extra:
            least, most = config.mamba.mamba_step_limit
            into[self.key] = [least, {"__float__": "Infinity"} if most == math.inf else most]


def read_numbers(stored: Mapping[str, Any], key: str, count: int) -> list[float]:
    """The numbers of a list; none where it is absent or null.

    Raises:
        MappingError: it is no list of so many numbers.
    """
    listed = stored.get(key)
    if listed is None:
        return []
    is_list = isinstance(listed, list | tuple) and len(listed) == count
    if not is_list or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in listed
    ):
        raise MappingError(f"{key} is {str(listed)[:80]}", hint=f"{count} numbers")
    return [float(v) for v in listed]


def _has_kind(fields: Mapping[str, Any], kind: str) -> bool:
    """Whether some layer has a branch of this kind, by fields that were read."""
    kinds = fields.get("layer_kinds")
    if kinds is None:
        moe = moe_flags(fields, num_layers(fields))
        return kind == ATTENTION or (kind == EXPERTS and any(moe)) or (kind == MLP and not all(moe))
    return any(kind in k for k in kinds)
