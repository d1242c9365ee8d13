"""What every engine's loader needs: where the checkpoint is, and its tensors by Hugging Face names.

An engine takes whole tensors by these names, and its layers keep what belongs to a rank. Where
there are several ranks, large tensors are therefore read when they are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megtool.access.checkpoint import Checkpoint, in_batches, open_checkpoint, stream_view
from megtool.access.lazy_tensor import NamedView
from megtool.access.naming import name_as_stored
from megtool.access.read_boxes import BoxReader
from megtool.errors import MegtoolError, UsageError
from megtool.formats import detect_format
from megtool.formats.auxiliary_files import check_json_size
from megtool.formats.header_reader import parse_json
from megtool.formats.safetensors.quantization_config import QUANT_FILE, quantization_config
from megtool.formats.safetensors.reader import open_as_stored
from megtool.storage.files import Files
from megtool.storage.location.path import location as to_location

if TYPE_CHECKING:
    import torch

DEFERRED_BYTES = 1 << 20
"""Tensors of this size are read when they are copied, if one of several ranks asks for them."""

SAFETENSORS_MODULE = "megtool.formats.safetensors.reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheckpoint:
    """The checkpoint that an engine loads.

    The engine's model is a Hugging Face folder or repository with `config.json` and tokenizer.
    `location` is where the weights are, by default there, too. `family`, `iteration` and `dtype`
    are those of `megtool.stream`; `like` is a folder with a `config.json`, by default the engine's
    model where the weights are elsewhere.
    """

    location: str
    family: str | None = None
    like: str | None = None
    iteration: int | str | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, model: str, settings: Mapping[str, Any] | None) -> EngineCheckpoint:
        """The checkpoint by the engine's model and the settings that it hands on to its loader.

        Raises:
            UsageError: see `check_settings`.
        """
        settings = cls.check_settings(settings)
        place = _model_location(model)
        if str(settings.get("location", model)) != model:
            settings.setdefault("like", place)
        return cls(**{"location": place, **settings})

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any] | None) -> dict[str, Any]:
        """The settings that an engine hands on to its loader, by name.

        Raises:
            UsageError: they are no mapping, one is unknown, or has a value of another type.
        """
        if not isinstance(settings, Mapping | None):
            raise UsageError(
                f"the loader's settings are {settings!r:.80}, which are no names with values",
                hint='for example {"location": "s3://bucket/run"}',
            )
        known = [f.name for f in fields(cls)]
        for key, value in (settings or {}).items():
            if key not in known:
                raise UsageError(
                    f"the loader has no setting {key!r}", hint=f"known: {', '.join(known)}"
                )
            is_number = key == "iteration" and isinstance(value, int) and value is not True
            if not isinstance(value, str) and not is_number:
                raise UsageError(f"the setting {key!r} is {value!r:.80}, which is no text")
        return dict(settings or {})

    def tensors(
        self, *, model: str | None = None, in_parts: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor of the model with its Hugging Face name, on the CPU.

        Args:
            model: The engine's model, if the engine loads weights that are quantized where the
                model's configuration says so: these are then given as they are stored. Otherwise
                what is stored in several arrays (FP8, MXFP4 ...) is decoded.
            in_parts: Large tensors are read when the engine copies them, and of each the part that
                it copies: for one of several ranks.

        Raises:
            UsageError: the engine wants quantized weights, and these are others.
            MegtoolError: the checkpoint cannot be opened, named or read, or lacks a tensor.
        """
        if model is not None and declares_quantization(_model_location(model)):
            view = self._open_as_stored(model)
            self._check_complete()
        else:
            view = self._open().as_("hf", dtype=self.dtype, framework="torch")
        yield from _deferred(view) if in_parts else stream_view(view)

    def _open(self) -> Checkpoint:
        return open_checkpoint(
            self.location,
            family=self.family,
            like=self.like,
            iteration=self.iteration,
            optimizer=False,
        )

    def _check_complete(self) -> None:
        """Check that a quantized folder has all tensors of its model, where megtool decodes it.

        Engines do not: vLLM 0.33.0 checks that every parameter was loaded in models that are not
        quantized (`default_loader.py`). What else is in the folder is for the engine to judge.

        Raises:
            MegtoolError: a weight or a scale is missing.
        """
        try:
            self._open()
        except MegtoolError as e:
            if e.id == "missing-tensors":
                raise

    def _open_as_stored(self, model: str) -> NamedView:
        """The tensors of a quantized Hugging Face folder: codes and scales apart.

        Raises:
            UsageError: it is none, or is to be changed.
        """
        place = to_location(self.location)
        what = None
        if detect_format(place).module != SAFETENSORS_MODULE:
            what = "are not in a Hugging Face folder"
        else:
            catalogue = open_as_stored(place)
            if quantization_config(catalogue.metadata) is None:
                what = "are not quantized"
        if what:
            raise UsageError(
                f"the configuration of {model!r} says that its weights are quantized, and these "
                f"{what}",
                file=place,
                hint="give the engine a model without quantization_config, or a folder that "
                "`megtool export` wrote",
            )
        if self.dtype is not None:
            raise UsageError("'dtype' casts weights, and quantized ones are given as they are")
        catalogue = catalogue.select(lambda name: not name.startswith("optimizer."))
        named = name_as_stored(catalogue)
        reader = BoxReader(catalogue, named.source, named.target)
        return NamedView(named, reader, framework="torch")


def declares_quantization(model: str) -> bool:
    """Whether the configuration of an engine's model says that its weights are quantized.

    Raises:
        CheckpointError: a file of it cannot be read.
    """
    folder = to_location(model)
    metadata: dict[str, Any] = {}
    for key, name in (("config", "config.json"), ("hf_quant_config", QUANT_FILE)):
        data = Files().read_whole(folder / name)
        if data is not None:
            check_json_size(data, folder / name)
            metadata[key] = parse_json(data, folder / name)
    return quantization_config(metadata) is not None


def has_other_ranks() -> bool:
    """Whether this process is one of several ranks, each of which copies parts of the weights."""
    from torch import distributed

    is_running = distributed.is_available() and distributed.is_initialized()
    return is_running and distributed.get_world_size() > 1


def _deferred(view: NamedView) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in their order: small ones read in batches, large ones when they are copied."""
    from megtool.access.engines.deferred_tensor import DeferredTensor

    small = (n for n in view if view[n].num_bytes < DEFERRED_BYTES)
    batches = in_batches(small, lambda n: view[n].num_bytes)
    ready: dict[str, torch.Tensor] = {}
    for name in view:
        if view[name].num_bytes >= DEFERRED_BYTES:
            yield name, DeferredTensor(view[name])
            continue
        if name not in ready:
            ready = view.read(next(batches))
        yield name, ready.pop(name)


def _model_location(model: str) -> str:
    """Where an engine's model is: a path, a URL, or a repository of Hugging Face."""
    if "://" in model or to_location(model).exists():
        return model
    organization, _, name = model.partition("/")
    return f"hf://{model}" if organization and name and "/" not in name else model
