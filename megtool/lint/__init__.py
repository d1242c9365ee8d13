"""Rules by which engines' loaders take or refuse a folder, each with its public source."""
