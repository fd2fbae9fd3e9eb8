"""Smallest programs that show what XLA does with a mechanism jdelta relies on."""
