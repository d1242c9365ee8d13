"""Reading any checkpoint under any names, without converting it first.

From the top down: engines; the files here.
"""
