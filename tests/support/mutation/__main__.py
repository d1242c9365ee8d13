"""Plant single faults, and see which of them tests notice: see `sample`."""

import sys

from tests.support.mutation.sample import main

if __name__ == "__main__":
    sys.exit(main())
