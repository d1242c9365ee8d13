"""Groups of options that several verbs share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.errors import UsageError
from megtool.options.effects import requires
from megtool.options.field import LAYOUT, Options, layout_size, option
from megtool.options.kernels import Implementation
from megtool.options.layout import ParallelConfig

INPUT, OUTPUT, DANGEROUS = "Input", "Output", "Dangerous"
TEXT, RUNNING = "Text", "Running"

_BY_TORCHRUN = ", started by torchrun"

RUN_DTYPES = ("bfloat16", "float16", "float32", "float64")

EngineName = str
"""An inference engine, or one with its version: `vllm`, `trtllm`, `sglang`, `vllm@0.16.0`."""


SOURCE = "A checkpoint: a folder, a save folder, or a single file."
DESTINATION = "The folder to write; it appears when complete."


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """What is to be known of a checkpoint to read that it does not say itself."""

    iteration: str | None = option(
        INPUT, "Iteration of a save folder; default: the latest.", metavar="N"
    )
    family: str | None = option(
        INPUT, "The model family, if the checkpoint names none.", metavar="NAME"
    )
    like: Path | None = option(
        INPUT, "A Hugging Face folder to take config and tokenizer from.", metavar="FOLDER"
    )
    drop_setting: tuple[str, ...] = option(
        INPUT,
        "Take the model to be without this setting, which changes what it computes, and record so: "
        "a name that an error has given; repeatable.",
        (),
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class AdaptedSource(SourceOptions):
    """A checkpoint to read, and adapters that are merged into its weights."""

    adapter: tuple[Path, ...] = option(
        INPUT,
        "Add the adapter (LoRA) in this folder to SRC's weights, without optimizer state; "
        "repeatable.",
        (),
        metavar="FOLDER",
    )


@dataclass(frozen=True, kw_only=True)
class DryRun(Options):
    """Planning without writing."""

    dry_run: bool = option(
        OUTPUT, "Print the plan and write nothing.", False, flags=("--dry-run", "-n")
    )


@dataclass(frozen=True, kw_only=True)
class Publishing(DryRun):
    """How a result appears at its destination."""

    overwrite: bool = option(
        DANGEROUS,
        "Replace DST, which stays valid until the new one is.",
        False,
        flags=("--overwrite",),
    )
    fsync: bool = option(DANGEROUS, "Make the result survive a power failure.", True)


@dataclass(frozen=True, kw_only=True)
class ForeignObjects(Options):
    """What becomes of objects that would run code when the result is loaded."""

    drop_objects: bool = option(
        OUTPUT,
        "Leave out objects that name classes or functions no checkpoint needs, and list them; "
        "default: refuse such a source.",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class ThreadCount(Options):
    """Threads of reading and writing."""

    threads: int | None = option(
        OUTPUT,
        "Threads; default: one per core, at most 8.",
        metavar="N",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class CopyResources(ThreadCount):
    """The resources that copying takes, and the store that it may trust."""

    memory: str = option(
        OUTPUT,
        "Most memory for buffers (at least 384 KiB per thread).",
        "128MiB",
        metavar="SIZE",
    )
    unsafe_store: bool = option(
        DANGEROUS,
        "Write to a store that ignores conditions, by which two runs exclude each other.",
        False,
        flags=("--unsafe-store",),
    )


@dataclass(frozen=True, kw_only=True)
class WorkerShare(Options):
    """Which of several processes this is that do one piece of work together."""

    worker: str | None = option(
        RUNNING,
        "Do one share of the work, as worker I of N (I from 0), in as many processes, on any "
        "hosts: 0/4, 1/4, 2/4, 3/4. The last that is complete publishes the result. slurm-array: "
        "as the task of a job array; auto: as torchrun, mpirun or srun started this process, the "
        "default of the command line; 0/1: do everything.",
        metavar="I/N",
    )


@dataclass(frozen=True, kw_only=True)
class ScanShare(Options):
    """Which of several processes this is that read one checkpoint together."""

    worker: str | None = option(
        RUNNING,
        "Read one share, as worker I of N (I from 0), in as many processes, on any hosts: 0/4, "
        "1/4, 2/4, 3/4. The last that is complete reports. slurm-array: as the task of a job "
        "array; auto: as torchrun, mpirun or srun started this process, the default of the command "
        "line; 0/1: read everything.",
        metavar="I/N",
    )
    worker_dir: Path | None = option(
        RUNNING,
        "A folder, or a prefix of a store (s3://bucket/scratch), that all workers see, for their "
        "records until the last one has read them; default: the current folder.",
        metavar="FOLDER",
    )


@dataclass(frozen=True, kw_only=True)
class RequiredEngine(Options):
    """The engine that has to load what is written."""

    target: EngineName | None = option(
        OUTPUT,
        "Fail if this engine cannot load the result: vllm, trtllm, sglang, or vllm@0.16.0.",
        metavar="ENGINE",
    )


@dataclass(frozen=True, kw_only=True)
class TextRecords(Options):
    """Where the text of a record is, and which records of a data set are read."""

    field: str | None = option(INPUT, "The field of a record that holds its text.", metavar="NAME")
    split: str | None = option(INPUT, "The split of a data set.", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class TokenizerChoice(Options):
    """The tokenizer of a model that is run."""

    tokenizer: Path | None = option(
        INPUT, "A folder with the tokenizer; default: the one with SRC.", metavar="FOLDER"
    )


_HAS_CP = requires("cp", "--cp N splits the tokens of every row over N ranks")


@dataclass(frozen=True, kw_only=True)
class ContextParallelism(Options):
    """How ranks of context parallelism exchange keys and values."""

    cp_comm_type: str | None = option(
        LAYOUT,
        "How ranks of --cp exchange keys and values: all_gather (every rank has all; default), p2p "
        "(passed round in a ring), a2a (ranks have heads instead of tokens), a2a+p2p; one for all "
        "layers, or one for each: p2p,a2a.",
        metavar="LIST",
        needs=(_HAS_CP,),
    )
    hierarchical_context_parallel_sizes: str | None = option(
        LAYOUT,
        "Levels of a2a+p2p: A ranks exchange heads, B groups of them keys and values; A * B is "
        "--cp.",
        metavar="A,B",
        needs=(_HAS_CP,),
    )

    @property
    def context_layout(self) -> dict[str, Any]:
        """The fields of `ParallelConfig` that these are.

        Raises:
            UsageError: a size is no number.
        """
        kinds, sizes = self.cp_comm_type, self.hierarchical_context_parallel_sizes
        words = [] if kinds is None else [w.strip() for w in kinds.split(",")]
        try:
            levels = tuple(int(n) for n in sizes.split(",")) if sizes else ()
        except ValueError:
            raise UsageError(
                f"--hierarchical-context-parallel-sizes is {sizes!r}",
                hint="two numbers with a comma: 2,4",
            ) from None
        names = {"allgather": "all_gather"}  # as Megatron-LM's help has it
        return {
            "cp_comm_type": tuple(names.get(w, w) for w in words),
            "hierarchical_cp": levels,
        }


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(ContextParallelism):
    """How a model is run: device, dtype, kernels and parallel layout.

    `device` None is CUDA if there is one, else the CPU. `dtype` None is the checkpoint's own on
    CUDA, and float32 on a CPU, where most 16-bit types are many times slower. `stream_layers` reads
    every layer when it is needed and frees it afterwards.

    Raises:
        UsageError: no model runs in this dtype.
    """

    device: str | None = option(RUNNING, "cpu, cuda or cuda:N; default: cuda if there is one.")
    dtype: str | None = option(
        RUNNING,
        "bfloat16, float16 or float32; default: float32 on a CPU, elsewhere as stored.",
        metavar="NAME",
    )
    stream_layers: bool = option(
        RUNNING,
        "Keep one layer in memory at a time: slow, but any model fits.",
        False,
    )
    kernels: Implementation = option(
        RUNNING,
        "Which implementation of fused operations runs. te: Transformer Engine's norms, "
        "activations without limit and offset (no exact gelu) and attention of whole rows in 16 "
        "bits; the rest is megtool's own. fla, mamba-ssm, causal-conv1d, liger, flash-attn, "
        "flash-attn-3: that package's, where it has the operation; auto takes the first four on a "
        "GPU, if they are installed.",
        "auto",
    )
    threads: int | None = option(
        RUNNING,
        "Threads; default: as many as torch uses.",
        metavar="N",
        minimum=1,
    )
    tp: int | None = layout_size("tp", note=_BY_TORCHRUN)
    pp: int | None = layout_size("pp", note=_BY_TORCHRUN)
    encoder_pp: int | None = layout_size("encoder_pp", minimum=0)
    ep: int | None = layout_size("ep", note=_BY_TORCHRUN)
    etp: int | None = layout_size("etp")
    cp: int | None = layout_size("cp", note=_BY_TORCHRUN, alias="--context-parallel-size")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is not None and self.dtype not in RUN_DTYPES:
            known = ", ".join(RUN_DTYPES)
            raise UsageError(f"the dtype is {self.dtype!r}", hint=f"a model runs in {known}")

    @property
    def layout(self) -> ParallelConfig:
        """The parallel layout; every size that is not given is 1."""
        return ParallelConfig(
            tp=self.tp or 1,
            pp=self.pp or 1,
            ep=self.ep or 1,
            etp=self.etp or 0,
            cp=self.cp or 1,
            encoder_pp=self.encoder_pp or 0,
            **self.context_layout,
        )


@dataclass(frozen=True, kw_only=True)
class HtmlPage(Options):
    """A report as a page beside the text.

    Raises:
        UsageError: the name is that of no HTML file.
    """

    report: Path | None = option(
        OUTPUT,
        "Also write the report as one HTML file with figures, which loads nothing.",
        metavar="FILE.html",
        is_written=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.report is not None and self.report.suffix.lower() not in (".html", ".htm"):
            raise UsageError(
                f"--report is {str(self.report)!r}", hint="the name of a file that ends with .html"
            )


@dataclass(frozen=True, kw_only=True)
class ReportOutput(Options):
    """How a report is printed; every command has these."""

    as_json: bool = option(OUTPUT, "Print the report as JSON.", False, flags=("--json",))
    quiet: bool = option(OUTPUT, "No progress and no warnings.", False, flags=("--quiet", "-q"))
    verbose: bool = option(
        OUTPUT,
        "More messages, and tracebacks.",
        False,
        flags=("--verbose", "-v"),
    )
