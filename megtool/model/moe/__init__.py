"""Mixture of experts: the router, the experts, and their balance."""
