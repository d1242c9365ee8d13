"""Generation: prompts continued in batches, sampled, with drafts or without."""
