"""Exports of the verb to one format, quickly and with the report's type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megtool import export
from megtool.export.report import ExportReport


def export_gguf(source: Path, destination: Path, **options: Any) -> ExportReport:
    """Export to one GGUF file."""
    return _export(source, destination, to="gguf", **options)


def export_trtllm_legacy(source: Path, destination: Path, **options: Any) -> ExportReport:
    """Export to the files of TensorRT-LLM up to 1.x."""
    return _export(source, destination, to="trtllm-legacy", **options)


def _export(source: Path, destination: Path, **options: Any) -> ExportReport:
    report = export(source, destination, **options)
    assert isinstance(report, ExportReport)
    return report
