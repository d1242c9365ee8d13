"""System calls: open files, reads, writes, copies, names, locks; the one place of each.

From the top down: the files here; location; objects; stores.
"""
