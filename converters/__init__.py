"""Model families, one a file: data that megtool.convert reads."""
