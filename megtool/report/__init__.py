"""Reports: plain data, text with rows and tables, and self-contained HTML pages."""
