"""A planned step: called, compiled, checked, written to a file."""
