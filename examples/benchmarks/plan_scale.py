"""Opening and planning a checkpoint of a million shards, from its headers alone.

python examples/benchmarks/plan_scale.py [--layers 61] [--experts 256] [--dir DIR] [--rounds 3]

The checkpoint is a 671B-parameter mixture of experts with optimizer state, saved at TP8 PP16 EP64
with two virtual stages; its data are holes. The plan is for TP4 PP8 EP32. Neither number of stages
divides 61 layers: the source has an explicit layout, the target lighter outer stages.
"""

from __future__ import annotations

from pathlib import Path

from bench.race import run_job
from bench.table import Table, mib, parser, show, verdict, workplace

from megtool.parallel.pipeline_split import splits

TP, PP, EP = 4, 8, 32
LIMITS = {"open": (10.0, 2048), "plan": (5.0, 1024)}


def layout(layers: int) -> dict[str, int]:
    """The layout to plan for, with fewer layers on the outer stages where it does not divide."""
    split = [way for way in splits(layers, PP) if way.layout is None][-1]
    outer = {"first_stage_layers": split.first, "last_stage_layers": split.last}
    uneven = {k: v for k, v in outer.items() if v is not None and layers % PP}
    return {"tp": TP, "pp": PP, "ep": EP, **uneven}


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.set_defaults(rounds=3)
    options.add_argument("--layers", type=int, default=61)
    options.add_argument("--experts", type=int, default=256)
    given = options.parse_args()
    table = Table(
        title="Opening and planning",
        head=("phase", "s (min)", "limit", "s (max)", "MiB anonymous", "limit"),
    )
    with workplace(given) as folder:
        made = Path(folder) / "moe"
        sizes = {"layers": given.layers, "experts": given.experts}
        run_job("metadata", {"folder": str(made), **sizes})
        job = {"source": str(made), "layout": layout(given.layers)}
        runs = [run_job("plan", job, watch=True) for _ in range(given.rounds)]
        facts = runs[0].facts
        peaks = {p: max(r.peak_bytes(p) for r in runs) for p in LIMITS}
        held = {"open": peaks["open"], "plan": max(0, peaks["plan"] - peaks["open"])}
        for phase, (most_seconds, most_mib) in LIMITS.items():
            seconds = [r.phases[phase]["ended"] - r.phases[phase]["began"] for r in runs]
            table.add(
                phase if phase == "open" else "plan, more than open",
                f"{min(seconds):.2f}",
                verdict(min(seconds), most_seconds),
                f"{max(seconds):.2f}",
                mib(held[phase]),
                verdict(held[phase] / 2**20, most_mib),
                job=phase,
                seconds=seconds,
                peak_bytes=held[phase],
                read=[r.phases[phase]["read"] for r in runs],
            )
        read = runs[0].phases["open"]["read"] / 2**20
        note = (
            f"{given.layers} layers, {given.experts} experts: "
            f"{facts['num_bytes'] / 2**40:.2f} TiB of tensors in {facts['source_shards']:,} shards "
            f"become {facts['target_shards']:,} in {facts['steps']:,} steps; opening reads "
            f"{read:.0f} MiB."
        )
        show(given, Path(folder), [table], note)


if __name__ == "__main__":
    main()
