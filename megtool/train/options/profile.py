"""Options of profiling: which steps, on which ranks, and for which program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megtool.errors import UsageError
from megtool.options.field import Options, option

PROFILING = "Profiling"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(Options):
    """What is profiled, with Megatron's names for the steps."""

    profile: Literal["torch", "nsys"] | None = option(
        PROFILING,
        "torch: traces (for Perfetto) and tables in DST/profile. nsys: a range of the CUDA "
        "profiler with NVTX names, for Nsight Systems (its capture range is cudaProfilerApi).",
    )
    profile_step_start: int = option(
        PROFILING, "Profile the steps after this one, ...", 10, minimum=0
    )
    profile_step_end: int = option(PROFILING, "... up to this one.", 12, minimum=1)
    profile_ranks: str = option(PROFILING, "Ranks to profile: 0,8.", "0", metavar="LIST")

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks to profile.

        Raises:
            UsageError: it is no list of numbers.
        """
        try:
            return frozenset(int(text) for text in self.profile_ranks.split(","))
        except ValueError:
            raise UsageError(
                f"--profile-ranks is {self.profile_ranks!r}", hint="numbers with commas: 0,8"
            ) from None

    def check_profile(self, iteration: int, train_iters: int, world_size: int) -> None:
        """Refuse to profile steps or ranks that a run does not have.

        Raises:
            UsageError: it has none of them.
        """
        if self.profile is None:
            return
        first, last = self.profile_step_start + 1, self.profile_step_end
        if last < first:
            raise UsageError(
                f"--profile-step-start {first - 1} is not below --profile-step-end {last}"
            )
        if last > train_iters or first <= iteration:
            raise UsageError(
                f"--profile is for steps {first} to {last}, and this run does steps "
                f"{iteration + 1} to {train_iters}",
                hint="--profile-step-start and --profile-step-end choose others",
            )
        if other := sorted(rank for rank in self.ranks if not 0 <= rank < world_size):
            raise UsageError(
                f"--profile-ranks names {other[0]}, and there are {world_size} ranks",
                hint=f"0 to {world_size - 1}",
            )
