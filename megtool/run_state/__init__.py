"""The state of a run beside its tensors, at a new layout: objects, args, optimizer format."""
