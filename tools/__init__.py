"""Scripts that write and run the documentation."""
