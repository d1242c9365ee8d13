"""`transformers` models from any checkpoint, without a converted copy.

    model = megtool.transformers.from_pretrained("s3://bucket/run/iter_0005000")

transformers asks for one tensor after another under Hugging Face's names; each is read where it
lies, and decoded if it is quantized.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megtool.access.checkpoint import (
    AdapterLocations,
    Checkpoint,
    in_batches,
    open_checkpoint,
)
from megtool.access.fit import refuse_misfits
from megtool.access.lazy_tensor import LazyTensor, NamedView
from megtool.dtypes import dtype as named_dtype
from megtool.errors import FormatError, MappingError, MissingPackageError, UsageError
from megtool.process.threads import BackgroundCall
from megtool.source.checkpoint import collect_hf_files, unknown_model

if TYPE_CHECKING:
    import transformers

__all__ = ["from_pretrained"]

_LOG = logging.getLogger(__name__)
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}

CAST_BYTES = 16 << 20
"""Larger matrices are cast while they are read, so that they are never in memory in two types."""


def from_pretrained(
    location: str | Path | Checkpoint,
    *,
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    iteration: int | str | None = None,
    drop_setting: str | Sequence[str] = (),
    adapter: AdapterLocations = (),
    device_map: Any = None,
    **model_arguments: Any,
) -> transformers.PreTrainedModel:
    """A model of transformers with the weights of a checkpoint of any format, local or in a store.

    Its class is the one that config.json names; where the checkpoint has no config.json, it is made
    from what the checkpoint says of its model. About 128 MiB beside the model are in memory (more
    where transformers stacks the experts of one layer that are larger), and nothing is written.

    Args:
        location: A checkpoint, or where one is.
        dtype: The type of the weights; by default the one in config.json, or else that of most.
        family: The model family, if the checkpoint names none.
        like: A Hugging Face folder to take the configuration from.
        drop_setting: Settings, by name, that the model is taken to be without.
        iteration: Which iteration of a save folder; by default the latest.
        adapter: The folder of an adapter (LoRA), or several, to merge into the weights as they are
            read; their bits are those that `megtool.reshard` writes.
        device_map: Where transformers puts the weights.
        **model_arguments: Further arguments of transformers' own `from_pretrained`.

    Raises:
        FormatError: no checkpoint, or a damaged one.
        MappingError: its family is not known; transformers has no such class; or the model has
            tensors that the checkpoint lacks, or of other shapes.
        MissingPackageError: transformers is missing.
        StorageError: it cannot be read.
        UsageError: an adapter is for an open checkpoint, or an argument is not for here.
    """
    try:
        import transformers
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "models need the transformers package", hint="pip install 'megtool[hf]'"
        ) from e
    for name in ("config", "state_dict", "output_loading_info", "gguf_file"):
        if name in model_arguments:
            raise UsageError(f"{name!r} is no argument here: it follows from the checkpoint")
    checkpoint = open_checkpoint(
        location,
        family=family,
        like=like,
        iteration=iteration,
        drop_setting=drop_setting,
        adapter=adapter,
        optimizer=False,
    )
    view = checkpoint.as_("hf", framework="torch")
    files = collect_hf_files(checkpoint.source, None)
    config = _make_config(checkpoint, files)
    kind = _class_of(checkpoint, config)
    weight_dtype = _dtype_of(dtype, config, view)
    reads = _ReadAhead(
        view, weight_dtype if _is_free_to_cast(kind, config, weight_dtype, view) else None
    )
    with reads, _one_after_another():
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: _Entry(reads, name) for name in view},
            dtype=weight_dtype,
            device_map=device_map,
            output_loading_info=True,
            **model_arguments,
        )
    _check(checkpoint, info)
    model.config._name_or_path = model.name_or_path = str(checkpoint.location)
    if "generation_config.json" in files and model.can_generate():
        generation = json.loads(files["generation_config.json"])
        model.generation_config = transformers.GenerationConfig.from_dict(generation)
    loaded: transformers.PreTrainedModel = model
    return loaded


def _make_config(checkpoint: Checkpoint, files: Mapping[str, bytes]) -> Any:
    from transformers import CONFIG_MAPPING

    if "config.json" not in files:
        raise unknown_model(checkpoint.source, "a model of transformers needs a config.json")
    try:
        values = json.loads(files["config.json"], object_hook=_decode_float)
        kind = values["model_type"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise FormatError(
            "config.json has no model_type, or is damaged", file=checkpoint.location
        ) from e
    if kind not in CONFIG_MAPPING:
        raise _unsupported(checkpoint, f"the model_type {kind!r}")
    return CONFIG_MAPPING[kind].from_dict(values)


def _decode_float(node: dict[str, Any]) -> Any:
    """A float that JSON does not have, which transformers 5 writes as `{"__float__": "Infinity"}`.

    Source: transformers 5.23, `_encode_special_floats` in `configuration_utils.py`.
    """
    return _FLOATS.get(str(node["__float__"]), node) if [*node] == ["__float__"] else node


def _class_of(checkpoint: Checkpoint, config: Any) -> Any:
    """The class that config.json names, or that of a language model of its type."""
    import transformers

    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    if config.architectures:
        raise _unsupported(checkpoint, f"the class {config.architectures[0]!r}")
    try:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise _unsupported(
            checkpoint, f"a language model of model_type {config.model_type!r}"
        ) from None


def _unsupported(checkpoint: Checkpoint, what: str) -> MappingError:
    import transformers

    return MappingError(
        f"transformers {transformers.__version__} does not have {what}",
        file=checkpoint.location,
        hint="another release may have it; code that a checkpoint brings is never run",
    )


def _dtype_of(requested: str | torch.dtype | None, config: Any, view: NamedView) -> torch.dtype:
    """The type of the weights: as requested, as config.json says, or that of most bytes."""
    kind: Any
    if isinstance(requested, torch.dtype):
        kind = requested
    elif requested not in (None, "auto"):
        kind = getattr(torch, named_dtype(str(requested)).name, None)
    else:
        kind = config.dtype
        if isinstance(kind, str):
            kind = getattr(torch, kind, None)
        if kind is None:
            sizes: Counter[str] = Counter()
            for tensor in view.values():
                if named_dtype(tensor.dtype).is_float:
                    sizes[tensor.dtype] += tensor.num_bytes
            kind = getattr(torch, sizes.most_common(1)[0][0] if sizes else "float32", None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UsageError(
            f"models of transformers do not have the type {requested!r}",
            hint="for example bfloat16",
        )
    return kind


def _is_free_to_cast(kind: Any, config: Any, dtype: torch.dtype, view: NamedView) -> bool:
    """Whether large matrices may be cast while they are read: the model keeps none in float32."""
    name = named_dtype(str(dtype)).name
    if all(t.dtype == name for t in view.values() if _is_large(t)):
        return False  # there is nothing to cast
    with torch.device("meta"):
        model = kind(config)
    flags = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return not any(getattr(model, flag, None) for flag in flags)


def _is_large(tensor: LazyTensor) -> bool:
    is_float = named_dtype(tensor.dtype).is_float
    return is_float and tensor.ndim > 1 and tensor.num_bytes > CAST_BYTES


@contextmanager
def _one_after_another() -> Iterator[None]:
    """Let transformers ask for tensors when it needs them: its threads would read all experts
    before the first ones are stacked.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _check(checkpoint: Checkpoint, info: Mapping[str, Any]) -> None:
    """Check that all of the model was in the checkpoint.

    Raises:
        MappingError: some was not, or has another shape.
    """
    refuse_misfits(
        "the tensors of transformers' model",
        missing=sorted(info.get("missing_keys", ())),
        misshapen={
            str(name): f"{name} is {list(own)}, and here {list(stored)}"
            for name, stored, own in sorted(info.get("mismatched_keys", ()))
        },
        file=checkpoint.location,
        hint="is config.json that of another model?",
    )


