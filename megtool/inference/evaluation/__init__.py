"""Evaluation: loss on texts, divergence of two models, tasks, labels, importance of parts."""
