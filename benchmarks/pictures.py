"""The pictures of the README and the docs: GPT-2 (unrolled, batch 8, length 512) on an H100.

Everything in them is simulated or compiled ahead of time, without hardware.

    python -m benchmarks.pictures
"""

from pathlib import Path

import jdelta
from benchmarks.budgets import STEPS
from benchmarks.models import build
from jdelta import plot

DOCS = Path(__file__).parents[1] / "docs"
TARGET = "cuda:h100"
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def main() -> None:
    case = build(**STEPS["gpt2 unrolled"], remat=jdelta.remat)
    args = case.state, case.batch
    found = jdelta.frontier(case.step, *args, budgets=BUDGETS, target=TARGET, donate_argnums=0)
    half = next(p for p in found.plans if p.compiled_peak <= 0.5 * p.ceiling)
    pictures = {
        "memory": plot.memory(half),
        "decisions": plot.decisions(half),
        "frontier": plot.frontier(found),
    }
    for name, figure in pictures.items():
        path = DOCS / f"{name}.png"
        figure.savefig(path, dpi=110)
        print(f"{path}: {half.target}, {half.compiled_peak} of {half.ceiling} bytes")


if __name__ == "__main__":
    main()
