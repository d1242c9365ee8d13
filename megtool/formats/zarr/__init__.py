"""Folders and databases of arrays: zarr v2 and v3, tensorstore, OCDBT."""
