"""Verify a checkpoint that megtool writes and does not read: its files against their digests."""

from __future__ import annotations

import time
from pathlib import Path

from megtool.commands.reports.verify import DigestCheck, VerifyReport
from megtool.commands.verification.digest_check import describe_mismatch
from megtool.console import Progress
from megtool.digests.crc32c import SIDECAR, read_sidecar
from megtool.digests.files import check_files
from megtool.errors import UsageError
from megtool.formats.header_reader import list_names
from megtool.formats.safetensors.reader import refuse_trtllm_legacy
from megtool.transport.reading.shared_scan import SharedScan

_FORMAT = "trtllm-legacy"


def verify_files(
    path: Path, *, threads: int, progress: Progress, scan: SharedScan | None = None
) -> VerifyReport | None:
    """Compare the files of a legacy TensorRT-LLM folder with the digests written with them.

    With `scan`, workers share it out. None for any other checkpoint, and for such a folder without
    digests.

    Raises:
        FormatError: the digests cannot be read.
        StorageError: a read failed.
    """
    start = time.monotonic()
    if not _is_only_written(path):
        return None
    sidecar = read_sidecar(path / SIDECAR)
    if sidecar is None or not sidecar.files:
        return None
    num_bytes = sum(digest.size for digest in sidecar.files.values())
    mismatches = check_files(
        path,
        sidecar.files,
        threads=threads,
        progress=lambda n: progress("verify files", n, num_bytes),
        scan=scan.part("files") if scan else None,
    )
    damaged = {m.file for m in mismatches}
    differing = [n for n, d in sidecar.stored_tensors.items() if d.file in damaged]
    return VerifyReport(
        a=str(path),
        b=None,
        a_format=_FORMAT,
        b_format=None,
        family=sidecar.family,
        matched_by="stored",
        atol=0.0,
        rtol=0.0,
        num_tensors=len(sidecar.stored_tensors),
        num_bytes=num_bytes,
        num_replicas=0,
        seconds=time.monotonic() - start,
        within=0.0,
        digests=(
            DigestCheck(
                path=str(path),
                matching=len(sidecar.stored_tensors) - len(differing),
                differing=len(differing),
                unverified=(),
                matching_files=len(sidecar.files) - len(mismatches),
                differing_files=len(mismatches),
            ),
        ),
        differences=tuple(describe_mismatch(m) for m in mismatches),
        notes=("its tensors are not read: files are compared with their digests",),
    )


def _is_only_written(path: Path) -> bool:
    """Whether a checkpoint is of a format that megtool writes and does not read."""
    if not path.is_dir():
        return False
    try:
        refuse_trtllm_legacy(path, list_names(path))
    except UsageError:
        return True
    return False
