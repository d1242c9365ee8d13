"""`python -m megtool`, and the `megtool` script."""

import sys

from megtool.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
