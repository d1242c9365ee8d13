"""Config keys of layers, and of heads, that share keys and values; embeddings per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Setting, num_layers
from megtool.convert.config.windows import skip_flags
from megtool.errors import MappingError
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

WIDTH = "ffn_hidden_size"
_SHARED, _WIDE = "num_kv_shared_layers", "use_double_wide_mlp"
_INPUT, _INPUT_WORDS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"


@dataclass(frozen=True, slots=True)
class SharedKeys(Setting):
    """The last layers attend to keys and values of earlier ones; their MLPs may be twice as wide.

    It comes after the settings of windows, of sizes by layer, and of the width of an MLP, which
    `width_key` says.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (_SHARED, _WIDE)

    width_key: str = "intermediate_size"

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """A flag for each layer, and the widths of MLPs by layer where they differ."""
        layers, count = num_layers(into), stored.get(_SHARED) or 0
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < layers:
            raise MappingError(
                f"{_SHARED} is {count!r}", hint=f"fewer than the {layers} layers there are"
            )
        flags = tuple(int(i >= layers - count) for i in range(layers))
        into["shared_kv"] = flags if count else None
        windows = _windows(into, layers)
        if count and set(windows[layers - count :]) - set(windows[: layers - count]):
            raise MappingError(
                f"{_SHARED} is {count}, and no layer before has keys and values for some of them",
                hint="a layer shares those of one that has a window as well, or none as well",
                error_id="unsupported-model",
            )
        if count and stored.get(_WIDE):
            width = into[WIDTH]
            widths = tuple(width * (1 + f) for f in flags)
            into["layer_sizes"] = {**(into.get("layer_sizes") or {}), WIDTH: widths}
            into[WIDTH] = max(widths)
        return (_SHARED, _WIDE)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """How many layers share, and whether they are wider."""
        args = _shared_args(config)
        into |= {_SHARED: 0, _WIDE: False} | args
        if args.get(_WIDE):
            into[self.width_key] = config.mlp.ffn_hidden_size // 2


@dataclass(frozen=True, slots=True)
class LayerInputs(Setting):
    """The size of the vectors that layers get from an embedding of their own: 0 for none.

    Its words are those of the model: how many there are is kept verbatim.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (_INPUT, _INPUT_WORDS)

    default: int = 256

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The size."""
        size = stored.get(_INPUT)
        into["layer_input_size"] = size = self.default if size is None else size
        words = stored.get(_INPUT_WORDS, into["vocab_size"])
        if size and words != into["vocab_size"]:
            raise MappingError(
                f"{_INPUT_WORDS} is {words!r}, and vocab_size {into['vocab_size']!r}",
                hint="known are embeddings per layer of all words",
                error_id="unsupported-model",
            )
        return (_INPUT,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The size, and how many words there are."""
        into[_INPUT] = config.residual.layer_input_size
        if config.residual.layer_input_size:
            into[_INPUT_WORDS] = config.embedding.vocab_size


_NEW, _ONE, _PARALLEL = "new_decoder_architecture", "multi_query", "parallel_attn"
_GROUPS, _NORMS = "num_kv_heads", "num_ln_in_parallel_attn"


@dataclass(frozen=True, slots=True)
class GroupedHeads(Setting):
    """Falcon's heads of keys, and norms of attention and MLP in parallel, by flags that overrule
    each other. The keys are preserved verbatim in `extra`.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (_NEW, _ONE, _PARALLEL, _GROUPS, _NORMS)

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Fields, after `num_heads`."""
        is_new = bool(stored.get(_NEW))
        into["parallel_residual"] = is_new or bool(stored.get(_PARALLEL, True))
        into["shared_norm"] = into["parallel_residual"]
        if is_new:
            norms = stored.get(_NORMS)
            into["num_kv_heads"] = stored.get(_GROUPS) or into["num_heads"]
            into["shared_norm"] = norms == 1
            if norms not in (None, 1, 2):
                raise MappingError(f"{_NORMS} is {norms!r}", hint="1 or 2")
        else:
            into["num_kv_heads"] = 1 if stored.get(_ONE, True) else into["num_heads"]
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """All flags, where none was kept."""
        if _NEW in config.extra:
            return
        groups, is_parallel = config.attention.num_kv_heads, config.residual.parallel_residual
        if not is_parallel and groups not in (1, config.attention.num_heads):
            raise MappingError(
                f"num_kv_heads is {groups}",
                hint="in this family it is 1, or num_heads, unless attention and MLP are in "
                "parallel (parallel_residual)",
            )
        into |= {_NEW: is_parallel, _ONE: groups == 1, _PARALLEL: is_parallel, _GROUPS: groups}
        if is_parallel:
            into[_NORMS] = 1 if config.norms.shared_norm else 2


def shared_args(config: ModelConfig) -> dict[str, Any]:
    """Args from these fields, under the names of config.json, which Megatron has none for."""
    inputs = {_INPUT: config.residual.layer_input_size} if config.residual.layer_input_size else {}
    return _shared_args(config) | inputs


def shared_fields(args: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from the args of `shared_args`, and the fields read before."""
    width = int(args[WIDTH])
    out = {**fields, WIDTH: width // 2 if args.get(_WIDE) else width}
    SharedKeys().read(args, out)
    out["layer_input_size"] = int(args.get(_INPUT) or 0)
    return {n: out[n] for n in ("layer_sizes", WIDTH, "shared_kv", "layer_input_size")}


def _shared_args(config: ModelConfig) -> dict[str, Any]:
    count, layers = len(layer_sets.shared_kv_layers(config)), config.num_layers
    if not count:
        return {}
    flags = tuple(int(i >= layers - count) for i in range(layers))
    widths = (config.layer_sizes or {}).get(WIDTH)
    narrow = config.mlp.ffn_hidden_size // 2
    if config.attention.shared_kv != flags or widths not in (
        None,
        tuple(narrow * (1 + f) for f in flags),
    ):
        raise MappingError(
            f"shared_kv is {str(config.attention.shared_kv)[:80]}, and MLPs are "
            f"{str(widths)[:80]} wide",
            hint="in this family the last layers share keys and values, and are twice as wide or "
            "as wide as the others",
            error_id="unsupported-model",
        )
    return {_SHARED: count} | ({} if widths is None else {_WIDE: True})


def _windows(fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """A 1 for every layer with a window."""
    if not fields.get("window_size"):
        return (0,) * layers
    return skip_flags(fields.get("window_skip_freq"), layers)
