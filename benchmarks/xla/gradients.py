"""When does XLA:GPU compute gradients of weights, where everything in the layers is recomputed?

Every block recomputed whole, by `jax.checkpoint` and by jdelta, which ties gradients to what comes
next in the backward pass (`jdelta/_timing.py`): those of a head's weights to what the backward loop
begins with, those of a block outside of loops to what it hands on.

    python -m benchmarks.xla.gradients --json benchmarks/results/gradients.json

Results (jax 0.12.0.1, CUDA 13 plug-in) stand in docs/how-it-works.md: left alone, XLA puts off the
gradient of the head over the whole backward loop, and keeps the gradient of the logits for it.
"""

from benchmarks import programs, record
from benchmarks.budgets import SMALL
from benchmarks.models import build, checkpoint
from benchmarks.record import Row, mib
from jdelta import remat

TARGETS = ("cuda:h100",)
HEADS = ("step", "target", "jax.checkpoint", "jdelta", "less")


def row(step: str, target: str) -> Row:
    """Compile both programs."""
    by_hand = checkpoint(SMALL[step]["name"], prevent_cse=not SMALL[step].get("scan", False))
    return {
        "checkpoint": programs.traced(build(**SMALL[step], remat=by_hand), target).measured.peak,
        "jdelta": programs.recomputed(build(**SMALL[step], remat=remat), target).measured.peak,
    }


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    less = f"{1 - r['jdelta'] / r['checkpoint']:.1%}"
    return [r["step"], r["target"], mib(r["checkpoint"]), mib(r["jdelta"]), less]


def markdown(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return record.table(HEADS, map(cells, rows))


def main() -> None:
    options = record.options(record.parser(__doc__, SMALL, TARGETS), markdown)
    jobs = record.jobs(options.target or TARGETS, options.step or SMALL)
    rows = record.run(jobs, row, options.json)
    record.show("everything in the blocks recomputed: peak (MiB)", HEADS, map(cells, rows))


if __name__ == "__main__":
    main()
