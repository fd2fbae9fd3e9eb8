"""Plans of training steps at four budgets on two compilers: is every promise kept?

For each step and target it compiles the plain step, plans to 80, 60, 50 and 40 % of its peak, and
records what was predicted, what the real compiler says (ahead of time, no hardware), how many
compiles each plan took, and the floor where the budget is below it. Predicted seconds are
predictions.

    python -m benchmarks.budgets --target tpu:v5e:2x2 --json results.json

A plan that fits seldom needs the floor compiled; `--share 0.01` has all floors compiled.

`--sweep` takes 20 budgets from 5 to 100 % instead, in rising order, and says whether each plan is
within its budget and whether a larger budget ever makes a plan slower.

A row that is already in the JSON file is not run again, so an interrupted run resumes; so
`--json benchmarks/results/budgets-tpu-v5e.json --markdown` prints the table of the docs.
"""

import itertools
import statistics
import time
from typing import Any

import jdelta
from benchmarks import cases, record, steps
from benchmarks.models import build
from benchmarks.record import Row, bound, mib, share

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "batch": 32768},
    "gpt2 scanned": {"name": "gpt2", "scan": True, "batch": 8, "length": 512},
    "gpt2 bfloat16 scanned": {**steps.STEPS["gpt2 scanned"], **steps.HALF},
    "llama scanned": {"name": "llama-160m", "scan": True},
    "resnet50": {"name": "resnet50", "batch": 64},
    "bert-base": {"name": "bert-base", "batch": 64, "length": 128},
    "vit-b": {"name": "vit-b", "batch": 64},
    "gpt2 unrolled": {"name": "gpt2", "batch": 8, "length": 512},
}
"""Small relatives of the published shapes."""

LARGE = (
    *("gpt2-large scanned", "gpt2-xl scanned", "bert-large scanned", "t5-large scanned"),
    *("vit-l scanned", "resnet101"),
)
STEPS = {
    **SMALL,
    **{name: steps.STEPS[name] for name in LARGE},
    "mixtral scanned": {**steps.STEPS["mixtral scanned"], "batch": 4},
}
SHARES = (0.8, 0.6, 0.5, 0.4)
SWEEP = tuple(i / 20 for i in range(1, 21))
TARGETS = ("tpu:v5e:2x2", "cuda:h100")


def row(step: str, target: str, share: float) -> Row:
    """Plan one step to a share of the plain step's peak."""
    plain = cases.traced(build(**STEPS[step]), target).measured.peak
    case = build(**STEPS[step], remat=jdelta.remat)
    start = time.perf_counter()
    figures, _ = cases.plan(case, int(share * plain), target)
    return {"plain": plain, **figures, "seconds": time.perf_counter() - start}


HEADS = "step target budget plain floor predicted compiled error use overhead compiles".split()


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    if "error" in r:
        rest = [mib(r["plain"]), mib(r["floor"]), "-", refusal(r), *"----"]
    else:
        rest = [
            mib(r["plain"]),
            bound(r, "floor"),
            mib(r["predicted_peak"]),
            mib(r["compiled_peak"]),
            f"{r['predicted_peak'] / r['compiled_peak'] - 1:+.1%}",
            share(r["compiled_peak"], r["budget"]),
            share(r["overhead"], r["step_seconds"]),
            str(r["compiles"]),
        ]
    return [r["step"], r["target"], mib(r["budget"]), *rest]


def markdown(rows: list[Row]) -> str:
    """The rows as the docs show them: one line a step and target, sizes in MiB, or of a sweep."""
    if any(r["share"] in set(SWEEP) - set(SHARES) for r in rows):
        return record.table(VERDICT, map(verdict, record.grouped(rows).values()))
    lines: list[list[str]] = []
    for (step, target), found in record.grouped(rows).items():
        group = {r["share"]: r for r in found}
        plain = found[0]["plain"]
        compiled = compiled_floors(found)
        floor = str(min(compiled) >> 20) if compiled else "not compiled"
        cells = [_cell(group.get(share)) for share in SHARES]
        lines.append([step, target, str(plain >> 20), floor, *cells])
    heads = ["step", "target", "plain", "floor", *(f"{s:.0%}" for s in SHARES)]
    return record.table(heads, lines)


def compiled_floors(rows: list[Row]) -> list[int]:
    """The floors that were compiled, bytes."""
    return [r["floor"] for r in rows if r["floor"] and "floor" not in r.get("estimates", ())]


def _cell(r: Row | None) -> str:
    """Compiled peak, its prediction's error and the predicted overhead of one plan."""
    if r is None:
        return "not run"
    if "error" in r:
        return refusal(r)
    off = r["predicted_peak"] / r["compiled_peak"] - 1
    return f"{r['compiled_peak'] >> 20} ({off:+.1%}, {r['overhead'] / r['step_seconds']:.1%})"


def refusal(r: Row) -> str:
    """Why a row has no plan."""
    return "below floor" if r["floor"] else "over memory"


VERDICT = (
    *("step", "target", "budgets", "plans", "over budget", "slower than a smaller budget's"),
    *("97 % used, or nothing added", "error", "compiles"),
)


def verdict(group: list[Row]) -> list[str]:
    """What a sweep over the budgets of one step shows; error and compiles are medians."""
    plans = sorted((r for r in group if "error" not in r), key=lambda r: r["share"])
    over = sum(r["compiled_peak"] > r["budget"] for r in plans)
    slower = sum(b["overhead"] > a["overhead"] for a, b in itertools.pairwise(plans))
    used = sum(r["compiled_peak"] >= 0.97 * r["budget"] or not r["overhead"] for r in plans)
    error = statistics.median(abs(r["predicted_peak"] / r["compiled_peak"] - 1) for r in plans)
    compiles = statistics.median(r["compiles"] for r in plans)
    figures = (len(group), len(plans), over, slower, used, f"{error:.2%}", f"{compiles:g}")
    return [group[0]["step"], group[0]["target"], *map(str, figures)]


def main() -> None:
    parser = record.parser(__doc__, STEPS, TARGETS)
    parser.add_argument("--share", action="append", type=float, help="default: 0.8 0.6 0.5 0.4")
    parser.add_argument("--sweep", action="store_true", help="20 budgets from 5 to 100 %%")
    options = record.options(parser, markdown)
    shares = options.share or (SWEEP if options.sweep else SHARES)
    jobs = record.jobs(options.target or TARGETS, options.step or STEPS, share=shares)
    rows = record.run(jobs, row, options.json)
    record.show("compiled peak against budget (MiB per device)", HEADS, map(cells, rows))
    if options.sweep:
        record.show(
            "larger budgets, quicker plans?", VERDICT, map(verdict, record.grouped(rows).values())
        )


if __name__ == "__main__":
    main()
