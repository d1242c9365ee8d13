"""Many processes, on one host or many, that write one checkpoint together.

There are no collectives. Every worker computes the same plan and does its share of it:

1. Worker I of N enters the staging area of the destination, which all share. Their manifest names
   the plan and N; workers of another plan or another N are refused. Worker I holds a lock of its
   own, and its own journal of finished units, from which it resumes.
2. When its share is done and durable, it signs off with a record (`WorkerRecord`): the digests of
   all that it wrote.
3. Whoever then finds the records of all N publishes, under a lock: it writes headers and small
   files, merges the digests, and commits. The others end, and say who is missing.

A worker that is started again goes on where it stopped; one that is started after the commit finds
that the checkpoint is complete.
"""
