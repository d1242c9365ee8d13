"""Storage for `torch.distributed.checkpoint`, over any checkpoint: see `megtool.frameworks.dcp`."""

from megtool.frameworks.dcp import Planner, Reader, Writer, load

__all__ = ["Planner", "Reader", "Writer", "load"]
