"""The command line: ``jdelta …``, or ``python -m jdelta …``."""

from jdelta._cli.main import main as main
