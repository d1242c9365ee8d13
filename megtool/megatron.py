"""Loading of any checkpoint into Megatron-Core's models: see `megtool.frameworks.megatron`."""

from megtool.frameworks.megatron import Installed, LoadStrategy, install, load, load_common_state

__all__ = ["Installed", "LoadStrategy", "install", "load", "load_common_state"]
