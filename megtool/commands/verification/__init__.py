"""The parts of `megtool verify`: digests, files, metadata, quantized weights.

Elements are compared by `megtool/digests/compare.py`.
"""
