"""Any checkpoint through the interfaces of torch, Megatron and transformers.

From the top down: the files here; megatron_core.
"""
