"""Writing: what a settled model becomes in files, tensor by tensor."""
