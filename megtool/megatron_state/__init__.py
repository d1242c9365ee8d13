"""Optimizer state, rank files and extra states of Megatron, as tensors of the model.

From the top down: model_space.py; ranks; extra_states, optimizer; the files here.
"""
