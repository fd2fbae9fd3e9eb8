"""The command line: ``jdelta …``, or ``python -m jdelta …``."""

from jdelta._src.cli.main import main as main
