"""The page of every verb: drawn in a browser, with the numbers of the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import audit, reshard, verify
from megtool.commands.pages.evaluate import evaluate_page
from megtool.commands.pages.finetune import finetune_page
from megtool.commands.pages.lint import lint_page
from megtool.commands.pages.quantize import quantize_page
from megtool.commands.pages.reshard import reshard_page
from megtool.commands.reports.evaluate import Divergence, EvaluateReport, WorstPosition
from megtool.commands.reports.finetune import FinetunePlan, FinetuneReport
from megtool.commands.reports.lint import LintReport
from megtool.commands.verbs import VERBS
from megtool.quantize.report import QuantizeReport
from megtool.report.finding import Finding
from megtool.report.html import write_page
from megtool.report.page import Page, PageFigure, PageTable
from megtool.train.loop import TrainOutcome
from tests.support.browser import Browser
from tests.support.checkpoints.updates import merge, random_updates
from tests.support.models import tiny_llama
from tests.support.quant.quantize_reports import HOSTILE
from tests.support.quant.quantize_reports import report as quantize_report

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("verbs") / "hf")


def lint_report(name: str = "layers.0.mlp") -> LintReport:
    finding = Finding(
        id="scale-zero", severity="error", target="vllm", module=name, message="is zero",
        effect="all is zero", hint="quantize again", source="vllm/x.py",
    )  # fmt: skip
    return LintReport(
        path="out", targets=("vllm", "trtllm"), tp=1, form="fp8", formats={"FP8": 4, "": 1},
        num_rules=7, seconds=0.1, findings=(finding,),
    )  # fmt: skip


def evaluate_report(name: str = "before") -> EvaluateReport:
    position = WorstPosition(
        document=0, place=3, kl=1.0, before=name, expected="a", predicted="b", reference="c"
    )
    against = Divergence(
        path="other", format="hf", family="llama", perplexity=21.0, loss=3.0, accuracy=0.4,
        kl_mean=0.01, kl_median=0.0, kl_90=0.02, kl_99=0.1, kl_999=0.5, kl_max=1.0, agreement=0.95,
        logits_mean_difference=0.1, logits_max_difference=2.0, worst=(position,),
    )  # fmt: skip
    return EvaluateReport(
        path="model", format="hf", family="llama", data="x.txt", device="cpu", dtype="float32",
        documents=1, tokens=100, loss=3.0, perplexity=20.0, accuracy=0.5, window=64, stride=64,
        seconds=1.0, against=against, tasks={"arc": {"acc": 0.5}},
    )  # fmt: skip


def finetune_report(folder: Path, against: tuple[str, ...] = ()) -> FinetuneReport:
    counts = {"documents": 1, "rows": 1, "split": 0, "truncated": 0, "skipped": 0}
    return FinetuneReport(
        source="a", destination=str(folder), format="hf", family="llama", device="cpu",
        dtype="bfloat16", layout={"tp": 1}, num_parameters=10, train_iters=6, start_iteration=0,
        outcome=TrainOutcome(
            iteration=6, saved_iteration=6, tokens=100, seconds=2.0, stall_seconds=0.5, skipped=1
        ),
        first_loss=3.0, last_loss=2.0, evaluations=((3, 2.5),),
        counts=counts, seq_length=8, peak_bytes=1 << 20, against=against,
    )  # fmt: skip


def write_log(folder: Path, offset: float) -> None:
    (folder / "iter_0000006").mkdir(parents=True)
    lines = [
        {
            **{"iteration": i, "loss": 3.0 - i / 6 + offset, "lr": 1e-4, "grad_norm": 1.0},
            **{"tokens_per_second": 50.0, "seconds": 0.3, "peak_memory_bytes": 1 << 20},
        }
        for i in range(1, 7)
    ]
    lines.append({"iteration": 3, "eval_loss": 2.5 + offset})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def finetune_runs(tmp_path: Path) -> Page:
    write_log(tmp_path / "run", 0.0)
    write_log(tmp_path / "other", 0.5)
    return finetune_page(finetune_report(tmp_path / "run", (str(tmp_path / "other"),)))


def figures(page: Page) -> dict[str, PageFigure]:
    blocks = (b for s in page.sections for b in s.blocks)
    return {b.title: b for b in blocks if isinstance(b, PageFigure)}


def tables(page: Page) -> dict[str, PageTable]:
    blocks = (b for s in page.sections for b in s.blocks)
    return {b.title: b for b in blocks if isinstance(b, PageTable)}


def check_in_browser(browser: Browser, path: Path) -> None:
    browser.open(path)
    counts = browser.run(
        "return [...document.querySelectorAll('.plot')].map(e=>[e.id,e.querySelectorAll("
        "'.slice,.point,.trace,.hm,.sankey-link').length])"
    )
    assert all(count for _, count in counts), counts
    assert browser.logged() == []
    assert browser.requested() == []


@pytest.mark.parametrize("verb", ["lint", "evaluate", "quantize", "finetune"])
@pytest.mark.parametrize("hostile", [False, True])
def test_pages_of_reports(browser: Browser, tmp_path: Path, verb: str, hostile: bool) -> None:
    name = HOSTILE if hostile else "layers.0"
    pages = {
        "lint": lambda: lint_page(lint_report(name)),
        "evaluate": lambda: evaluate_page(evaluate_report(name)),
        "quantize": lambda: quantize_page(quantize_report(name=name)),
        "finetune": lambda: finetune_runs(tmp_path),
    }
    write_page(tmp_path / "page.html", pages[verb]())
    check_in_browser(browser, tmp_path / "page.html")
    assert browser.run("return document.querySelectorAll('img').length") == 0


def test_what_differs_and_where(browser: Browser, hf: Path, tmp_path: Path) -> None:
    other = tiny_llama.save(tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][1, 3] += 1.0
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    report = verify(hf, other, report=tmp_path / "page.html")
    (difference,) = report.differences
    ((index, a, b),) = difference.samples
    assert index == (1, 3)
    assert b == pytest.approx(a + 1.0, rel=0.02)
    assert len(report.compared) == report.num_tensors
    check_in_browser(browser, tmp_path / "page.html")
    text = browser.run(
        "return [...document.querySelectorAll('td')].map(e=>e.textContent).join(' ')"
    )
    assert difference.tensor in text
    assert "[1, 3]" in text
    reshard(hf, tmp_path / "half", dtype="float16")
    verify(hf, tmp_path / "half", report=tmp_path / "half.html")
    check_in_browser(browser, tmp_path / "half.html")
    assert "Tensors by layer" in browser.run("return document.body.textContent")
    equal = verify(hf, hf, report=tmp_path / "equal.html")
    assert equal.verdict == "equal"
    check_in_browser(browser, tmp_path / "equal.html")
    assert "No findings" in browser.run("return document.body.textContent")


def test_a_run_over_steps_and_layers(browser: Browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(16, 16) for i in range(3)}
    for step, factor in ((10, 1.0), (20, 1.1), (30, 1.1)):
        folder = tmp_path / "run" / f"step_{step}"
        folder.mkdir(parents=True)
        save_file({n: w * factor for n, w in weights.items()}, folder / "model.safetensors")
    report = audit(tmp_path / "run", report=tmp_path / "page.html")
    assert {f.id for f in report.findings} == {"identical-steps"}
    check_in_browser(browser, tmp_path / "page.html")
    text = browser.run("return document.body.textContent")
    assert "identical-steps" in text
    assert "step 20" in text
    points = [p for p in report.points if p.step == 20]
    assert [p.layer for p in points] == [0, 1, 2]
    assert all(p.update is not None and p.update > 0 for p in points)
    browser.hover(".plot .plotly .draglayer .nsewdrag", x=0.8, y=0.05)
    hover = "const e=document.querySelector('.hoverlayer .hovertext'); return e && e.textContent"
    assert "step 30" in browser.wait(hover)


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_plan_as_a_picture(browser: Browser, hf: Path, tmp_path: Path, dry_run: bool) -> None:
    report = reshard(
        hf,
        tmp_path / "out",
        to="torch_dist",
        tp=2,
        pp=2,
        dry_run=dry_run,
        report=tmp_path / "p.html",
    )
    assert report.flows is not None
    assert sum(n for _, _, n, _ in report.flows.flows) == report.plan.num_bytes.total
    assert len(report.flows.targets) == 4
    assert set(report.stages) == (
        set() if dry_run else {"open and plan", "copy", "digests", "check", "publish"}
    )
    assert sum(report.stages.values()) == pytest.approx(report.seconds, abs=0.5)
    check_in_browser(browser, tmp_path / "p.html")
    if not dry_run:
        back = reshard(tmp_path / "out", tmp_path / "back", to="hf")
        assert back.flows is not None
        assert len(back.flows.sources) == 4


def test_bytes_that_an_adapter_is_merged_into_have_a_bar(hf: Path, tmp_path: Path) -> None:
    report = merge(hf, tmp_path / "out", random_updates(hf, ["*.attn.q.weight"]))
    bars = figures(reshard_page(report))["Bytes by operation"]
    assert "merged with an adapter" in repr(bars.variants)


def test_runs_are_shown_side_by_side(tmp_path: Path) -> None:
    page = finetune_runs(tmp_path)
    names = [t["name"] for t in figures(page)["Loss"].variants["every step"]]
    assert names == ["run", "other", "run, evaluation", "other, evaluation"]
    assert page.data["curves"]["run"][0]["loss"] == pytest.approx(3.0 - 1 / 6)
    assert tables(page)["Saves"].rows == [("iter_0000006", 6)]
    assert {"Learning rate", "Gradient norm", "Throughput", "Peak memory"} <= set(figures(page))


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for number, folder in enumerate(folders):
        write_log(folder, float(number))
    page = finetune_page(finetune_report(folders[0], (str(folders[1]),)))
    assert list(page.data["curves"]) == ["a/run", "b/run"]
    assert [t["name"] for t in figures(page)["Learning rate"].variants[""]] == ["a/run", "b/run"]


def test_plans_have_pages(tmp_path: Path) -> None:
    plan = FinetunePlan(
        source="a", destination="b", format="hf", family="llama", resumes_from=None,
        layout={"tp": 1}, dtype="bfloat16", num_parameters=1, rank_parameters=1, rank_trainable=1,
        weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, samples=1, eval_samples=0,
        counts={"documents": 1, "rows": 1, "split": 0, "truncated": 0, "skipped": 0}, seq_length=8,
        micro_batch_size=1, global_batch_size=1, num_microbatches=1, tokens_per_step=8,
        train_iters=1,
    )  # fmt: skip
    assert "Memory of a rank, without activations" in figures(finetune_page(plan))


def test_a_quantized_page_shows_every_weight() -> None:
    report = quantize_report(40)
    page = quantize_page(report)
    assert report.proof is not None
    assert len(tables(page)["All weights, the worst first"].rows) == len(report.proof.rows)
    trace = figures(page)["Weights by layer and module"].variants["SQNR"][0]
    values = [v for row in trace["z"] for v in row if v is not None]
    assert len(values) == len(report.proof.rows)
    assert min(values) == pytest.approx(min(r.sqnr_db for r in report.proof.rows), rel=1e-4)
    bare = quantize_page(QuantizeReport(source="a", destination="b", recipe="fp8"))
    assert not figures(bare)


def test_a_page_of_a_thousand_modules_is_small(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", quantize_page(quantize_report(1000, experts=256)))
    assert (tmp_path / "page.html").stat().st_size < 3_000_000


def test_every_verb_with_the_option_has_a_page() -> None:
    from megtool.options.field import option_fields

    takes = {v.command for v in VERBS if any(e.name == "report" for e in option_fields(v.options))}
    assert takes == {v.command for v in VERBS if v.page_path}
