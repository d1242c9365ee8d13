"""DeepSpeed's ZeRO and universal checkpoints: read only."""
