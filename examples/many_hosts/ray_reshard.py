"""Reshard with Ray: a task per worker, each of which Ray retries by itself.

pip install ray
python examples/many_hosts/ray_reshard.py SRC DST 8
"""

from __future__ import annotations

import sys

import ray

import megtool


@ray.remote(num_cpus=8, max_retries=3)
def reshard_share(source: str, destination: str, worker: str) -> str:
    """Do one worker's share; the one that is complete last publishes the result."""
    return str(megtool.reshard(source, destination, to="torch_dist", tp=8, worker=worker))


def main(source: str, destination: str, workers: int) -> None:
    """Start all workers, and wait for them."""
    shares = [reshard_share.remote(source, destination, f"{i}/{workers}") for i in range(workers)]
    print(ray.get(shares)[-1])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
