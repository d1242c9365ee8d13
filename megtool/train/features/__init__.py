"""Features that change how a model is trained: LoRA, QAT, FP8, distillation, expert balancing."""
