"""YAML files beside a checkpoint's data, as plain values."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from megtool.errors import FormatError
from megtool.options.config_file import TAG_ERRORS
from megtool.pickles.reader import check_expansion
from megtool.storage.files import read_file

_MAX_BYTES = 512 << 10
"""Five seconds of PyYAML; what NeMo and Bridge write has a tenth of it."""


def read_yaml(path: Path) -> Any:
    """The contents of a YAML file as plain values; its tags are ignored.

    Raises:
        FormatError: it is too large, invalid, or its aliases repeat parts without measure.
    """
    yaml: Any = importlib.import_module("yaml")

    def untagged(self: Any, _: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return self.construct_sequence(node, deep=True)
        return self.construct_scalar(node)

    # Ignores tags that are not YAML's own, and `<<`, with which a small file can grow without end.
    inert = {"flatten_mapping": lambda *_: None}
    # Not the loader in C, which ends the process at a deep nesting.
    loader: Any = type("Untagged", (yaml.SafeLoader,), inert)
    loader.add_multi_constructor("", untagged)
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise FormatError(f"the configuration has {size:,} bytes, which is too much", file=path)
    try:
        value = yaml.load(read_file(path), Loader=loader)
    except (yaml.YAMLError, *TAG_ERRORS) as e:
        raise FormatError(
            f"the YAML is invalid: {' '.join(str(e).split())[:120]}", file=path
        ) from e
    check_expansion(value, file=path)
    return value
