"""PEFT's adapter_config.json: what it says of each matrix, and what of it is not done exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.adapters.settings import read_count, read_factor
from megtool.errors import FormatError, MappingError
from megtool.formats.auxiliary_files import check_json_size
from megtool.formats.header_reader import parse_json, short_repr
from megtool.process.patterns import compile_pattern
from megtool.storage.files import read_file

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_SAFE_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""

_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales each row of the merged weight",
    "use_qalora": "QALoRA sums groups of inputs",
    "use_bdlora": "its matrices are block-diagonal",
    "lora_bias": "its second matrices have biases",
    "modules_to_save": "it replaces whole modules, too",
    "trainable_token_indices": "it replaces rows of the embedding, too",
    "layer_replication": "its model has layers of the base model several times",
    "alora_invocation_tokens": "it applies to the tokens after some others only",
    "arrow_config": "it routes each token to one of several adapters",
    "kasa_config": "it takes parts of the base model's weights away",
    "monteclora_config": "its matrices are drawn at random",
    "megatron_config": "its modules are those of a Megatron model",
}
"""Settings that make more of an adapter than a low-rank update of each weight, and what."""

_KNOWN = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode"),
        *("base_model_name_or_path", "revision", "megatron_core", "runtime_config"),
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("target_parameters", "fan_in_fan_out", "bias", "init_lora_weights", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "velora_config"),
        *("qalora_group_size", "ensure_weight_tying"),
    }
)
"""Settings of PEFT 0.21.2's `LoraConfig` that are read, or add nothing to the matrices: those of
names and releases, and of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The settings of an adapter that its matrices do not say.

    `ranks` and `alphas` are patterns of module names, of which the first that matches counts.
    """

    path: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    target_parameters: tuple[str, ...]
    dropout: float
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> PeftConfig:
        """The settings in a file.

        Raises:
            FormatError: it is not the configuration of an adapter.
            MappingError: the adapter is more than a low-rank update of each weight.
        """
        data = read_file(path)
        check_json_size(data, path)
        content = parse_json(data, path)
        if not isinstance(content, dict):
            raise FormatError("an adapter's configuration is no JSON object", file=path)
        _refuse_others(content, path)
        targets = content.get("target_parameters") or []
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise FormatError(
                f"'target_parameters' is {short_repr(targets)}, no list of names", file=path
            )
        for key in ("target_modules", "exclude_modules", "layers_pattern"):
            _check_names(content.get(key), key, path)
        layers = content.get("layers_to_transform")
        if not isinstance(layers, list | int | None) or not all(
            isinstance(n, int) for n in (layers if isinstance(layers, list) else ())
        ):
            raise FormatError(
                f"'layers_to_transform' is {short_repr(layers)}, no list of numbers", file=path
            )
        ranks, alphas = (_pattern(content, f"{name}_pattern", path) for name in ("rank", "alpha"))
        return cls(
            path=path,
            rank=read_count(content, "r", 8, path),
            alpha=read_factor(content, "lora_alpha", 8, path),
            is_rank_stabilized=bool(content.get("use_rslora")),
            ranks={name: read_count(ranks, name, 8, path) for name in ranks},
            alphas=alphas,
            target_parameters=tuple(targets),
            dropout=read_factor(content, "lora_dropout", 0, path, may_be_zero=True),
            content=content,
        )

    @property
    def unknown(self) -> tuple[str, ...]:
        """Settings that PEFT 0.21.2 does not know, and ignores with a warning."""
        known = _KNOWN | _REFUSED.keys()
        return tuple(n for n, v in self.content.items() if v and n not in known)

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices, by its name in the model."""
        return int(_match(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of the product of a module's matrices."""
        rank = self.rank_of(module)
        alpha = _match(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether PEFT puts matrices on a linear module or an embedding, by its name in the model.

        Source: PEFT 0.21's `check_target_module_exists` (`tuners/tuners_utils.py`).
        """
        names, excluded = (self.content.get(k) for k in ("target_modules", "exclude_modules"))
        if excluded and _names(excluded, module):
            return False
        if names in (None, "all-linear"):  # PEFT's own choice, which it writes as names
            return True
        if not _names(names, module):
            return False
        layers = self.content.get("layers_to_transform")
        if isinstance(names, str) or module in names or layers in (None, []):
            return True
        patterns = self.content.get("layers_pattern") or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if match := compile_pattern(rf"(?:^|.*?\.){pattern}\.(\d+)\.").match(module):
                return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
        return False


def _names(targets: Any, module: str) -> bool:
    """Whether a pattern, or a list of names or ends of names, is for a module."""
    if isinstance(targets, str):
        return compile_pattern(targets).fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)


def _match(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of a name, as PEFT finds it."""
    for pattern, value in patterns.items():
        if compile_pattern(rf"(.*\.)?({pattern})$").match(module):
            return value
    return default


def _refuse_others(content: Mapping[str, Any], path: Path) -> None:
    def refuse(setting: str, reason: str) -> MappingError:
        return MappingError(
            f"the adapter has {setting}: {reason}",
            file=path,
            hint="merge it with PEFT (merge_and_unload), and take the merged model",
            error_id="unsupported-adapter",
        )

    kind = content.get("peft_type")
    if kind != "LORA":
        raise refuse(f"peft_type {kind!r}", "only LORA is read")
    for setting, reason in _REFUSED.items():
        if content.get(setting):
            raise refuse(setting, reason)
    for setting, value in content.items():
        is_variant = setting.startswith("use_") or setting.endswith("_config")
        if is_variant and value and setting not in _KNOWN:  # how PEFT names variants of LoRA
            raise refuse(setting, "what it does is not known")
    if content.get("bias", "none") != "none":
        raise refuse(f"bias {content['bias']!r}", "it replaces biases of the base model, too")
    start = content.get("init_lora_weights", True)
    if start not in _SAFE_INITIALIZATIONS:
        raise refuse(
            f"init_lora_weights {start!r}", "it belongs to other weights than the base model's"
        )


def _check_names(value: Any, key: str, path: Path) -> None:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return
    if isinstance(value, str):
        _check_regex(value, key, path)
    elif value is not None:
        raise FormatError(f"{key!r} is {short_repr(value)}, no list of names", file=path)


def _check_regex(pattern: str, key: str, path: Path) -> None:
    try:
        compile_pattern(pattern)
    except re.error as e:
        raise FormatError(f"the pattern {pattern!r} in {key!r} is invalid: {e}", file=path) from e


def _pattern(content: Mapping[str, Any], key: str, path: Path) -> dict[str, float]:
    pattern = content.get(key) or {}
    if not isinstance(pattern, dict):
        raise FormatError(f"{key!r} is {short_repr(pattern)}, no table of patterns", file=path)
    for name in pattern:
        _check_regex(name, key, path)
    return {name: read_factor(pattern, name, -1, path) for name in pattern}
