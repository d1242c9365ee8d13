"""Positions of tokens: rotary embedding and ALiBi."""
