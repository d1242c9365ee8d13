"""Verbs on the emulated GPU as users call them: defaults, rows of 2,048 and 4,096 tokens.

python -m tests.support.emulated.default_runs LIBRARY FOLDER [NAME ...]

It prints a line of JSON for each run: its name, the ways that attention took, what the host waited
for in a step after the first, the branches of the kernels that it reached, and what went wrong, if
anything. Models are tiny, with random weights, and their tokens bytes. Kernels are those of a GPU
without Triton, whose interpreter is too slow for such rows, but for runs that are named after it.
In a world (WORLD_SIZE) every process has a GPU of its own, and rank 0 prints.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.support.emulated import branches
from tests.support.emulated.device import start

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # there is no compiler for this GPU
EMULATION = start(Path(sys.argv[1]))
REACHED = branches.record()

import torch  # noqa: E402

import megtool  # noqa: E402
from megtool.kernels import dispatch  # noqa: E402
from megtool.kernels.attention import dot_product  # noqa: E402
from megtool.train import loop  # noqa: E402
from tests.support.models import moe_models, tiny_text  # noqa: E402
from tests.support.models.tiny_model import tiny_model  # noqa: E402

FOLDER = Path(sys.argv[2])
POSITIONS = 4608
NUMBERS = itertools.count(int(time.time()))
SIZES = moe_models.SIZES | {
    "vocab_size": tiny_text.VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": tiny_text.END,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
CASES = moe_models.CASES
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 300, "head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 300}),
    "qwen3_moe": ("qwen3_moe", CASES["qwen3_moe"][2]),
    "gpt_oss": ("gpt_oss", CASES["gpt_oss"][2] | {"sliding_window": 300, "head_dim": 16}),
    "deepseek_v3": ("deepseek_v3", CASES["deepseek_v3"][2]),
    "nemotron_h": ("nemotron_h", CASES["nemotron_h"][2] | {"num_hidden_layers": 4}),
    "qwen3_next": ("qwen3_next", CASES["qwen3_next"][2]),
    "llama4": ("llama4", CASES["llama4"][2] | {"attention_chunk_size": 512}),
    "mpt": ("mpt", {}),
}


@cache
def model(name: str) -> Path:
    """A folder with the model and a tokenizer of bytes."""
    folder = FOLDER / "models" / name
    if not (folder / "tokenizer.json").exists():
        family, keys = MODELS[name]
        tiny_model(family, folder, sizes=SIZES, dtype="bfloat16", **keys)
        tiny_text.save_tokenizer(folder)
    return folder


@cache
def texts(longest: int = 900, count: int = 60) -> Path:
    """Texts of random lengths, so that several share a row."""
    file = FOLDER / f"texts-{longest}.jsonl"
    draw = random.Random(longest)
    lines = [
        "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(longest // 3, longest)))
        for _ in range(count)
    ]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


def finetune(name: str, *, longest: int = 900, **more: Any) -> None:
    """Steps of a run, with what is no default only where `more` says so."""
    options = {"train_iters": 2, "global_batch_size": 2, "fsync": False} | more
    report = megtool.finetune(
        model(name), FOLDER / f"run-{next(NUMBERS)}", data=str(texts(longest)), **options
    )
    assert report is not None


def quantize(name: str, recipe: str = "fp8", **more: Any) -> None:
    """A quantized folder from some rows."""
    options = {"samples": 4, "seq_length": 2048, "fsync": False} | more
    out = FOLDER / f"quantized-{next(NUMBERS)}"
    megtool.quantize(model(name), out, recipe, data=str(texts(3000)), **options)


def evaluate(name: str, **more: Any) -> None:
    """The loss of some texts."""
    megtool.evaluate(model(name), data=str(texts(3000)), **({"max_tokens": 6000} | more))


def generate(name: str, length: int = 2100, **more: Any) -> None:
    """Answers to a long prompt and a short one."""
    prompts = ["".join(random.Random(n).choice("abc ") for _ in range(length - n)) for n in (0, 90)]
    megtool.generate(model(name), prompt=prompts, **({"max_new_tokens": 4} | more))


def serve(name: str) -> None:
    """An engine that reads a long prompt in parts, behind what it has read."""
    with megtool.Engine(model(name), cache_tokens=8192, prefill_tokens=700) as engine:
        request = engine.submit("abcdefgh" * 260, max_new_tokens=3)
        assert len(request.result().tokens) == 3


TP, CP, PP = {"tp": 2}, {"cp": 2}, {"pp": 2}
Run = Callable[[], None]
RUNS: dict[str, Run] = {
    "finetune": partial(finetune, "llama"),
    "finetune 4096": partial(finetune, "llama", seq_length=4096, longest=3000),
    "finetune unpacked": partial(finetune, "llama", packing=False, longest=3000),
    "finetune graphs": partial(finetune, "llama", cuda_graph_impl="local", train_iters=3),
    "finetune fp32": partial(finetune, "llama", fp32=True),
    "finetune dropout": partial(finetune, "llama", attention_dropout=0.1, hidden_dropout=0.1),
    "finetune recompute": partial(finetune, "llama", recompute_granularity="full"),
    "finetune lora": partial(finetune, "llama", lora_rank=4),
    **{
        f"finetune fp8 {recipe}": partial(finetune, "llama", fp8_recipe=recipe, seq_length=512)
        for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")
    },
    **{
        f"finetune {name}": partial(finetune, name)
        for name in MODELS
        if name not in ("llama", "llama4")
    },
    "finetune llama4": partial(finetune, "llama4", longest=3000),
    "finetune gpt_oss 4096": partial(finetune, "gpt_oss", seq_length=4096, longest=3000),
    "finetune nemotron_h graphs": partial(
        finetune, "nemotron_h", cuda_graph_impl="local", seq_length=512, longest=300
    ),
    "finetune triton": partial(finetune, "llama", seq_length=64, train_iters=1, kernels="triton"),
    "finetune triton qwen3_moe": partial(
        finetune, "qwen3_moe", seq_length=64, train_iters=1, kernels="triton"
    ),
    "finetune triton nemotron_h": partial(
        finetune, "nemotron_h", seq_length=64, train_iters=1, kernels="triton"
    ),
    "finetune triton qwen3_next": partial(
        finetune, "qwen3_next", seq_length=64, train_iters=1, kernels="triton"
    ),
    "finetune triton gpt_oss": partial(
        finetune, "gpt_oss", seq_length=64, train_iters=1, kernels="triton"
    ),
    "quantize": partial(quantize, "llama"),
    "quantize mistral": partial(quantize, "mistral"),
    "quantize qwen3_moe": partial(quantize, "qwen3_moe"),
    "quantize smoothquant": partial(quantize, "llama", "int8_sq"),
    "evaluate": partial(evaluate, "llama"),
    **{
        f"evaluate {name}": partial(evaluate, name)
        for name in ("mistral", "gemma2", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_next")
    },
    "generate": partial(generate, "llama"),
    **{
        f"generate {name}": partial(generate, name)
        for name in ("mistral", "gemma2", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_next")
    },
    "engine": partial(serve, "llama"),
    "engine mistral": partial(serve, "mistral"),
    "engine gemma2": partial(serve, "gemma2"),
}
WORLDS: dict[str, Run] = {
    "cp ring": partial(finetune, "llama", cp=2, longest=3000),
    "cp ring packed": partial(finetune, "llama", cp=2),
    "cp all-to-all": partial(finetune, "llama", cp=2, cp_comm_type="a2a"),
    "cp ring gpt_oss": partial(finetune, "gpt_oss", cp=2),
    "cp all-to-all gpt_oss": partial(finetune, "gpt_oss", cp=2, cp_comm_type="a2a"),
    "cp nemotron_h": partial(finetune, "nemotron_h", cp=2),
    "pp": partial(finetune, "llama", pp=2),
    "pp graphs": partial(finetune, "llama", pp=2, cuda_graph_impl="local", train_iters=3),
    "tp": partial(finetune, "llama", tp=2, sequence_parallel=True),
    "ep": partial(finetune, "qwen3_moe", ep=2),
}
"""Runs of two processes."""


def note_ways() -> Counter[str]:
    """The ways of attention from now on, and whether each was chosen in a capture."""
    ways: Counter[str] = Counter()
    choose = dot_product.choose_way

    def noted(*args: Any, **more: Any) -> Any:
        way = choose(*args, **more)
        ways[f"{way}, captured" if EMULATION.is_capturing else way] += 1
        return way

    dot_product.choose_way = noted
    return ways


def note_steps() -> list[list[str]]:
    """What the host waited for in each step from now on."""
    steps: list[list[str]] = []
    step = loop._TrainLoop.step

    def noted(*args: Any, **more: Any) -> Any:
        EMULATION.take_waits()
        result = step(*args, **more)
        steps.append(EMULATION.take_waits())
        return result

    loop._TrainLoop.step = noted  # type: ignore[method-assign]
    return steps


def main(names: list[str]) -> None:
    """Run those named, or all of one process."""
    torch.set_num_threads(1)
    ways, steps = note_ways(), note_steps()
    automatic = dispatch._automatic
    for name in names or list(RUNS):
        ways.clear()
        steps.clear()
        REACHED.clear()
        told: dict[str, Any] = {"name": name, "error": None}
        is_interpreted = "triton" in name
        dispatch._automatic = automatic if is_interpreted else lambda _: "torch"  # type: ignore[assignment]
        try:
            (RUNS | WORLDS)[name]()
        except Exception:
            told["error"] = traceback.format_exc()
        told |= {
            "ways": dict(ways),
            "waits": steps[-1] if steps else [],
            "reached": sorted(REACHED),
        }
        if os.environ.get("RANK", "0") == "0" or told["error"]:
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[3:])
