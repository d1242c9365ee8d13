"""Files and stores: the one place of every system call and request.

From the top down: the files here; location; objects; stores.
"""
