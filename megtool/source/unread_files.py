"""Files beside a checkpoint's tensors that are not read: state of a trainer, and other weights."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from megtool.errors import listed
from megtool.pickles.small_files import PICKLE_SUFFIXES
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue

_LOG = logging.getLogger(__name__)
_FORMATS = frozenset({"hf", "dcp", "torch_dist", "megatron"})
_WEIGHTS = re.compile(
    r"(?:pytorch_model|adapter_model|diffusion_pytorch_model|consolidated|mp_rank|params)[^/]*"
    r"\.(?:bin|pth?|safetensors)|.*\.(?:h5|msgpack|onnx|gguf|tflite|mlmodel|ot|npz)"
)
"""Names of weights in other forms, which published folders have beside those that are read."""

_STATE_FOLDERS = re.compile(
    r"global_step\d+|optimizer(?:_\d+)?|optim|dataloader(?:_\d+)?|pytorch_model_fsdp_\d+"
)
_STATE_SUFFIXES = (*PICKLE_SUFFIXES, ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadFile:
    """A file or a folder of a checkpoint that is not read; with `is_state`, it has what is lost."""

    name: str
    num_bytes: int
    is_state: bool


def warn_unread_files(catalogue: Catalogue) -> None:
    """Name training state that is not read."""
    if unread := [f.name for f in find_unread_files(catalogue) if f.is_state]:
        _LOG.warning("not read: %s: training state of another program", listed(unread))


def find_unread_files(catalogue: Catalogue) -> tuple[UnreadFile, ...]:
    """Return the files beside the tensors that hold training state or weights and are not read.

    Trainers write the optimizer, the schedule and random states as pickles of their own.
    """
    root, files = catalogue.root, Files()
    if catalogue.format not in _FORMATS or not root.is_dir():
        return ()
    known = {f.path.partition("/")[0] for f in catalogue.files}
    known |= {name.partition("/")[0] for name in catalogue.auxiliary_files}
    out = []
    for name in files.names(root):
        if name in known or name.startswith("."):
            continue
        status = files.stat(root / name)
        if status is None:
            continue
        is_folder = _STATE_FOLDERS.fullmatch(name) is not None
        is_weights = _WEIGHTS.fullmatch(name.lower()) is not None
        if is_folder or is_weights or name.lower().endswith(_STATE_SUFFIXES):
            size = 0 if is_folder else status.st_size
            out.append(UnreadFile(name=name, num_bytes=size, is_state=not is_weights))
    return tuple(out)
