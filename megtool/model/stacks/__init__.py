"""Layers put together: decoder, encoder and decoder, heads, pipeline stages, adapters."""
