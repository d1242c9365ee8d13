"""An open checkpoint: opened, identified, and as other checkpoints and adapters change it."""
