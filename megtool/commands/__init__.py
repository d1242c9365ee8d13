"""One function per verb, which takes its options and returns a report: the Python API.

`verbs.py` is the table of verbs, `options/` has their options, `api.py` makes the functions that
take keywords.

From the top down: the files here; pages, verification; reports; inspection, options.
"""
