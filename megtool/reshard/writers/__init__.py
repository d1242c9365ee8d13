"""Plan the files of a target, one module per format."""
