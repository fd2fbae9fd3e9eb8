"""``python -m jdelta``."""

import sys

from jdelta._cli import main

if __name__ == "__main__":
    sys.exit(main())
