"""Verify holds files against the checksums that Megatron-Core 0.18 and later write."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from megtool import reshard, verify
from tests.support.models import tiny_llama


def test_files_are_held_against_integrity_json(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "save", to="torch_dist", pp=2)
    folder = tmp_path / "save" / "release"
    files = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.iterdir()
        if p.name.endswith(".distcp") or p.name in (".metadata", "common.pt")
    }
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))
    assert any("integrity.json" in note for note in verify(tmp_path / "save").notes)

    one = folder / "__1_0.distcp"
    raw = bytearray(one.read_bytes())
    raw[len(raw) // 2] ^= 1
    one.write_bytes(raw)
    report = verify(tmp_path / "save")
    texts = [d.text for d in report.differences if d.kind == "file" and d.stored == one.name]
    assert len(texts) == 2  # of megtool's digests, and of Megatron's
    assert "CRC-32C" in texts[0]
    assert "sha256" in texts[1]
    assert report.exit_status == 7
