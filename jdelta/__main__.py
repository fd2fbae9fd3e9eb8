"""``python -m jdelta``."""

import sys

from jdelta._src.cli import main

if __name__ == "__main__":
    sys.exit(main())
