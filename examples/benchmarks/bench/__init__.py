"""What the benchmark scripts share: synthetic checkpoints, jobs, races against cp, tables."""
