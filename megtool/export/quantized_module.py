"""Quantized linear modules of a folder, described by the stored tensors of codes and scales.

This is what all forms have in common; `folders/` has one file for each form. Nothing is decoded: a
part says which stored tensor holds codes or scales, and which rows and columns of the weight each
element of it covers, so that codes can be split, joined and repacked exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megtool.formats.safetensors.quantized_parts import PackedWeight
from megtool.number_formats.decode import COLUMNS, LOW_RANK_DOWN
from megtool.tensors.catalogue import Catalogue


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModule(PackedWeight):
    """One quantized linear module.

    `name` is that of the module in its Hugging Face folder (no `.weight`), `shape` `[out, in]` that
    of its weight. `algo` is one of `quant.recipes.formats.FORMATS`, `group_size` the columns (or
    rows and columns) under one scale, 0 where that is no choice of the format. `COLUMNS` among its
    parts is what inputs are multiplied by (`pre_quant_scale`). `input_scale` is the stored tensor
    of the inputs' scale, "" where there is none; `input_divides` says that it is the reciprocal.
    """

    shape: tuple[int, int]
    algo: str
    group_size: int
    input_scale: str = ""
    input_divides: bool = False

    @property
    def is_smoothed(self) -> bool:
        """Inputs are to be multiplied by stored factors first."""
        return self.part(COLUMNS) is not None

    @property
    def rank(self) -> int:
        """That of SVDQuant's matrices, 0 where there are none."""
        down = self.part(LOW_RANK_DOWN)
        return 0 if down is None else down[0].shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModules:
    """A quantized folder: its catalogue as stored (nothing decoded), and what its tensors are.

    `caches` are stored scales of keys and of values by the name of the attention they belong to
    (`model.layers.0.self_attn` -> names of both tensors), and `kv_algo` what they are scales of.
    `cache_biases` are what keys and values are shifted by first. `kept` are the linear modules that
    are not quantized, `carried` those that are, and are not among `modules` because nothing of them
    changes. `notes` say what becomes otherwise, for people. `form` is `modelopt`,
    `compressed-tensors` or `fp8` (DeepSeek, and others of its method).
    """

    catalogue: Catalogue
    form: str
    modules: tuple[QuantizedModule, ...]
    kv_cache_scales: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    kv_algo: str | None = None
    unquantized: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    passed_through: tuple[str, ...] = ()
    kv_cache_biases: tuple[str, ...] = ()

    @property
    def has_untied_head(self) -> bool:
        """Its output layer is quantized, and the config has it for the embedding once more."""
        names = [*(m.name for m in self.modules), *self.passed_through]
        config = self.catalogue.metadata.get("config")
        config = config if isinstance(config, dict) else {}
        text = config.get("text_config")
        tied = config.get("tie_word_embeddings") or (
            isinstance(text, dict) and text.get("tie_word_embeddings")
        )
        return bool(tied) and any(n.rpartition(".")[2] == "lm_head" for n in names)
