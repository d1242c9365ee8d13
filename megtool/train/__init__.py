"""Training: finetuning a checkpoint, saved and resumed in every layout.

From the top down: the files here; features; checkpointing; model, run_plan.py; evaluation.py,
options.
"""
