"""The loss of a model on texts, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megtool.console import silent
from megtool.export.hf.engine_arithmetic import run_as_engine
from megtool.inference.evaluation.perplexity import predictions
from megtool.inference.evaluation.texts import read_token_documents
from megtool.inference.runtime import RuntimeOptions, load_forward, on_ranks
from megtool.inference.windows import batches
from megtool.source.open import open_decoder

WINDOW = 2048


def losses_of(folder: str | Path, texts: Sequence[Path], tokens: int) -> list[torch.Tensor]:
    """The loss of every predicted token of the first ones of texts, as engines compute the
    folder."""
    source = open_decoder(folder)
    tokenizer = source.tokenizer(None)
    documents = [read_token_documents(t, tokenizer, max_tokens=tokens) for t in texts]
    window = min(WINDOW, source.config.positions.max_positions)
    options = RuntimeOptions(dtype="float32")
    with on_ranks(options, alone=True) as groups, torch.inference_mode():
        forward = load_forward(source, options, groups, silent)
        run_as_engine(forward, source)
        return [
            torch.cat(
                [
                    -predictions(forward, forward.hidden(rows.batch), rows)[:, 0].double()
                    for rows in batches(text, window=window, stride=window, batch_size=1)
                ]
            )
            for text in documents
        ]
