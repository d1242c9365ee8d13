"""The tables of GGUF's names: every family is written, and every row of every table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megtool.convert.families.detection import families
from megtool.convert.language.mapping import Row, word
from megtool.export.gguf import layout
from megtool.export.gguf.architectures import is_exported
from megtool.source.open import open_source
from tests.support.models import gguf_models, moe_cases, mtp_models
from tests.support.runs.exports import export_gguf

pytest.importorskip("gguf")
pytest.importorskip("transformers")

Written = tuple[str, frozenset[str]]
"""What a row writes: a stored name, and the canonical names of its parts, without numbers."""
_NEXT_TOKENS = ("proj", "embed_norm", "hidden_norm", "norm")


def _numberless(name: str) -> str:
    """A name with N for every number and index. Rows of further layers are those of layers."""
    out = re.sub(r"(?<=\.)(?:\d+|\{[^}]+\})(?=\.)", "N", name)
    begin, _, rest = out.partition(".N.")
    is_own = begin == "mtp" and rest.rpartition(".")[0] in _NEXT_TOKENS
    return out if begin != "mtp" or is_own else f"layers.N.{rest}"


def _folders(root: Path) -> Iterator[Path]:
    """The models that real llama.cpp runs in tests/peers, and those with further layers."""
    for name in [*gguf_models.MODELS, *gguf_models.COMPUTED]:
        yield gguf_models.save(root / name, name)
    for name in gguf_models.TEXTS_BESIDE_TOWERS:
        gguf_models.save_with_tower(root / f"{name}-tower", name)
        yield root / f"{name}-tower"
    glm = gguf_models.save(root / "glm-mtp", "glm4-moe")
    mtp_models.add_layers(glm, "model.layers.1.", "model.layers.{}.", 2, mtp_models.DEEPSEEK)
    yield glm
    mimo = gguf_models.save(root / "mimo", "qwen2")
    mtp_models.rename_as_mimo(mimo)
    yield mimo
    for name in ("qwen3_next", "qwen3_5", "qwen3_5-moe"):
        qwen = gguf_models.save(root / f"{name}-mtp", name)
        mtp_models.add_outer_layer(qwen, "model.layers.3.")
        moe_cases.change_config(qwen, mtp_num_hidden_layers=1)
        yield qwen


@pytest.mark.slow
def test_every_row_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bind, known, written = layout._bind_names, set[Written](), set[Written]()

    def record(canonical: Any, config: Any, family: Any, architecture: Any) -> Any:
        out = bind(canonical, config, family, architecture)
        parts: dict[str, list[str]] = {}
        for name, place in out.placements.items():
            parts.setdefault(place.stored, []).append(_numberless(name))
        written.update((_numberless(s), frozenset(names)) for s, names in parts.items())
        for row in architecture.table:
            if isinstance(row, Row):
                names = frozenset(map(_numberless, word(row.word).names()))
                known.add((_numberless(row.stored), names))
        return out

    monkeypatch.setattr(layout, "_bind_names", record)
    exported = set[str]()
    for folder in _folders(tmp_path):
        export_gguf(folder, tmp_path / f"{folder.name}.gguf", outtype="f32")
        model = open_source(folder).model
        assert model is not None
        exported.add(model.family.name)
    assert {one.name for one in families() if is_exported(one)} - exported == set()
    assert known - written == set()
