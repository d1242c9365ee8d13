"""Reports as self-contained HTML pages: what is on one, its figures, and how it is written."""
