"""Arrays of random numbers that cost no compile: test files make them when they are imported."""

import numpy as np


def normal(seed, *shape):
    """Numbers of a standard normal distribution, float32, the same in every process."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
