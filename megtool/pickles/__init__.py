"""What others wrap bytes in: zip archives and pickles, read without running them."""
