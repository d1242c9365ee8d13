"""Measurements of `first_gpu.py` that no other script takes, each in a process of its own.

python examples/benchmarks/bench/first_gpu_work.py NAME --json FILE [--device cuda] [--tiny] ...
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from first_gpu_rivals import PAIRS, Figures, beside, error_of, seconds, wait
from torch import Tensor

from megtool.kernels.attention.dot_product import attention
from megtool.kernels.attention.mask import Mask, Segments
from megtool.kernels.attention.tiles import ScoreRule
from megtool.kernels.experts.grouped_gemm import grouped_linear
from megtool.kernels.fp8.cast import Quantized, dequantize, quantize_blocks, quantize_tensor
from megtool.kernels.fp8.products import dense_arithmetic, multiply
from megtool.model.batch import Batch
from megtool.quant.calibration import graphed_layer

Work = Callable[[argparse.Namespace], Figures]


def fp8(given: argparse.Namespace) -> Figures:
    """Products of FP8 operands by kinds of scales, beside bfloat16."""
    m, n, k = (64, 48, 128) if given.tiny else (8192, 4096, 4096)
    made = {"device": given.device, "dtype": torch.bfloat16}
    a, b = torch.randn(m, k, **made), torch.randn(n, k, **made)
    flops = 2 * m * n * k
    plain = seconds(lambda: a @ b.t(), given.device)
    out: Figures = [{"scales": "none", "computed as": "bfloat16", "tflops": flops / plain}]
    blocks = {"1 x 128 and 128 x 128": ((1, 128), (128, 128)), "1 x 128, both": ((1, 128),) * 2}
    blocks["1 x 32, both"] = ((1, 32), (1, 32))
    pairs: dict[str, tuple[Quantized, Quantized]] = {
        "one": (quantize_tensor(a, "e4m3"), quantize_tensor(b, "e4m3"))
    }
    for name, (left, right) in blocks.items():
        two = left[1] == 32  # MX scales are powers of two
        pairs[name] = (
            quantize_blocks(a, "e4m3", block=left, power_of_two=two),
            quantize_blocks(b, "e4m3", block=right, power_of_two=two),
        )
    for name, (left_MK, right_NK) in pairs.items():
        exact = dequantize(left_MK).double() @ dequantize(right_NK).double().t()
        taken = seconds(lambda x=left_MK, y=right_NK: multiply(x, y, torch.bfloat16), given.device)
        found = multiply(left_MK, right_NK, torch.bfloat16)
        facts = {"scales": name, "computed as": dense_arithmetic(left_MK, right_NK)}
        out.append({**facts, "tflops": flops / taken, "error": error_of(found, exact)})
    return [{**row, "tflops": row["tflops"] / 1e12} for row in out]


def experts(given: argparse.Namespace) -> Figures:
    """Products of stacks of experts, whose rows are unevenly many and some of them none."""
    num, rows, hidden, ffn = (4, 64, 32, 48) if given.tiny else (64, 32768, 2048, 768)
    made = {"device": given.device, "dtype": torch.bfloat16}
    weight, x = torch.randn(num, ffn, hidden, **made), torch.randn(rows, hidden, **made)
    cuts = torch.randint(0, rows + 1, (num - 2,)).sort().values.tolist()
    counts = torch.tensor([b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)] + [0])
    counts = counts.to(given.device)
    found = grouped_linear(x, weight, counts)
    parts = torch.split(x.double(), counts.tolist())
    exact = torch.cat([p @ w.double().t() for p, w in zip(parts, weight, strict=True)])
    taken = seconds(lambda: grouped_linear(x, weight, counts), given.device)
    tflops = 2 * rows * hidden * ffn / taken / 1e12
    return [{"experts": num, "rows": rows, "tflops": tflops, "error": error_of(found, exact)}]


def attention_over_segments(given: argparse.Namespace) -> Figures:
    """Attention within the documents of packed rows, beside whole rows of the same length."""
    heads, kv, tokens, size = (4, 2, 64, 16) if given.tiny else (32, 8, 8192, 128)
    made = {"device": given.device, "dtype": torch.bfloat16}
    query = torch.randn(1, heads, tokens, size, **made)
    key, value = (torch.randn(1, kv, tokens, size, **made) for _ in range(2))
    ids = (torch.arange(tokens, device=given.device) // (tokens // 4))[None]
    own = torch.arange(tokens, device=given.device)[None]
    first = ids * (tokens // 4)
    mask = Mask(first_BS=first, last_BS=own, start=0, segments=Segments(tokens, (-1, 0), ids))
    rule = ScoreRule(scale=size**-0.5)
    found = attention(query, key, value, mask, rule)
    wide = [x.double().repeat_interleave(heads // x.shape[1], 1) for x in (query, key, value)]
    parts = [[t.chunk(4, 2)[i] for t in wide] for i in range(4)]
    exact = torch.cat(
        [torch.nn.functional.scaled_dot_product_attention(*p, is_causal=True) for p in parts], 2
    ).transpose(1, 2)
    whole = Mask(is_causal=True)
    packed = seconds(lambda: attention(query, key, value, mask, rule), given.device)
    causal = seconds(lambda: attention(query, key, value, whole, rule), given.device)
    ratio = {"milliseconds": 1e3 * packed, "of whole rows": 1e3 * causal}
    return [{"tokens": tokens, "documents": 4, **ratio, "error": error_of(found, exact)}]


@contextmanager
def without_graphs() -> Iterator[None]:
    """Run layers eagerly meanwhile."""
    before = graphed_layer.MIN_GRAPH_REPEATS
    graphed_layer.MIN_GRAPH_REPEATS = sys.maxsize
    try:
        yield
    finally:
        graphed_layer.MIN_GRAPH_REPEATS = before


def rows_of_tokens(given: argparse.Namespace, vocab: int) -> list[Tensor]:
    """Return rows of random tokens, in batches of 4 x 512."""
    rows, width, num = (1, 16, 12) if given.tiny else (4, 512, 64)
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab, (rows, width), generator=draw) for _ in range(num)]


def calibration(given: argparse.Namespace) -> Figures:
    """Calibration with graphs and without, loading of weights included."""
    from megtool.quant.calibration.calibrate import calibrate
    from megtool.quant.calibration.fingerprint import Fingerprint
    from megtool.quant.calibration.settings import CalibrationMethod
    from megtool.quant.resolve import resolve_recipe
    from megtool.quant.statistics.activation_sites import list_activation_sites

    decided = resolve_recipe(given.model, given.recipe)
    config = decided.source.known_config
    if config is None:
        raise SystemExit("the folder has no config")
    tokens = rows_of_tokens(given, config.embedding.vocab_size)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megtool").addHandler(handler)
    logging.getLogger("megtool").setLevel(logging.INFO)

    def run() -> float:
        told.clear()
        began = time.perf_counter()
        calibrate(
            decided.source,
            decided.matched.decisions,
            decided.recipe,
            list_activation_sites(decided.modules.modules, config),
            [Batch(tokens_BS=t) for t in tokens],
            fingerprint=Fingerprint(model="", recipe="", data=""),
            settings=CalibrationMethod(dtype="bfloat16", device=given.device),
        )
        wait(given.device)
        return sum(t.numel() for t in tokens) / (time.perf_counter() - began)

    run()  # which compiles kernels
    with without_graphs():
        eager = run()
    out: Figures = [{"layers": "eager", "tokens_per_second": eager, "ratio": 1.0, "log": ""}]
    if given.device != "cpu":
        graphed = run()
        log = next((line for line in told if line.startswith("CUDA graphs")), "")
        row = {"layers": "graphed", "tokens_per_second": graphed, "ratio": graphed / eager}
        out.append({**row, "log": log})
    return out


def modelopt(given: argparse.Namespace) -> Figures:
    """The same by NVIDIA ModelOpt on transformers' model, loading included."""
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM

    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    model = model.to(given.device)
    tokens = rows_of_tokens(given, model.config.vocab_size)

    def show(model: torch.nn.Module) -> None:
        with torch.inference_mode():
            for rows in tokens:
                model(rows.to(given.device), use_cache=False)

    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, show)
    wait(given.device)
    taken = time.perf_counter() - began
    return [{"layers": "ModelOpt's", "tokens_per_second": sum(t.numel() for t in tokens) / taken}]


WORK: dict[str, Work] = {
    "fp8": fp8,
    "experts": experts,
    "attention": attention_over_segments,
    "calibration": calibration,
    "modelopt": modelopt,
    **{f"beside-{name}": partial(beside, name) for name in PAIRS},
}


def main() -> None:
    """Measure what the command line names."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("name", choices=WORK)
    options.add_argument("--json", type=Path, required=True)
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--model", default="")
    options.add_argument("--recipe", default="fp8")
    given = options.parse_args()
    given.json.write_text(json.dumps(WORK[given.name](given), indent=1))


if __name__ == "__main__":
    main()
