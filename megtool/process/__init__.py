"""What one process does with threads, children and memory, and which worker of how many it is."""
