"""torch.distributed.checkpoint, plain and as Megatron saves it: read, and laid out."""
