"""Parameters that are crossed: every value by default, every combination in `pytest -m full`."""

import itertools

import pytest


def crossed(**axes):
    """Parametrises a test: `crossed(mark=MARKS, decide={"keep": keep, "drop": drop})`.

    By default the test runs once for each place of the longest axis, the others taken round and
    round, so each value of each axis is in some run. All other combinations are marked `full`.

    Args:
        **axes: From the test's arguments to their values: a list, or a dictionary by the names that
            the values have in the test's id.
    """
    named = [_named(values) for values in axes.values()]
    count = max(map(len, named))
    # Of a third axis each value stays for two runs, so that it meets both of a second one of two.
    default = {
        tuple(i // max(1, k) % len(axis) for k, axis in enumerate(named)) for i in range(count)
    }
    rows = []
    for places in itertools.product(*(range(len(axis)) for axis in named)):
        cells = [axis[place] for axis, place in zip(named, places, strict=True)]
        marks = () if places in default else pytest.mark.full
        ids = "-".join(name for name, _ in cells)
        rows.append(pytest.param(*(value for _, value in cells), id=ids, marks=marks))
    return pytest.mark.parametrize(",".join(axes), rows)


def _named(values):
    if isinstance(values, dict):
        return list(values.items())
    return [(getattr(value, "__name__", str(value)), value) for value in values]
