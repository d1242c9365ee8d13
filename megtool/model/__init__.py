"""The model: one decoder for every family, parallel over ranks."""
