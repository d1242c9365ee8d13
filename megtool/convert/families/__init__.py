"""Model families: what a converter declares, and rows and keys that several share."""
