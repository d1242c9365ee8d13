"""Proofs: what was written read again, and held against its source."""
