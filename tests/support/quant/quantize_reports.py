"""A report with everything in it, and names that try to break out of a page."""

from __future__ import annotations

from megtool.quantize.report import (
    AutoChoice,
    CalibrationFacts,
    CoverageRow,
    FormatRow,
    InputRow,
    ParetoPoint,
    QuantizeEvaluation,
    QuantizeReport,
)
from megtool.quantize.verification.verify_folder import FolderVerification, WeightAccuracy
from megtool.report.finding import error, warning

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=a>&'\x1b[31m"


def row(name: str, number: int, label: str = "NVFP4") -> WeightAccuracy:
    return WeightAccuracy(
        name=name,
        label=label,
        bits=4.5 if label == "NVFP4" else 8.0,
        num_bytes=9216 + number,
        sqnr_db=20.0 + (number * 37 % 100) / 50,
        cosine=0.9951234,
        max_error=0.0123,
        relative_error=0.0954,
        num_clipped=number if number % 3 else None,
    )


def proof(modules: int = 12, *, name: str = "") -> FolderVerification:
    rows = [row(f"layers.{i}.attn.q{name}", i, ("NVFP4", "FP8")[i % 2]) for i in range(modules)]
    return FolderVerification(
        path="out",
        rows=tuple(rows),
        findings=(
            error("scale-zero", f"layers.3.mlp.up{name}", "weight_scale is zero", "all is zero"),
            warning("row", "layers.1.mlp.up", "row 3 is off by 60% of its size", "noise"),
        ),
        num_unquantized=5,
        num_norms=4,
        num_bytes=123456,
    )


def report(modules: int = 12, *, name: str = "", experts: int = 8) -> QuantizeReport:
    points = tuple(
        InputRow(
            name=f"layers.{i}.attn.qkv{name}",
            layer=i,
            num_tokens=1000,
            amax=10.0 ** (i % 5),
            median=0.1,
            percent_99=1.0,
            percent_9999=1.5,
        )
        for i in range(modules)
    )
    return QuantizeReport(
        source=f"model{name}",
        destination="out",
        source_format="torch_dist",
        family="llama",
        recipe="nvfp4",
        method="awq",
        target="vllm",
        formats=(
            FormatRow(
                format="NVFP4", modules=28, weights=1 << 20, num_bytes=589832, source_bytes=2 << 20
            ),
            FormatRow(
                format="keep", modules=2, weights=1 << 16, num_bytes=1 << 17, source_bytes=1 << 17
            ),
        ),
        source_bytes=2228224,
        num_bytes=720904,
        kv_format="FP8",
        calibration=CalibrationFacts(
            data=f"texts.jsonl{name}",
            num_samples=16,
            num_tokens=8000,
            seconds=12.5,
            inputs=points,
            histograms={f"attn.qkv{name}": tuple([0] * 30 + [5, 80, 300, 20] + [0] * 30)},
            coverage=tuple(
                CoverageRow(
                    mixture=f"layers.{i}.mlp{name}",
                    tokens=tuple(3 if e == 2 else 100 + e for e in range(experts)),
                    enough=64,
                )
                for i in range(min(modules, 12))
            ),
        ),
        proof=proof(modules, name=name),
        evaluation=QuantizeEvaluation(
            data="texts.jsonl",
            tokens=8192,
            perplexity_before=20.0,
            perplexity_after=21.0,
            kl_mean=0.0123,
            kl_99=0.1,
            kl_max=1.5,
            agreement=0.951,
        ),
        auto=AutoChoice(
            method="kl_div",
            budget=5.0,
            chosen=ParetoPoint(bits=4.97, loss=0.2),
            curve=tuple(ParetoPoint(bits=4.5 + i / 10, loss=1 / (i + 1)) for i in range(8)),
        ),
        seconds={"calibrate": 12.5, "write": 3.0},
        peak_rss_bytes=1 << 28,
        reproduction={"megtool": "0.1", "seed": "7", "command": f"megtool quantize{name}"},
        notes=(f"2 experts of layers.3 share scales{name}",),
    )
