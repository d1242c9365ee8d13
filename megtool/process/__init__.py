"""Threads, child processes, memory and worker identity of this process."""
