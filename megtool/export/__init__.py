"""Export: what an engine's folder holds, and codes on their way from one form to another.

From the top down: trtllm_legacy; gguf, hf; the files here.
"""
