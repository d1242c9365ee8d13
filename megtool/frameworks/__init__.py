"""Other frameworks' words for any checkpoint: torch, Megatron, transformers, engines."""
