"""Parts of `first_gpu.py` that run megtool's own commands, as users do."""

from __future__ import annotations

from dataclasses import replace

from bench.first_gpu_plan import PYTHON, Part, Setup, Step


def _megtool(*words: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "megtool", *words)


def _finetune(setup: Setup, name: str, model: str, *words: str, **facts: object) -> Step:
    command = _megtool(
        *("finetune", f"{{{model}}}", "{folder}/run", "--data", "{text}"),
        *("--seq-length", str(setup.length), "--train-iters", str(setup.iterations)),
        *("--device", setup.device, *words),
    )
    return Step(name=name, command=command, models=(model,), kind="run", **facts)  # type: ignore[arg-type]


def defaults(setup: Setup) -> Part:
    """Return the part of every verb with its defaults."""
    device = ("--device", setup.device)
    samples = ("--samples", "4", "--seq-length", "32") if setup.is_tiny else ()

    def quantize(name: str, model: str, recipe: str) -> Step:
        words = ("--recipe", recipe, *device, *samples)
        command = _megtool("quantize", f"{{{model}}}", "{folder}/out", *words)
        return Step(name=name, command=command, models=(model,))

    steps = [
        _finetune(setup, "finetune SmolLM2, packed", "smollm2"),
        _finetune(setup, "finetune 1B, packed", "1b"),
        _finetune(setup, "finetune with windows", "windowed"),
        _finetune(setup, "finetune Mamba-2", "mamba"),
        _finetune(setup, "finetune a gated delta net", "delta"),
        _finetune(setup, "finetune experts", "experts"),
        quantize("quantize SmolLM2", "smollm2", "fp8"),
        quantize("quantize 1B", "1b", "fp8"),
        quantize("quantize with windows", "windowed", "fp8"),
        quantize("quantize experts", "experts", "int8_sq"),
        Step(
            name="evaluate SmolLM2",
            command=_megtool("evaluate", "{smollm2}", "--data", "{short_text}", *device),
            models=("smollm2",),
        ),
        Step(
            name="generate by 1B",
            command=_megtool(
                *("generate", "{1b}", "--prompt", "A checkpoint is", *device),
                *(("--max-new-tokens", "4") if setup.is_tiny else ()),
            ),
            models=("1b",),
        ),
        Step(
            name="context parallelism (ring)",
            elsewhere="two ranks do not share a GPU under NCCL: torchrun --nproc-per-node 2 -m "
            "megtool finetune SRC DST --data FILE --cp 2",
        ),
    ]
    question = "Do the commands run with their defaults, at 2,048 tokens?"
    return Part(name="defaults", question=question, seconds=270, steps=tuple(steps))


def options(setup: Setup) -> Part:
    """Return the part of options of training, beside none."""
    te = ("transformer_engine",)
    model = "smollm2"
    full = ("--recompute-granularity", "full")
    steps = [
        _finetune(setup, "plain", model),
        _finetune(setup, "graphs", model, "--cuda-graph-impl", "local", needs_gpu=True),
        _finetune(setup, "optimizer state on the CPU", model, "--optimizer-cpu-offload"),
        _finetune(setup, "recompute", model, *full),
        _finetune(setup, "--kernels torch", model, "--kernels", "torch"),
        *(
            _finetune(
                setup,
                f"Transformer Engine, recompute{', FP8' if words else ''}",
                model,
                *("--kernels", "te", *full, *words),
                packages=te,
                needs_gpu=True,
            )
            for words in ((), ("--fp8-recipe", "tensorwise"))
        ),
    ]
    return Part(
        name="options",
        question="What do options of training cost or save (ratio to plain)?",
        seconds=120,
        steps=tuple(_against(steps, "plain")),
    )


def _against(steps: list[Step], name: str, goals: dict[str, float] | None = None) -> list[Step]:
    goals = goals or {}
    return [
        s if s.name == name else replace(s, against=name, goal=goals.get(s.name)) for s in steps
    ]


def fp8(setup: Setup) -> Part:
    """Return the part of training in FP8, beside bfloat16."""
    te = ("transformer_engine",)
    steps = [_finetune(setup, f"{shape}, bfloat16", shape) for shape in ("1b", "large")]
    for shape in ("1b", "large"):
        recipes = ("tensorwise", "delayed", "blockwise", "mxfp8")
        some = [
            _finetune(setup, f"{shape}, {r}", shape, "--fp8-recipe", r, needs_gpu=True)
            for r in (recipes if shape == "1b" else recipes[:1])
        ]
        some.append(
            _finetune(
                setup,
                f"{shape}, tensorwise, Transformer Engine",
                shape,
                *("--fp8-recipe", "tensorwise", "--kernels", "te"),
                packages=te,
                needs_gpu=True,
            )
        )
        steps += _against(some, f"{shape}, bfloat16", {f"{shape}, tensorwise": 1.0})
    question = "Is training in FP8 faster than in bfloat16 (ratio of tokens a second)?"
    return Part(name="fp8", question=question, seconds=210, steps=tuple(steps))


def nccl(setup: Setup) -> Part:
    """Return the part of a world of one rank."""
    one = _finetune(setup, "a world of one", "smollm2", needs_gpu=True)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    step = Step(
        name=one.name,
        command=(PYTHON, *torchrun, *one.command[1:]),
        models=one.models,
        needs_gpu=True,
        kind="run",
    )
    question = "Does training start and end under torchrun with NCCL?"
    return Part(name="nccl", question=question, seconds=45, steps=(step,))
