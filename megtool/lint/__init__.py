"""Checks of quantized folders against the loaders of engines; each rule names its public source."""
