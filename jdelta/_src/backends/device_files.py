"""Whether a machine has an accelerator, by what its kernel says."""

import glob


def present(*patterns: str) -> bool:
    """Whether the kernel has a device file of one of these names, as in ``"/dev/nvidia[0-9]*"``."""
    return any(glob.glob(pattern) for pattern in patterns)
