"""Saved folder: what a Hugging Face folder holds, byte for byte."""

from __future__ import annotations
