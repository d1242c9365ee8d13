"""One verb a file: plain typed functions that return a report. This is the Python API."""
