"""What every engine's loader needs: where the checkpoint is, and its tensors by Hugging Face names.

An engine takes whole tensors by these names, and its layers keep what belongs to a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megtool.access.checkpoint import stream
from megtool.checkpoint.storage.location import location as to_location
from megtool.errors import UsageError

if TYPE_CHECKING:
    import torch


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
            UsageError: a setting is unknown, or has a value of another type.
        """
        settings = dict(settings or {})
        known = [f.name for f in fields(cls)]
        for key, value in settings.items():
            if key not in known:
                raise UsageError(
                    f"the loader has no setting {key!r}", hint=f"known: {', '.join(known)}"
                )
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise UsageError(f"the setting {key!r} is {value!r:.80}, which is no text")
        place = _model_location(model)
        if str(settings.get("location", model)) != model:
            settings.setdefault("like", place)
        return cls(**{"location": place, **settings})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor of the model with its Hugging Face name, whole and on the CPU.

        Tensors that are stored in several arrays (FP8, MXFP4 ...) are decoded.

        Raises:
            MegtoolError: the checkpoint cannot be opened, named or read.
        """
        yield from stream(
            self.location,
            to="hf",
            framework="torch",
            family=self.family,
            like=self.like,
            iteration=self.iteration,
            dtype=self.dtype,
        )


def _model_location(model: str) -> str:
    """Where an engine's model is: a path, a URL, or a repository of Hugging Face."""
    if "://" in model or to_location(model).exists():
        return model
    organization, _, name = model.partition("/")
    return f"hf://{model}" if organization and name and "/" not in name else model
