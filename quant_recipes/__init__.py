"""Quantization recipes: YAML files, each line explained."""
