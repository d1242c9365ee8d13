"""Parts of `first_gpu.py` that run the tests marked `gpu`."""

from __future__ import annotations

from collections.abc import Callable

from bench.first_gpu_plan import PYTHON, Part, Setup, Step

GPU_TESTS: dict[str, tuple[str, ...]] = {
    "graphs": (
        "tests/kernels/graphs",
        "tests/train/test_cuda_graph.py",
        "tests/commands/test_finetune_cuda_graph.py",
        "tests/inference",
    ),
    "Transformer Engine": (
        "tests/kernels/transformer_engine",
        "tests/kernels/attention/test_transformer_engine.py",
        "tests/optim/test_te_adam.py",
        "tests/commands/test_finetune_te.py",
    ),
}
"""Tests marked `gpu` that run first; all others run after them."""


def tests_of(group: str) -> Callable[[Setup], Part]:
    """Return what makes the part of a group; without a name, of all tests that no group has."""
    paths = GPU_TESTS.get(group, ())
    earlier = () if group else tuple(path for paths in GPU_TESTS.values() for path in paths)

    def make(setup: Setup) -> Part:
        chosen = paths or ("tests", *(f"--ignore={path}" for path in earlier))
        if setup.is_tiny:
            chosen = chosen[:1] if group else ("tests/kernels/test_wgrad_accumulation.py",)
        command = (PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider")
        step = Step(
            name=f"pytest -m gpu: {group or 'all others'}",
            command=(*command, "--junitxml", "{out}", *chosen),
            packages=("pytest",),
            needs_gpu=True,
            kind="tests",
        )
        return Part(
            name=f"tests-{group.split()[0].lower()}" if group else "tests",
            question=f"Do the tests that need a GPU pass: {group or 'kernels, offload, training'}?",
            seconds={"graphs": 150, "Transformer Engine": 90, "": 200}[group],
            steps=(step,),
        )

    return make
