"""Passes of small models over long rows by megtool and by transformers, for their memory."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phases import Phases

Options = dict[str, Any]

CASES = ("causal", "packed", "soft caps and windows")
DOCUMENT = 1024
"""Tokens of a packed document."""
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 1 << 20,
}


def save(case: str, folder: Path) -> None:
    """Write the model of a case, with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    if case == CASES[2]:
        caps = {"sliding_window": 512, "attn_logit_softcapping": 50.0}
        config = transformers.Gemma2Config(**_SIZES, **caps)
        transformers.Gemma2ForCausalLM(config).save_pretrained(folder)
    else:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).save_pretrained(folder)


def run(options: Options, phase: Phases) -> Options:
    """A pass over one row, and its backward pass if asked: a sum of states, and seconds of the
    processor; `failed` where it needs more memory than `limit_bytes`."""
    import torch

    torch.set_num_threads(1)
    length = options["tokens"]
    tokens = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(1))
    places = torch.arange(length)[None]
    is_packed = options["case"] == CASES[1]
    make = _ours if options["engine"] == "megtool" else _theirs
    states = make(options, tokens, places, is_packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    soft = before + options["limit_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.RLIM_INFINITY))
    began, total, failed = time.process_time(), 0.0, ""
    with phase("job"):
        try:
            with torch.set_grad_enabled(options["backward"]):
                out = states()
                total = float(out.detach().double().square().sum())
                if options["backward"]:
                    out.sum().backward()
        except (MemoryError, RuntimeError) as error:
            failed = str(error).partition("\n")[0][-120:] or "MemoryError"
    return {"sum": total, "seconds": time.process_time() - began, "failed": failed}


def _ours(options: Options, tokens: Any, places: Any, is_packed: bool) -> Any:
    from megtool.model.batch import Batch
    from megtool.source.open import open_source
    from megtool.train.model.build import load_for_training

    (decoder,) = load_for_training(open_source(Path(options["folder"])))
    decoder.train(options["backward"])
    batch = Batch(tokens_BS=tokens)
    if is_packed:
        batch = Batch(
            tokens_BS=tokens, positions_BS=places % DOCUMENT, documents_BS=places // DOCUMENT
        )
    return lambda: decoder.hidden(batch)


def _theirs(options: Options, tokens: Any, places: Any, is_packed: bool) -> Any:
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(
        options["folder"], attn_implementation=options["engine"], dtype=torch.float32
    )
    model.train(options["backward"])
    more = {"position_ids": places % DOCUMENT} if is_packed else {}
    return lambda: model(tokens, use_cache=False, **more).last_hidden_state
