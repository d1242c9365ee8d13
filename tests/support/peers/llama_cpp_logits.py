"""llama.cpp's log-probabilities of the token after each prompt: python llama_cpp_logits.py DIR."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any


def start(model: Path) -> Any:
    """Serve a model with one thread, in float32, for as long as the result is kept."""
    import xllamacpp as llama

    given = llama.CommonParams()
    given.model.path = str(model)
    given.n_ctx, given.n_parallel, given.n_gpu_layers, given.port = 256, 1, 0, 0
    given.warmup = given.fit_params = False
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    given.verbosity = -1
    given.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    given.cache_type_k = given.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    return llama.Server(given)


def score(address: str, prompt: list[int], vocab_size: int) -> list[float]:
    """The log-probability of every token after a prompt."""
    body = {"prompt": prompt, "n_predict": 1, "n_probs": vocab_size, "temperature": 1.0}
    body |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False, "seed": 1}
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
    out = [float("nan")] * vocab_size
    for row in answer["completion_probabilities"][0]["top_logprobs"]:
        out[row["id"]] = row["logprob"]
    return out


def tokenize(address: str, text: str) -> list[int]:
    """The tokens of a text, without special ones around it."""
    body = json.dumps({"content": text, "add_special": False}).encode()
    request = urllib.request.Request(
        f"{address}/tokenize", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        tokens: list[int] = json.load(reply)["tokens"]
    return tokens


def main(folder: Path) -> None:
    """Answer `job.json` beside `model.gguf` in `answer.json`."""
    job = json.loads((folder / "job.json").read_text())
    server = start(folder / "model.gguf")
    address = server.listening_address
    rows = [score(address, prompt, job["vocab_size"]) for prompt in job.get("prompts", ())]
    rows += [tokenize(address, text) for text in job.get("texts", ())]
    (folder / "answer.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # the server's threads go on otherwise
