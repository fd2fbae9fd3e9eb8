"""Plans of six training steps at four budgets on two compilers: is every promise kept?

For each step and target it plans to 80, 60, 50 and 40 % of the plain step's compiled peak, and
records what was predicted, what the real compiler says (ahead of time, no hardware), how many
compiles it took, and the floor where the budget is below it. Predicted seconds are predictions.

    python -m benchmarks.budgets --target tpu:v5e:2x2 --json results.json

A row that is already in the JSON file is not run again, so an interrupted run resumes; so
`--json benchmarks/results/budgets-tpu-v5e.json --markdown` prints the README's table.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jdelta
from benchmarks.models import build

STEPS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "batch": 32768},
    "gpt2 scanned": {"name": "gpt2", "scan": True, "batch": 8, "length": 512},
    "llama scanned": {"name": "llama-160m", "scan": True},
    "resnet50": {"name": "resnet50", "batch": 64},
    "bert-base": {"name": "bert-base", "batch": 64, "length": 128},
    "vit-b": {"name": "vit-b", "batch": 64},
    "gpt2 unrolled": {"name": "gpt2", "batch": 8, "length": 512},
}
SHARES = (0.8, 0.6, 0.5, 0.4)
TARGETS = ("tpu:v5e:2x2", "cuda:h100")


def row(step: str, target: str, share: float) -> dict[str, Any]:
    """Plan one step to one budget."""
    case = build(**STEPS[step], remat=jdelta.remat)
    start = time.perf_counter()
    record: dict[str, Any] = {"step": step, "target": target, "share": share}
    try:
        plan = jdelta.plan(
            case.step, share, case.state, case.batch, target=target, donate_argnums=0
        )
    except jdelta.BudgetError as error:
        record |= {"floor": error.floor, "error": str(error)}
    else:
        kept = sum(d is not jdelta.Decision.RECOMPUTE for d in plan.decisions.values())
        record |= {
            "budget": plan.budget,
            "predicted_peak": plan.predicted_peak,
            "compiled_peak": plan.compiled_peak,
            "host_bytes": plan.host_bytes,
            "floor": plan.floor,
            "ceiling": plan.ceiling,
            "overhead": plan.overhead,
            "step_seconds": plan.step_seconds,
            "compiles": plan.compiles,
            "kept": kept,
            "residuals": len(plan.decisions),
        }
    record |= {"seconds": time.perf_counter() - start, "jax": jax.__version__, "commit": _commit()}
    return record


def _commit() -> str:
    """The revision of jdelta that makes a row; `+` marks changes that are not committed."""
    command = ["git", "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table; sizes in MiB."""
    table = Table(title="compiled peak against budget (MiB per device)")
    for head in (
        "step",
        "target",
        "budget",
        "plain",
        "floor",
        "predicted",
        "compiled",
        "error",
        "use",
        "overhead",
        "compiles",
    ):
        table.add_column(head, justify="left" if head in ("step", "target") else "right")
    for r in rows:
        floor = f"{(r['floor'] or 0) / 2**20:.0f}"
        if "error" in r:
            cells = ["-", floor, "-", "below floor", "-", "-", "-", "-"]
        else:
            off = r["predicted_peak"] / r["compiled_peak"] - 1
            cells = [
                f"{r['ceiling'] / 2**20:.0f}",
                floor,
                f"{r['predicted_peak'] / 2**20:.0f}",
                f"{r['compiled_peak'] / 2**20:.0f}",
                f"{off:+.1%}",
                f"{r['compiled_peak'] / r['budget']:.1%}",
                f"{r['overhead'] / r['step_seconds']:.1%}",
                str(r["compiles"]),
            ]
        budget = f"{r['budget'] / 2**20:.0f}" if "budget" in r else f"{r['share']:.0%}"
        table.add_row(r["step"], r["target"], budget, *cells)
    Console(width=140).print(table)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as the README shows them: sizes in MiB, one line a step and target."""
    lines = [
        "| step | target | plain | floor | " + " | ".join(f"{s:.0%}" for s in SHARES) + " |",
        "|---|---|---|---|" + "---|" * len(SHARES),
    ]
    for step, target in dict.fromkeys((r["step"], r["target"]) for r in rows):
        group = {r["share"]: r for r in rows if (r["step"], r["target"]) == (step, target)}
        plain = next((r["ceiling"] for r in group.values() if "ceiling" in r), 0)
        floor = next(iter(group.values()))["floor"]
        cells = [_cell(group.get(share)) for share in SHARES]
        head = f"| {step} | {target} | {plain >> 20} | {floor >> 20} | "
        lines.append(head + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(r: dict[str, Any] | None) -> str:
    """Compiled peak, its prediction's error and the predicted overhead of one plan."""
    if r is None:
        return "not run"
    if "error" in r:
        return "below floor"
    off = r["predicted_peak"] / r["compiled_peak"] - 1
    return f"{r['compiled_peak'] >> 20} ({off:+.1%}, {r['overhead'] / r['step_seconds']:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", action="append", choices=STEPS, help="default: all")
    parser.add_argument("--target", action="append", help="default: " + ", ".join(TARGETS))
    parser.add_argument("--share", action="append", type=float, help="default: 0.8 0.6 0.5 0.4")
    parser.add_argument("--json", type=Path, help="file to resume from and to write all rows to")
    parser.add_argument("--markdown", action="store_true", help="print what the file has; run none")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())
    if options.markdown:
        print(markdown(rows))
        return
    done = {(r["step"], r["target"], r["share"]) for r in rows}
    todo = [
        (step, target, share)
        for target in options.target or TARGETS
        for step in options.step or STEPS
        for share in options.share or SHARES
        if (step, target, share) not in done
    ]
    with Progress() as progress:
        task = progress.add_task("planning", total=len(todo))
        for step, target, share in todo:
            progress.update(task, description=f"{step} on {target} at {share:.0%}")
            rows.append(row(step, target, share))
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
            progress.advance(task)
    show(rows)


if __name__ == "__main__":
    main()
