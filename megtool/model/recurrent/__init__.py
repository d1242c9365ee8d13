"""Mixers with a state of constant size: Mamba-2, delta rules, short convolutions."""
