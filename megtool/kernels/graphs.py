"""CUDA graphs of a function per input shape, and the rehearsal that checks their rules on a CPU."""
