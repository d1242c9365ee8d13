"""Indexed data sets below `data/` of a Retro project, some of whose chunks have no BERT tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megtool.data.indexed import IndexedWriter

END_OF_DOCUMENT = 96
UNKNOWN = 40
"""Tokens below this one have no text that the BERT tokenizer of the tests knows."""


def write_data_sets(project: Path) -> None:
    """Two data sets, `a` of 23 documents and `more/b` of 8, of 1 to 40 tokens each."""
    rng = np.random.default_rng(3)
    for name, count in (("a", 23), ("more/b", 8)):
        prefix = project / "data" / name
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with IndexedWriter(prefix, np.uint16) as writer:
            for _ in range(count):
                ids = rng.integers(0, END_OF_DOCUMENT, rng.integers(1, 40))
                if rng.random() < 0.4:
                    ids[:16] %= UNKNOWN
                writer.add(np.append(ids, END_OF_DOCUMENT))
                writer.end_document()
