"""Edit config.json: another quantization_config, and untied embeddings."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any


def edit_config(
    config: bytes, *, remove: Collection[str] = (), add: Mapping[str, Any], untie: bool = False
) -> bytes:
    """A config.json without some keys, there or in its `text_config`, and with others; where it is
    to `untie`, it no longer says that the output layer is the embedding."""
    value = json.loads(config)
    text = value.get("text_config")
    for place in (value, text if isinstance(text, dict) else {}):
        for key in remove:
            place.pop(key, None)
        if untie and place.get("tie_word_embeddings"):
            place["tie_word_embeddings"] = False
    return (json.dumps(value | dict(add), indent=2, ensure_ascii=False) + "\n").encode()
