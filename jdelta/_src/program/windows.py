"""Windows that slide over an axis, as convolutions and pooling have them."""

import functools

import numpy as np


@functools.lru_cache(maxsize=1024)
def taps_inside(
    size: int,
    taps: int,
    outputs: int,
    *,
    stride: int = 1,
    dilation: int = 1,
    spacing: int = 1,
    padding: int = 0,
) -> int:
    """Pairs of an output position and a tap of its window that meet an element of the input.

    The others meet padding, or a gap between dilated elements, and cost nothing: of a window of 3
    over 32 elements with padding 1 on both sides ("SAME"), 94 of 96 pairs count.

    Args:
        size: Elements of the input along the axis.
        taps: Elements of the window.
        outputs: Positions of the window.
        stride: From one position to the next.
        dilation: From one element of the input to the next (``lhs_dilation``).
        spacing: From one tap to the next (``rhs_dilation``).
        padding: In front of the first element.
    """
    place = np.arange(outputs)[:, None] * stride + np.arange(taps) * spacing - padding
    inside = (place >= 0) & (place <= (size - 1) * dilation)
    return int((inside & (place % dilation == 0)).sum())
