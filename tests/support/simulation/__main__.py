"""Run seeded histories from the command line: see `runs`."""

import sys

from tests.support.simulation.runs import main

if __name__ == "__main__":
    sys.exit(main())
