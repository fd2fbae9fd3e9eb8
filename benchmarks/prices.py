"""What is a plain step priced at as it is traced, and by what its compiler made of it?

*traced* is the roofline that plans are made with, of the program before it is compiled; *compiled*
the same rates on the instructions of the compiled one, fusions as XLA makes them. For a TPU the
second takes what the compiler leaves on the chip for free, so there the cycles that it notes on its
instructions stand beside them, at the clock that the chip's published FLOP/s need of its matrix
units. Nothing is run on a device.

    python -m benchmarks.prices --target cuda:h100 --json benchmarks/results/prices.json
"""

from benchmarks import programs, record
from benchmarks.budgets import STEPS, TARGETS
from benchmarks.models import build
from benchmarks.record import Row
from jdelta._target import resolve

HEADS = "step target traced compiled above cycles above".split()

PER_CYCLE = {"tpu:v5e:2x2": 4 * 2 * 128 * 128}
"""By target, what its four matrix units of 128 x 128 add and multiply in a cycle."""


def row(step: str, target: str) -> Row:
    """Prices the plain step.

    Args:
        step: A key of `budgets.STEPS`.
        target: Where to compile for.
    """
    program = programs.traced(build(**STEPS[step]), target)
    compiled = program.scheduled
    if not compiled:
        return {"traced": program.price.compute}
    seconds = {"traced": program.price.compute, "compiled": compiled["scheduled"]}
    if target in PER_CYCLE:
        clock = resolve(target).rates.flops("bfloat16") / PER_CYCLE[target]
        seconds["cycles"] = compiled["cycles"] / clock
    return seconds


def cells(r: Row) -> list[str]:
    """One line of the table; milliseconds, and what *traced* is above the others."""
    head = [r["step"], r["target"], f"{1e3 * r['traced']:.1f}"]
    if "compiled" not in r:
        return [*head, "refused", "", "", ""]
    for reading in ("compiled", "cycles"):
        head += _beside(r["traced"], r.get(reading))
    return head


def _beside(traced: float, seconds: float | None) -> list[str]:
    """Another reading, and what the traced program is priced at above it."""
    return [f"{1e3 * seconds:.1f}", f"{traced / seconds - 1:+.0%}"] if seconds else ["", ""]


def markdown(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return record.table(HEADS, map(cells, rows))


def main() -> None:
    options = record.options(record.parser(__doc__, STEPS, TARGETS), markdown)
    jobs = record.jobs(options.target or TARGETS, options.step or STEPS)
    rows = record.run(jobs, row, options.json)
    record.show("a plain step, as traced and as compiled (ms)", HEADS, map(cells, rows))


if __name__ == "__main__":
    main()
