"""One kind of destination a file: its tensors, their cuts, and the files beside them."""
