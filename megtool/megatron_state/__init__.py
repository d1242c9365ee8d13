"""What Megatron stores beside weights, by rank or by bucket, as tensors of the model.

From the top down: model_space.py; ranks; extra_states, optimizer; the files here.
"""
