"""Training: finetuning a checkpoint, saved and resumed in every layout."""
