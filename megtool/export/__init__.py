"""Export: what an engine's folder holds beside tensors, and codes on their way from form to form."""
