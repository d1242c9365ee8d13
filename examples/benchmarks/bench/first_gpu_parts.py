"""What `first_gpu.py` runs, in order: tests, defaults, kernels, and speed against rivals."""

from __future__ import annotations

from collections.abc import Callable

from bench import first_gpu_verbs
from bench.first_gpu_plan import PYTHON, Part, Setup, Step
from bench.first_gpu_tests import GPU_TESTS, tests_of


def list_parts(setup: Setup) -> list[Part]:
    """Return all parts, in the order in which they run."""
    makers: tuple[Callable[[Setup], Part], ...] = (
        *(tests_of(name) for name in GPU_TESTS),
        first_gpu_verbs.defaults,
        first_gpu_verbs.options,
        _kernels,
        _compiled,
        _products,
        _graphs,
        _calibration,
        first_gpu_verbs.fp8,
        _training,
        _memory,
        _recurrences,
        first_gpu_verbs.nccl,
        tests_of(""),
    )
    return [make(setup) for make in makers]


def _script(name: str, *words: str) -> tuple[str, ...]:
    return (PYTHON, f"examples/benchmarks/{name}", *words, "--json", "{out}")


def _work(setup: Setup, name: str, *words: str) -> tuple[str, ...]:
    command = (PYTHON, "examples/benchmarks/bench/first_gpu_work.py", name, "--json", "{out}")
    return (*command, "--device", setup.device, *(("--tiny",) if setup.is_tiny else ()), *words)


def _kernels(setup: Setup) -> Part:
    sizes = ("--tokens", "16", "--hidden", "32", "--rounds", "1") if setup.is_tiny else ()
    command = _script("kernel_speed.py", "--device", setup.device, "--backward", *sizes)
    return Part(
        name="kernels",
        question="How close do fused kernels come to a copy (goal 0.8), and liger's and torch's?",
        seconds=120,
        steps=(Step(name="bytes a second of each kernel", command=command, kind="json"),),
    )


def _compiled(setup: Setup) -> Part:
    tool = (PYTHON, "-m", "tests.support.emulated.compile_for_gpu")
    steps = (
        Step(
            name="registers, spills and shared memory of each kernel",
            command=(*tool, "--arch", "{arch}", "--fast"),
            packages=("triton",),
            needs_gpu=True,
        ),
    )
    question = "Do kernels fit this GPU?"
    return Part(name="compiled", question=question, seconds=60, steps=steps)


def _products(setup: Setup) -> Part:
    names = ("fp8", "experts", "attention")
    return Part(
        name="products",
        question="Are block-scaled and grouped products and attention over segments right (error "
        "against float64), and how fast?",
        seconds=45,
        steps=tuple(Step(name=n, command=_work(setup, n), kind="json") for n in names),
    )


def _graphs(setup: Setup) -> Part:
    sizes = ("--models", "tiny", "--tokens", "16", "--calls", "1", "--rounds", "1", "--no-compile")
    words = sizes if setup.is_tiny else ("--models", "S,M", "--rounds", "3")
    command = _script("gpu_speed.py", "--part", "forward", *words)
    return Part(
        name="graphs",
        question="How much faster are graphed passes and steps of decoding than eager ones?",
        seconds=60,
        steps=(Step(name="graphed against eager", command=command, needs_gpu=True, kind="json"),),
    )


def _calibration(setup: Setup) -> Part:
    modelopt = ("modelopt", "transformers")
    steps = [
        *(
            Step(
                name=f"{model}, {recipe}",
                command=_work(setup, "calibration", "--model", f"{{{model}}}", "--recipe", recipe),
                models=(model,),
                kind="json",
            )
            for model, recipe in (("large", "fp8"), ("large", "int8_sq"), ("experts", "fp8"))
        ),
        Step(
            name="large, fp8, by ModelOpt",
            command=_work(setup, "modelopt", "--model", "{large}"),
            models=("large",),
            packages=modelopt,
            kind="json",
        ),
    ]
    question = "How many tokens a second does calibration take, with graphs, without, by ModelOpt?"
    return Part(name="calibration", question=question, seconds=120, steps=tuple(steps))


def _training(setup: Setup) -> Part:
    sizes = ("--models", "tiny", "--tokens", "16", "--calls", "1", "--rounds", "1", "--no-compile")
    words = sizes if setup.is_tiny else ("--models", "M", "--rounds", "3", "--calls", "10")
    command = _script("gpu_speed.py", "--part", "train", *words)
    step = Step(
        name="a step of 1B",
        command=command,
        packages=("transformers", "accelerate"),
        needs_gpu=True,
        kind="json",
    )
    question = (
        "Is a step faster than transformers' Trainer's with liger-kernel (goal 1.15) and "
        "megatron-core's with Transformer Engine (goal 1.0; without Apex it does not fuse the sums "
        "of weights' gradients)?"
    )
    return Part(name="training", question=question, seconds=150, steps=(step,))


def _memory(setup: Setup) -> Part:
    sizes = ("--large", "tiny", "--tokens", "16") if setup.is_tiny else ()
    command = _script("gpu_speed.py", "--part", "memory", *sizes)
    return Part(
        name="memory",
        question="What is the peak memory of a step of 8B, by what the optimizer keeps?",
        seconds=60,
        steps=(Step(name="a step of 8B", command=command, needs_gpu=True, kind="json"),),
    )


def _recurrences(setup: Setup) -> Part:
    words = ("--device", setup.device, "--rounds", "1" if setup.is_tiny else "5")
    tokens = ("--tokens", "70" if setup.is_tiny else "4096")
    steps = [
        Step(
            name=name,
            command=_script(script, *words, *tokens),
            packages=("transformers",),
            kind="json",
        )
        for name, script in (
            ("Mamba-2 and its convolution", "mamba_speed.py"),
            ("the gated delta rule", "delta_rule_speed.py"),
        )
    ]
    peers = (("mamba_ssm", "mamba"), ("fla", "delta"), ("causal_conv1d", "conv"))
    steps += [
        Step(
            name=f"ours beside {package}",
            command=_work(setup, f"beside-{kind}"),
            packages=(package,),
            needs_gpu=True,
            kind="json",
        )
        for package, kind in peers
    ]
    question = "How do kernels of recurrences compare with transformers' and the field's own?"
    return Part(name="recurrences", question=question, seconds=45, steps=tuple(steps))