class _ReadAhead:
    """Reads tensors in batches in the order in which transformers asks, one batch ahead.

    Matrices larger than `CAST_BYTES` are read as `dtype`, if it is given. Use in `with`.
    """

    def __init__(self, view: NamedView, dtype: torch.dtype | None) -> None:
        from transformers.core_model_loading import dot_natural_key

        self.view = view
        self._dtype = None if dtype is None else named_dtype(str(dtype))
        names = sorted(view, key=dot_natural_key)
        self._batches = list(in_batches(names, lambda name: view[name].num_bytes))
        self._number = {name: n for n, batch in enumerate(self._batches) for name in batch}
        self._reads: dict[int, BackgroundCall[dict[str, torch.Tensor]]] = {}

    def __enter__(self) -> _ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        for read in self._reads.values():
            read.wait()
        self._reads.clear()

    def take(self, name: str) -> torch.Tensor:
        """A tensor, which is handed out once; asked for again it is read again."""
        number = self._number[name]
        tensors = self._begin(number).result()
        if number + 1 < len(self._batches):
            self._begin(number + 1)
        tensor = tensors.pop(name, None)
        return self._read([name])[name] if tensor is None else tensor

    def _begin(self, number: int) -> BackgroundCall[dict[str, torch.Tensor]]:
        """The read of a batch, which begins at the first call."""
        if number not in self._reads:
            read = functools.partial(self._read, self._batches[number])
            self._reads[number] = BackgroundCall(read)
        return self._reads[number]

    def _read(self, names: list[str]) -> dict[str, torch.Tensor]:
        cast = {}
        if self._dtype is not None:
            cast = {n: self._dtype for n in names if _is_large(self.view[n])}
        tensors: dict[str, torch.Tensor] = self.view.read(names, dtypes=cast)
        return tensors


class _Entry:
    """What transformers takes for a tensor of a state dict."""

    def __init__(self, reads: _ReadAhead, name: str) -> None:
        self._reads, self._name = reads, name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._reads.view[self._name].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its type as it is stored, or decoded."""
        kind: torch.dtype = getattr(torch, self._reads.view[self._name].dtype)
        return kind

    def get_shape(self) -> list[int]:
        """Its shape, as slices of safetensors say it."""
        return list(self.shape)

    def get_dtype(self) -> torch.dtype:
        """Its type."""
        return self.dtype

    def is_floating_point(self) -> bool:
        """Whether its elements are floating numbers."""
        return self.dtype.is_floating_point

    def dim(self) -> int:
        """Its number of dimensions."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """What is read, all of it or a part."""
        if index is Ellipsis:
            return self._reads.take(self._name)
        part: torch.Tensor = self._reads.view[self._name][index]
        return part
