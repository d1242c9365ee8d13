"""Export: a checkpoint as the files that an engine, or another tool, loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.formats import detect_format, open_checkpoint
from megtool.checkpoint.formats.quantized import quantization
from megtool.checkpoint.plan import Plan
from megtool.checkpoint.storage.files import Files
from megtool.commands.reshard import reshard
from megtool.console import Progress, several, silent
from megtool.errors import UsageError
from megtool.export.report import ExportReport
from megtool.lint.tables import ENGINES
from megtool.quant.recipes.engine_support import read_target

FORMS: Mapping[str, str] = {
    "hf": "plain Hugging Face folder; quantized weights are decoded",
    "unified": "Hugging Face folder with ModelOpt's codes and scales",
    "vllm": "unified, as vLLM loads it",
    "sglang": "unified, as SGLang loads it",
    "trtllm": "unified, as TensorRT-LLM loads it",
    "compressed-tensors": "Hugging Face folder as llm-compressor writes it",
    "trtllm-legacy": "config.json and rankN.safetensors of TensorRT-LLM up to 1.x",
    "gguf": "one file for llama.cpp",
}
"""What `to` may be."""


def export(
    source: str | Path,
    destination: str | Path,
    *,
    to: str,
    target: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    kind: str | None = None,
    dtype: str | None = None,
    iteration: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    max_shard_size: str | None = None,
    threads: int | None = None,
    memory: str = "256MiB",
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    files: Files | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write the checkpoint `source`, quantized or not, in any format and layout, as `to` (`FORMS`).

    `target` is an engine, or one with its version (`vllm@0.16.0`): what it cannot load is refused
    before a byte is staged. Codes and scales of quantized weights go over as they are where the
    form has a place for them; they are packed anew where it packs otherwise, and brought to common
    scales where it has one for several weights. `tp` and `pp` are ranks of `trtllm-legacy`, `kind`
    is the number format of `gguf`, `dtype` that of weights that are not quantized (`hf`,
    `trtllm-legacy`). Nothing but headers is in memory at once, and a run that was interrupted
    resumes when it is called again with the same arguments.

    Raises:
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    _check_options(to, target, tp=tp, pp=pp, kind=kind, dtype=dtype, shards=max_shard_size)
    engine = target or (to if to in ENGINES else "")
    common: dict[str, Any] = {
        "threads": threads,
        "memory": memory,
        "overwrite": overwrite,
        "dry_run": dry_run,
        "fsync": fsync,
        "files": files,
        "progress": progress,
    }
    known: dict[str, Any] = {"iteration": iteration, "family": family, "like": like}
    if to == "trtllm-legacy":
        from megtool.export.trtllm_legacy.write_checkpoint import export_legacy

        return export_legacy(
            source, destination, tp=tp or 1, pp=pp or 1, dtype=dtype, **known, **common
        )
    if to == "gguf":
        from megtool.export.gguf.write_file import export_gguf

        return export_gguf(source, destination, kind=kind or "bf16", **known, **common)
    catalogue = _quantized(Path(source))
    if to == "hf" or catalogue is None:
        shards = {"dtype": dtype, "max_shard_size": max_shard_size}
        return _plain(source, destination, to, engine, catalogue, **shards, **known, **common)
    for flag, value in {"--dtype": dtype, "--iteration": iteration, "--like": like}.items():
        if value is not None:
            raise UsageError(
                f"{flag} means nothing for --to {to} of a quantized folder",
                hint="its tensors keep their types, and its config.json stays; --to hf decodes it",
            )
    from megtool.export.quantized_folder import export_folder

    return export_folder(
        source,
        destination,
        to=to,
        target=engine or None,
        family=family,
        max_shard_size=max_shard_size,
        **common,
    )


def _check_options(
    to: str,
    target: str | None,
    *,
    tp: int | None,
    pp: int | None,
    kind: str | None,
    dtype: str | None,
    shards: str | None,
) -> None:
    """Refuse options that say nothing for a form, before anything is opened."""
    if to not in FORMS:
        raise UsageError(f"--to {to}", hint="one of " + ", ".join(FORMS))
    meant = {
        "--tp": (tp, ("trtllm-legacy",)),
        "--pp": (pp, ("trtllm-legacy",)),
        "--kind": (kind, ("gguf",)),
        "--dtype": (dtype, ("hf", "unified", *ENGINES, "trtllm-legacy")),
        "--max-shard-size": (shards, tuple(f for f in FORMS if f not in ("gguf", "trtllm-legacy"))),
        "--target": (target, tuple(f for f in FORMS if f not in ("gguf", "trtllm-legacy"))),
    }
    for flag, (value, forms) in meant.items():
        if value is not None and to not in forms:
            raise UsageError(
                f"{flag} means nothing for --to {to}", hint=f"it is for --to {', '.join(forms)}"
            )
    if target is not None:
        engine = read_target(target).engine
        if to in ENGINES and engine != to:
            raise UsageError(
                f"--to {to} and --target {target} are two engines", hint="leave one of them out"
            )


def _quantized(source: Path) -> Catalogue | None:
    """A Hugging Face folder that says it is quantized, be it the KV cache alone; None for others:
    files of other formats hold plain weights."""
    if "hf" not in detect_format(source).names:
        return None
    catalogue = open_checkpoint(source)
    return None if quantization(catalogue.metadata) is None else catalogue


def _plain(
    source: str | Path,
    destination: str | Path,
    to: str,
    engine: str,
    quantized: Catalogue | None,
    **more: Any,
) -> ExportReport:
    """A plain Hugging Face folder, whatever the source is."""
    from megtool.export.preflight import check_plan, wrong_scales

    if to == "compressed-tensors":
        raise UsageError(
            f"{source} is not quantized: compressed-tensors would hold nothing but plain weights",
            hint="megtool quantize does that first; --to hf writes it plain",
        )
    notes: list[str] = []
    wrong: list[str] = []
    if quantized is not None:
        wrong += wrong_scales(quantized.root)
        if quantized.set_aside:
            count = several(len(quantized.set_aside), "scale")
            notes.append(f"{count} of inputs and of the KV cache are left out: all is plain")

    def check(plan: Plan) -> None:
        notes.extend(check_plan(plan, Path(destination), engine))

    more["check"] = check if engine else None
    found = reshard(source, destination, to="hf", optimizer="none", **_said(more))
    if to != "hf":
        notes.append("its weights are plain: megtool quantize --recipe makes them smaller")
    if found.left_out:
        notes.append(f"optimizer state is left out: {found.left_out:,} tensors")
    place = Path(destination)
    there = [] if found.dry_run else sorted(f for f in place.rglob("*") if f.is_file())
    return ExportReport(
        source=str(source),
        destination=str(destination),
        to=to,
        engine=engine,
        tensors=found.tensors,
        num_bytes=found.num_bytes,
        source_bytes=found.plan.read_bytes,
        decoded=len(quantized.packed) if quantized is not None else 0,
        files=tuple(str(f.relative_to(place)) for f in there),
        notes=tuple(notes),
        overflowed=found.overflowed,
        warnings=(*wrong, *found.warnings),
        is_dry=found.dry_run,
        seconds=found.seconds,
        peak_rss_bytes=found.peak_rss_bytes,
    )


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not None."""
    return {k: v for k, v in options.items() if v is not None}
