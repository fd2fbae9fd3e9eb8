"""A module that fails as it is imported, with an error that argparse catches where it can."""

raise ValueError("of the module itself")
