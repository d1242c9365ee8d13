"""The state of a run beside its tensors, for a new layout: objects, args, optimizer format."""
