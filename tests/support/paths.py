"""Folders of this checkout that tests start scripts from."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
PEERS = SUPPORT / "peers"
"""Scripts that run another project's real code in processes of their own."""
