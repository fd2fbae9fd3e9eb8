"""The picture of the README: GPT-2 (unrolled, batch 8, length 512) on an H100.

Everything in it is simulated or compiled ahead of time, without hardware.

    python -m benchmarks.pictures
"""

from pathlib import Path

import jdelta
from benchmarks.plans.budgets import STEPS
from benchmarks.models import build
from jdelta import plot

DOCS = Path(__file__).parents[1] / "docs"
TARGET = "cuda:h100"


def main() -> None:
    case = build(**STEPS["gpt2 unrolled"], remat=jdelta.remat)
    made = jdelta.plan(case.step, 0.5, case.state, case.batch, target=TARGET, donate_argnums=0)
    print(made)
    plot.memory(made).savefig(DOCS / "memory.png", dpi=110)


if __name__ == "__main__":
    main()
