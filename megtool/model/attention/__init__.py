"""Attention of a layer: grouped-query, latent, compressed, over several ranks."""
