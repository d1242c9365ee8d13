"""One checker of quantized folders: rules of engines' loaders, each with its public source."""
