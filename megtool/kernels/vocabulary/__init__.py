"""A linear head over a vocabulary: logits, cross entropy and statistics, block by block."""
