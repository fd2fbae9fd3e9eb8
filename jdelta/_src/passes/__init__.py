"""A policy written into the program: one file for each pass."""
