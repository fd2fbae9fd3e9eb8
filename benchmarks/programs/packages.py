"""Steps of packages that nobody here wrote, unmarked: are they planned, right, and in time?

On the CPU each step runs plain, with everything recomputed and at half of its peak, and all that
comes out is compared. For compilers of accelerators it is planned to 60 % of its peak. Needs
`benchmarks/programs/packages-requirements.txt`; by hand, not a part of the tests.
"""

import importlib.metadata
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

import jdelta
from benchmarks import study
from benchmarks.programs.package_steps import BUILDERS, PackageStep
from benchmarks.study import Job, Row, Study, mib
from jdelta._src.backends.target import resolve

TARGETS = ("cpu", "tpu:v5e:2x2", "cuda:h100")
RIGHT = 1e-4
"""Largest difference of a value from the plain step's, of the largest there, that is rounding."""

CPU_HEADS = ["package's step", "version", "jax", "recomputed", "at half its peak", "plan / jit"]
OTHER_HEADS = [
    *("package's step", "target", "plain", "budget", "peak", "plan / compile"),
    *("names", "with a path", "longest", "roots twice"),
]


def row(step: str, target: str) -> Row:
    """Everything known of one step on one target; "error" where the step itself does not run."""
    warnings.simplefilter("ignore")  # those of the packages
    builder = BUILDERS[step]
    try:
        version = importlib.metadata.version(builder.distribution)
        package_step = builder.build()
        seconds, plain = timed(lambda: compiled(package_step, target))
    except Exception as error:  # not jdelta's: the row says what it was
        return {"version": "", "error": said(error)}
    figures = {"version": version, "plain_seconds": seconds}
    if target == "cpu":
        results = jax.tree.map(np.asarray, leaves(plain(*own(package_step.args))))
        checked = {
            name: right(package_step, results, **options) for name, options in CHECKED.items()
        }
        return {**figures, **checked}
    return {**figures, **planned(package_step, target)}


CHECKED: dict[str, dict[str, Any]] = {
    "recomputed": {"pin": {"*": "recompute"}},
    "half": {"budget": 0.5},
}
"""By the key of a row, what a step is planned with on the CPU."""


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def compiled(step: PackageStep, target: str) -> Any:
    """The plain step, compiled for a target."""
    where = resolve(target)
    args = step.args if target == "cpu" else where.abstract(step.args)
    return step.jit(step.fun).trace(*args).lower(lowering_platforms=(where.platform,)).compile()


def own(args: Any) -> Any:
    """Copies of arguments, which a step may keep."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args)


def leaves(tree: Any) -> list[Any]:
    """The arrays of a result, keys as their words."""
    arrays = jax.tree.leaves(tree)
    return [jax.random.key_data(x) if is_key(x) else x for x in arrays]


def is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def right(step: PackageStep, expected: list[Any], budget: Any = None, **options: Any) -> Row:
    """A plan for the CPU, and the largest difference of what it gives from the plain step's."""
    try:
        seconds, plan = timed(lambda: jdelta.plan(step.fun, budget, *step.args, **options))
        results = jax.tree.map(np.asarray, leaves(plan.jit()(*own(step.args))))
    except jdelta.BudgetError as error:
        return {"floor": error.floor, "error": said(error)}
    except Exception as error:  # what the table is for
        return {"failure": said(error)}
    return {
        "plan_seconds": seconds,
        "difference": max(map(difference, expected, results), default=0.0),
        "residuals": len(plan.decisions),
        "share": plan.compiled_peak / plan.ceiling if plan.ceiling else None,
    }


def difference(a: Any, b: Any) -> float:
    """Of two arrays, relative to the largest value."""
    a, b = (np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64) for x in (a, b))
    if a.size == 0:
        return 0.0
    return float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6))


def planned(step: PackageStep, target: str) -> Row:
    """A plan to 60 % of the plain peak for a device that is not here."""
    try:
        seconds, plan = timed(lambda: jdelta.plan(step.fun, 0.6, *step.args, target=target))
    except jdelta.BudgetError as error:
        return {"floor": error.floor, "refused": said(error)}
    except Exception as error:
        return {"failure": said(error)}
    return {
        "plan_seconds": seconds,
        "budget": plan.budget,
        "peak": plan.compiled_peak,
        "ceiling": plan.ceiling,
        **names(plan.decisions),
    }


def names(residuals: Iterable[str]) -> Row:
    """How many names there are, with a module's path, with their first parts twice, the longest."""
    all_names = list(residuals)
    return {
        "names": len(all_names),
        "paths": sum(not re.match(r"(unit|region)_\d+/[^/]+$", name) for name in all_names),
        "twice": sum(map(begins_twice, all_names)),
        "longest": max(all_names, key=len, default=""),
    }


def begins_twice(name: str) -> bool:
    """Whether the first parts of a name come a second time right after."""
    parts = name.split("/")
    return any(parts[:n] == parts[n : 2 * n] for n in range(1, len(parts) // 2 + 1))


def on_cpu(r: Row) -> list[str]:
    """One line of the first table."""
    head = [r["step"], r["version"], r["jax"]]
    if "error" in r:
        return [*head, r["error"], "", ""]
    half = r["half"]
    times = [f"{half[k]:.0f}" for k in ("plan_seconds",) if k in half] or ["-"]
    return [
        *head,
        verdict(r["recomputed"]),
        verdict(half),
        f"{times[0]} / {r['plain_seconds']:.0f}",
    ]


def verdict(r: Row) -> str:
    """What became of a step on the CPU."""
    if "failure" in r:
        return f"**fails**: {r['failure']}"
    if "error" in r:
        return f"below its floor ({mib(r['floor'])} MiB)"
    equal = "equal" if r["difference"] <= RIGHT else f"**differs by {r['difference']:.0e}**"
    return f"{equal}, {r['residuals']} values"


def elsewhere(r: Row) -> list[str]:
    """One line of the second table; sizes in MiB, times in seconds."""
    head = [r["step"], r["target"]]
    rest = len(OTHER_HEADS) - len(head) - 1
    if wrong := r.get("error") or r.get("failure"):
        return [*head, f"**fails**: {wrong}", *[""] * rest]
    if "refused" in r:
        return [*head, f"below its floor ({mib(r['floor'])} MiB)", *[""] * rest]
    share = f"{r['paths'] / r['names']:.0%}" if r["names"] else "-"
    times = f"{r['plan_seconds']:.0f} / {r['plain_seconds']:.0f}"
    sizes = [f"{r[key] / 2**20:.1f}" for key in ("ceiling", "budget", "peak")]
    return [*head, *sizes, times, str(r["names"]), share, str(len(r["longest"])), str(r["twice"])]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    here = [r for r in rows if r["target"] == "cpu"]
    others = [r for r in rows if r["target"] != "cpu"]
    return study.page(
        [
            study.table(CPU_HEADS, map(on_cpu, here), here),
            study.table(OTHER_HEADS, map(elsewhere, others), others),
        ]
    )


def jobs(
    step: Sequence[str] = tuple(BUILDERS),
    target: Sequence[str] = TARGETS,
) -> list[Job]:
    return study.product(step, target)


STUDY = Study(
    "packages",
    "Are steps of packages that nobody here wrote planned, right, and in time?",
    jobs,
    row,
    tables,
)
