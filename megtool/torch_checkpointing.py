"""Any checkpoint for `torch_checkpointing`: see `megtool.frameworks.torch_checkpointing`."""

from megtool.frameworks.torch_checkpointing import MetadataFormat, StorageConfig

__all__ = ["MetadataFormat", "StorageConfig"]
