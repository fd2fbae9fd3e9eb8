"""The table of frameworks in `docs/results/frameworks.md`: `python -m tests.matrix` writes it."""

import functools
from pathlib import Path

import jax
import numpy as np

import jdelta
from benchmarks.models import identity
from tests.frameworks import FORMS, LAYERS, STEPS
from tests.planning import planned, under

PAGE = Path(__file__).parent.parent / "docs" / "results" / "frameworks.md"
MARKS = {"marked": jdelta.remat, "nothing marked": identity}
ROWS = [
    (framework, scan, marks)
    for framework, scan in FORMS
    if framework != "U-Net"  # no framework of its own
    for marks in MARKS
]
SHARE = 0.7

HEAD = f"""# Frameworks

**In every framework, with layers unrolled and scanned, marked and not, a plan gives the numbers of
the plain step and takes the memory that was asked for.**

What the tests check of one network of {LAYERS} residual blocks in each framework
(`tests/frameworks.py`), with its blocks marked by `jdelta.remat` and with nothing marked. Written
by `python -m tests.matrix`; `tests/steps/test_matrix.py` fails where it is not true.

- *regions*: how many regions the plan decides about.
- *equal*: under a plan that keeps 40 % of the residuals' bytes, new parameters and loss equal those
  of the plain step.
- *fits*: the peak of the program compiled for the target is within {SHARE:.0%} of the plain step's,
  and something is recomputed.

How blocks are marked: a function of arrays or pytrees with `@jdelta.remat` (plain JAX; in Haiku it
may make parameters and draw keys inside), a module class with `jdelta.remat(Block)` or
`@jdelta.remat` (Linen, NNX), the method that computes with `@jdelta.remat` (Equinox). A class of
Equinox or Haiku is refused, with an error that says so.

| framework | layers | blocks | regions | equal | fits |
|---|---|---|---|---|---|
"""


def target(scan):
    """Unrolled layers take the TPU's compiler minutes, the GPU's seconds."""
    return "tpu:v5e:2x2" if scan else "cuda:h100"


@functools.cache
def of_plain_step(framework, scan):
    """What it gives, whichever marks another has."""
    step, args = STEPS[framework](64, 32, scan=scan)
    return jax.tree.leaves(jax.jit(step)(*args))


def small(framework, scan, marks):
    """The step's regions, and whether its results under a plan equal the plain step's."""
    step, args = STEPS[framework](64, 32, scan=scan, remat=MARKS[marks])
    step_trace, decisions = planned(step, 0.4, *args)
    assert step_trace.automatic == (MARKS[marks] is identity)
    got = jax.tree.leaves(jax.jit(under(step_trace, decisions, step))(*args))
    pairs = zip(got, of_plain_step(framework, scan), strict=True)
    same = all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
    dropped = jdelta.Decision.RECOMPUTE in decisions.values()
    kept = jdelta.Decision.SAVE in decisions.values()
    return regions(step_trace), "yes" if same and dropped and kept else "no"


def regions(step_trace):
    """How many there are, and how often one in a loop runs."""
    (times,) = {region.nest.trips for region in step_trace.regions}
    count = len(step_trace.regions)
    return str(count) if times == 1 else f"{count} in a loop of {times}"


def large(framework, scan, marks):
    """Whether the plan for a share of the plain step's peak holds in the compiled program."""
    step, args = STEPS[framework](32768, 512, scan=scan, remat=MARKS[marks])
    plan = jdelta.plan(step, SHARE, *args, target=target(scan), donate_argnums=0)
    fits = plan.compiled_peak <= plan.budget < plan.ceiling
    return "yes" if fits and jdelta.Decision.RECOMPUTE in plan.decisions.values() else "no"


def line(framework, scan, marks, count, equal, fits):
    """One row of the table."""
    layers = "scanned" if scan else "unrolled"
    return f"| {framework} | {layers} | {marks} | {count} | {equal} | {fits} on `{target(scan)}` |"


if __name__ == "__main__":
    lines: list[str] = []
    for row in ROWS:
        lines.append(line(*row, *small(*row), large(*row)))
        print(lines[-1], flush=True)
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
