"""Loaders for inference engines, which read any checkpoint without a converted copy of it."""
