"""Uploads of S3: their two ids, the bodies of parts, and the tags of parts."""

from __future__ import annotations

import secrets

_NAME_BYTES = 8
_SEPARATOR = "|"


def new_name() -> str:
    """Return a name for an upload, which its object will have as metadata."""
    return secrets.token_hex(_NAME_BYTES)


def join_ids(name: str, store_id: str) -> str:
    """Return the long id of an upload: its name, and the id that the store gave it."""
    return f"{name}{_SEPARATOR}{store_id}"


def name_of(upload_id: str) -> str:
    """Return the name in a long id; empty for the store's own id."""
    name, separator, _ = upload_id.partition(_SEPARATOR)
    return name if separator else ""


def store_id_of(upload_id: str) -> str:
    """Return the id that the store gave an upload, of the long id or of itself."""
    name, separator, rest = upload_id.partition(_SEPARATOR)
    return rest if separator and len(name) == 2 * _NAME_BYTES else upload_id


def as_body(data: bytes | memoryview) -> bytes | bytearray:
    """Return what boto3 sends without a copy: no memoryview, but all of what one shows."""
    if isinstance(data, bytes):
        return data
    whole = data.obj
    if isinstance(whole, bytes | bytearray) and len(whole) == data.nbytes:
        return whole
    return bytes(data)


def quoted_tag(text: str) -> str:
    """Return the tag of a part with its quotes, which some stores leave out in some replies."""
    return f'"{text.strip(chr(34))}"'
