"""The table of frameworks says what is true."""

import equinox as eqx
import haiku as hk
import jax.numpy as jnp
import pytest

import jdelta
from tests import matrix
from tests.compilers import needs_cuda

EVERY = pytest.mark.parametrize(("framework", "scan", "marks"), matrix.ROWS)


def marks_of(framework, scan, marks):
    """By default a TPU's compiler is asked about one; marked layers are in `test_trainers.py`."""
    if not scan:
        return [needs_cuda]
    return [] if (framework, marks) == ("Flax NNX", "nothing marked") else [pytest.mark.full]


def written():
    return matrix.PAGE.read_text(encoding="utf-8").removeprefix(matrix.HEAD).splitlines()


def cells(*row):
    """What the page says of a form: regions, equal, fits."""
    name = matrix.line(*row, "", "", "").split(" |")[:3]
    (line,) = [text for text in written() if text.split(" |")[:3] == name]
    return [cell.strip(" |") for cell in line.split(" |")[3:6]]


def test_the_page_has_every_form_once():
    assert matrix.PAGE.read_text(encoding="utf-8").startswith(matrix.HEAD)
    assert len(written()) == len(matrix.ROWS)
    assert all(cells(*row) for row in matrix.ROWS)


@EVERY
def test_regions_and_results_are_as_written(framework, scan, marks):
    regions, equal, _ = cells(framework, scan, marks)
    assert (regions, equal) == matrix.small(framework, scan, marks)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("framework", "scan", "marks"),
    [pytest.param(*row, marks=marks_of(*row)) for row in matrix.ROWS],
)
def test_what_is_said_to_fit_fits(framework, scan, marks):
    fits = cells(framework, scan, marks)[2]
    assert matrix.large(framework, scan, marks) == "yes"
    assert fits == f"yes on `{matrix.target(scan)}`"


@pytest.mark.parametrize("module", [eqx.Module, hk.Module])
def test_classes_that_cannot_be_marked_are_refused(module):
    class Block(module):
        def __call__(self, x):
            return jnp.tanh(x)

    with pytest.raises(TypeError, match=r"Of a class of Equinox or Haiku, mark the method"):
        jdelta.remat(Block)
