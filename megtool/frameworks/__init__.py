"""Other frameworks' words for any checkpoint: torch, Megatron, transformers.

From the top down: the files here; megatron_core.
"""
