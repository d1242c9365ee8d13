"""The report of `quantize` on a terminal and as JSON, and how its rows are made."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from megtool.quant.statistics.site_statistics import (
    BINS,
    BINS_PER_OCTAVE,
    OCTAVES,
    ActivationStatistics,
)
from megtool.quantize.report import QuantizeReport, histograms, input_rows, quantile
from megtool.report.sections import finite_json
from tests.support.quant.quantize_reports import proof, report, row


def test_the_report_is_short_and_says_all_that_counts() -> None:
    one = report()
    lines = list(one.lines())
    text = "\n".join(lines)
    assert lines[0] == "model (torch_dist) -> out by recipe nvfp4"
    for said in (
        "size        2.1 MiB -> 704.0 KiB (32.4 %), 5.18 bits per weight",
        "target      vllm loads it",
        "KV cache    FP8",
        "calibrated  on 8,000 tokens of 16 samples: texts.jsonl",
        "experts     84 of 96 experts received enough tokens, the fewest 3",
        "perplexity  20.0000 -> 21.0000 (+5.00 %) on 8,192 tokens of texts.jsonl",
        "agreement   95.10% of tokens have the same most likely token",
        "12 weights compared: SQNR at least 20.0 dB",
        "5 unquantized are equal, 4 norms have smoothing scales",
        "chosen      4.97 bits per weight within 5, by kl_div",
        "seconds     15.5 (calibrate 12.5, write 3.0)",
        "error       scale-zero: layers.3.mlp.up: weight_scale is zero; all is zero",
    ):
        assert said in text
    assert len(lines) < 40
    assert sum(line.startswith("layers.") for line in lines) == 5


def test_the_worst_come_first_and_many_findings_are_counted() -> None:
    many = replace(proof(), findings=proof().findings * 30)
    one = replace(report(), proof=many)
    text = "\n".join(one.lines())
    assert "in all      30 errors and 30 warnings (--json lists them)" in text
    found = [r.sqnr_db for r in one.proof.worst()]  # type: ignore[union-attr]
    assert found == sorted(r.sqnr_db for r in many.rows)[:5]


def test_json_holds_everything_and_is_json() -> None:
    exact = replace(proof(), rows=(replace(row("a", 1), sqnr_db=math.inf),))
    value = json.loads(json.dumps(finite_json(replace(report(), proof=exact).to_json())))
    assert value["proof"]["rows"][0]["sqnr_db"] == "inf"
    assert value["proof"]["num_errors"] == 1
    assert value["calibration"]["coverage"][0]["tokens"][2] == 3
    assert value["evaluation"]["agreement"] == 0.951
    assert value["auto"]["curve"][0] == {"bits": 4.5, "loss": 1.0}
    assert value["reproduction"]["seed"] == "7"
    assert value["bits"] == pytest.approx(8 * 720904 / 1114112)


def test_errors_of_the_proof_are_the_exit_status() -> None:
    assert report().exit_status == 7
    clean = replace(report(), proof=replace(proof(), findings=proof().findings[1:]))
    assert clean.exit_status == 0


def test_a_run_without_data_proof_or_evaluation_is_told_too() -> None:
    bare = QuantizeReport(source="a", destination="b", recipe="fp8")
    assert next(iter(bare.lines())) == "a -> b by recipe fp8"
    assert bare.exit_status == 0
    assert not list(QuantizeReport.elsewhere("a", "b").lines())


def test_quantiles_and_histograms_are_those_of_the_elements() -> None:
    rng = np.random.default_rng(3)
    x = np.abs(rng.lognormal(0, 2, 20000)).astype(np.float32)
    low = OCTAVES[0]
    share, exponent = np.frexp(x)
    bins = 1 + (
        (exponent - 1 - low) * BINS_PER_OCTAVE + ((share * 2 - 1) * BINS_PER_OCTAVE)
    ).astype(int)
    s = replace(
        ActivationStatistics.empty(4),
        num_tokens=5000,
        amax=np.full(4, x.max(), np.float32),
        histogram=np.bincount(bins, minlength=BINS).astype(np.int64),
    )
    for q in (0.1, 0.5, 0.99, 0.9999):
        assert quantile(s, q) == pytest.approx(float(np.quantile(x, q)), rel=0.05)
    assert quantile(s, 1.0) == float(x.max())
    (found,) = input_rows(
        {"layers.3.attn.qkv": s, "layers.4.attn.qkv": ActivationStatistics.empty(4)}
    )
    assert (found.layer, found.num_tokens, found.amax) == (3, 5000, float(x.max()))
    both = histograms({"layers.3.attn.qkv": s, "layers.4.attn.qkv": s})
    assert list(both) == ["attn.qkv"]
    assert sum(both["attn.qkv"]) == 40000
    assert both["attn.qkv"][-low] == 2 * int(((x >= 1) & (x < 2)).sum())
