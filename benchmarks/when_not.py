"""Where a plan gains little: what bounds it, what it costs, and how long planning takes.

Reads the rows of `benchmarks.budgets`; runs nothing.

    python -m benchmarks.when_not
"""

from pathlib import Path

from benchmarks import record
from benchmarks.budgets import compiled_floors
from benchmarks.record import Row

RESULTS = Path(__file__).parent / "results"
HEADS = [
    "step",
    "target",
    "least peak of plain",
    "added at 80 %",
    "least budget planned",
    "added there",
    "longest planning",
]


def cells(rows: list[Row]) -> list[str]:
    """One line: what the budgets of one step on one target came to."""
    planned = sorted((r for r in rows if r.get("compiles")), key=lambda r: r["share"])
    least, most = planned[0], planned[-1]
    at_80 = most["share"] == 0.8  # else that budget was refused
    compiled = compiled_floors(rows)
    floor = min(compiled or [r["floor"] for r in rows if r["floor"]])
    return [
        most["step"],
        most["target"],
        ("" if compiled else "~") + record.share(floor, most["plain"]),
        record.share(most["overhead"], most["step_seconds"]) if at_80 else "refused",
        f"{least['share']:.0%}",
        record.share(least["overhead"], least["step_seconds"]),
        f"{max(r['seconds'] for r in rows):.0f} s",
    ]


def markdown() -> str:
    """The table of docs/how-it-works.md."""
    files = ("budgets-cuda-h100.json", "budgets-tpu-v5e.json")
    rows = [row for name in files for row in record.load(RESULTS / name)]
    return record.table(HEADS, map(cells, record.grouped(rows).values()))


def main() -> None:
    print(markdown())


if __name__ == "__main__":
    main()
