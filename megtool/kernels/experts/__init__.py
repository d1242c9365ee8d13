"""Products of experts: tokens permuted, multiplied in groups, and put back."""
