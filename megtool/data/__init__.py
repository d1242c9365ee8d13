"""Training and evaluation data: text, chat templates, packing, and Megatron's .bin/.idx files."""
