"""Hostile pickles through every verb: nothing runs, and nothing that is written names them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from megtool.megatron_state.extra_states.te_state import make_bytes_tensor
from megtool.options.layout import ParallelConfig
from megtool.pickles.allow_list import ALLOWED_GLOBALS
from megtool.pickles.zip_writer import encode_object
from tests.support.attack.child import run
from tests.support.attack.outcome import Outcome
from tests.support.checkpoints import arrays, te_payloads
from tests.support.checkpoints.hostile_pickles import PLACES, globals_in, hostile_variants
from tests.support.checkpoints.trained import config, write

VERBS: dict[str, list[str]] = {
    "reshard to torch_dist": ["reshard", "SRC", "DST", "--to=torch_dist"],
    "reshard to torch_dist of TP=2": ["reshard", "SRC", "DST", "--to=torch_dist", "--tp=2"],
    "reshard to megatron": ["reshard", "SRC", "DST", "--to=megatron"],
    "reshard to dcp": ["reshard", "SRC", "DST", "--to=dcp"],
    "reshard to torch_checkpointing": ["reshard", "SRC", "DST", "--to=torch_checkpointing"],
    "reshard to zarr": ["reshard", "SRC", "DST", "--to=zarr"],
    "reshard to tensorstore": ["reshard", "SRC", "DST", "--to=tensorstore"],
    "reshard to ocdbt": ["reshard", "SRC", "DST", "--to=ocdbt"],
    "reshard to safetensors": ["reshard", "SRC", "DST", "--to=safetensors"],
    "reshard with Bridge's files": ["reshard", "SRC", "DST", "--to=torch_dist", "--bridge"],
    "reshard without objects": ["reshard", "SRC", "DST", "--to=torch_dist", "--drop-objects"],
    "reshard of layers": ["reshard", "SRC", "DST", "--to=torch_dist", "--layers=0-1"],
    "amax fix": ["amax", "fix", "SRC", "DST"],
    "amax strip": ["amax", "strip", "SRC", "DST"],
    "amax derive": ["amax", "derive", "SRC", "DST"],
    "amax inspect": ["amax", "inspect", "SRC"],
    "quantize": ["quantize", "SRC", "DST", "--recipe=fp8_per_channel"],
    "export": ["export", "SRC", "DST", "--to=gguf"],
    "finetune": ["finetune", "SRC", "DST", "--data=TEXT", "--train-iters=1", "--seq-length=16"],
    "inspect": ["inspect", "SRC"],
    "verify": ["verify", "SRC"],
    "lint": ["lint", "SRC"],
    "generate": ["generate", "SRC", "--prompt=a", "--max-new-tokens=1"],
    "evaluate": ["evaluate", "SRC", "--data=TEXT"],
}
"""Every verb that reads a checkpoint."""


def save_sources(root: Path) -> dict[str, Path]:
    """A sound training state of every format that has pickles, with objects."""
    if not (root / "torch_dist").exists():
        state = encode_object([make_bytes_tensor(te_payloads.DELAYED_2_4)])
        objects = {
            f"decoder.layers.self_attention.linear_qkv._extra_state/shard_{k}_4": state
            for k in range(4)
        }
        objects["rng_state/shard_0.0_1.1"] = encode_object(
            [[{"random_rng_state": (3, (1,), None)}]]
        )
        write(
            root / "torch_dist",
            config(),
            ParallelConfig(),
            arrays.materialize,
            objects=objects,
            beside={"tokenizer/tokenizer.json": b"{}"},
            small_state={"opt_param_scheduler": {"num_steps": 4}},
        )
    for kind in PLACES:
        if not (root / kind).exists():
            done = run(["reshard", root / "torch_dist", root / kind, f"--to={kind}"])
            if done.status != 0:
                raise RuntimeError(f"{kind}: {done.err}")
    return {kind: root / kind for kind in PLACES}


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Every verb on hostile checkpoints of every kind, `count` in all."""
    outcome = Outcome("hostile pickles")
    root = root / "pickles"
    root.mkdir(exist_ok=True)
    sources = save_sources(root)
    (root / "text.txt").write_text("a text\n" * 50)
    (root / "cwd").mkdir(exist_ok=True)
    variants = [v for kind in PLACES for v in hostile_variants(kind)]
    rng.shuffle(variants)
    verbs = list(VERBS)
    for number in range(count):
        variant, verb = variants[number % len(variants)], verbs[number % len(verbs)]
        source, out = root / "hostile", root / "out"
        for path in (source, out):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        shutil.copytree(sources[variant.kind], source)
        for sidecar in source.rglob("megtool.json"):
            sidecar.unlink()
        variant.patch(source)
        names = {"SRC": source, "DST": out, "--data=TEXT": f"--data={root / 'text.txt'}"}
        done = run([names.get(a, a) for a in VERBS[verb]], cwd=root / "cwd")
        fault = done.fault
        if out.exists() and not fault and (foreign := globals_in(out) - set(ALLOWED_GLOBALS)):
            fault = f"passed on: {sorted(foreign)}"
        if any((root / "cwd").iterdir()) or (source / "pwned").exists():
            fault = "code of a pickle ran"
        outcome.note(f"{verb} of {variant.kind} with {variant.id}", fault)
    return outcome
