"""Training and evaluation data: text, chat templates, packing, and Megatron's .bin/.idx files.

From the top down: retro; the files here.
"""
