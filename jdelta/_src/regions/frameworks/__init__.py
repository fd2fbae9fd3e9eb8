"""Modules of Flax, Haiku and Equinox as regions, and as arguments of a step."""
