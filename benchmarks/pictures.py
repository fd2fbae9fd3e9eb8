"""The pictures of the docs.

*memory.png* is GPT-2 (unrolled, batch 8, length 512) on an H100: everything in it is simulated or
compiled ahead of time, without hardware. *rok.png* shows the rows of the study `rok`.

    python -m benchmarks.pictures
"""

from pathlib import Path

import jdelta
from benchmarks import steps
from benchmarks.device import rok
from benchmarks.study import load
from jdelta import plot

DOCS = Path(__file__).parents[1] / "docs"
TARGET = "cuda:h100"


def main() -> None:
    case = steps.build("gpt2 length 512 unrolled", remat=jdelta.remat)
    plan = jdelta.plan(case.step, 0.5, case.state, case.batch, target=TARGET, donate_argnums=0)
    print(plan)
    plot.memory(plan).savefig(DOCS / "memory.png", dpi=110)
    plot.rok(rok.points(load(rok.STUDY.file))).savefig(DOCS / "rok.png", dpi=110)


if __name__ == "__main__":
    main()
