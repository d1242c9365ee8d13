"""Keys of a config.json and of Megatron's args, as fields of `ModelConfig`, both ways."""
