"""Single files of `torch.save`."""
