"""The zoo of `tests/programs` on two compilers: is every promise kept for every step?

For each program and target, ahead of time: the peak of the plain step and that of `jax.checkpoint`
around the same regions by hand; what jdelta comes to for the peak by hand and a fiftieth more; the
plan for 60 % of the plain peak, its use of the budget, predicted overhead, compiles and seconds, of
which XLA takes a part. What is not right is named. Nothing is run on a device.

    python -m benchmarks run programs --step layers.mlp
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jdelta
from benchmarks import cases, steps, study
from benchmarks.study import Job, Row, Study, mib, share
from jdelta._src._jax.sharding import shardings_of
from jdelta._src.backends.target import resolve
from jdelta._src.program.graph import graph_of
from jdelta._src.search.summary import NEXT_IS_TOO_LARGE
from tests.programs import PROGRAMS, Program, unmarked

SHARE = 0.6
"""Of the plain step's peak: the budget of the plan."""

BAR = 1.02
"""Of the peak by hand: what jdelta has to reach."""

USED = 0.85
"""Of the budget: what a plan that adds time has to use."""

COMPILE = "/jax/core/compile/backend_compile_duration"
"""What JAX calls the seconds of a compiler."""

LARGE = tuple(name for name, program in PROGRAMS.items() if program.large)


def built(program: Program, remat: Callable[..., Any], target: str) -> cases.Program:
    """The step with something around its regions, not compiled yet."""
    assert program.large
    step, args = program.make(program.large, remat)
    where = resolve(target)
    placed = where.abstract(args)
    traced = jax.jit(step, **dict(program.options)).trace(*placed)
    graph = graph_of(traced.jaxpr, shardings_of(traced.jaxpr, placed, where.platform))
    return cases.Program(graph, lambda: traced.lower(lowering_platforms=(where.platform,)), where)


def planned(program: Program, budget: int, target: str) -> Row:
    """What becomes of a program under a budget, bytes."""
    assert program.large
    step, args = program.make(program.large, unmarked)
    begin = time.perf_counter()
    with compiling() as took:
        plan, figures = tried(step, budget, *args, target=target, **dict(program.options))
    figures |= {"seconds": time.perf_counter() - begin, "xla": sum(took)}
    if plan:
        figures["priced"] = cases.under(plan, step, *args).priced(plan.overlap).seconds
    return figures


def tried(*args: Any, **options: Any) -> tuple[jdelta.Plan | None, Row]:
    """A plan and what is known of it, or of the error where there is none."""
    try:
        plan = jdelta.plan(*args, **options)
    except jdelta.JdeltaError as error:
        floor = getattr(error, "floor", None)
        return None, {"error": type(error).__name__, "says": str(error), "floor": floor}
    except Exception as error:  # what no user should see: it is a row, too
        return None, {"error": type(error).__name__, "says": str(error), "raw": True}
    return plan, {**cases.of_plan(plan), "result": plan.result}


@contextlib.contextmanager
def compiling() -> Iterator[list[float]]:
    """Seconds of each compile, as long as the context lasts."""
    took: list[float] = []

    def add(event: str, seconds: float, **_: Any) -> None:
        if event == COMPILE:
            took.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield took
    finally:
        jax.monitoring.unregister_event_duration_listener(add)


def row(step: str, target: str) -> Row:
    """Everything about one program of the table on one target."""
    program = PROGRAMS[step]
    with program.around():
        plain = built(program, unmarked, target)
        figures: Row = {"plain": plain.measured.peak, "plain_seconds": plain.price.seconds}
        if program.units:
            hand = built(program, jax.checkpoint, target)
            figures["hand"] = {"peak": hand.measured.peak, "seconds": hand.price.seconds}
            figures["at_hand"] = planned(program, int(BAR * hand.measured.peak), target)
        figures["plan"] = planned(program, int(SHARE * plain.measured.peak), target)
    return {**figures, "failures": failures(figures)}


def failures(r: Row) -> list[str]:
    """What is not right of a row, in words."""
    return [*wrong_by_hand(r), *wrong_of_plan(r, r["plan"])]


def wrong_by_hand(r: Row) -> Iterator[str]:
    """What `jax.checkpoint` around the regions does better."""
    if "hand" not in r:
        return
    peak, at = r["hand"]["peak"], r["at_hand"]
    if at.get("raw"):
        yield f"{at['error']}: {at['says'].splitlines()[0]}"
    elif "error" in at:
        yield f"by hand {mib(peak)} MiB, here {mib(at['floor'])}"
    elif at["priced"] > BAR * r["hand"]["seconds"]:
        yield f"{at['priced'] / r['hand']['seconds']:.2f} times the time by hand"


def wrong_of_plan(r: Row, plan: Row) -> Iterator[str]:
    """What is not right of a plan, or of its refusal."""
    if plan.get("raw"):
        yield f"{plan['error']}: {plan['says'].splitlines()[0]}"
    elif "error" in plan:
        yield from wrong_of_floor(r, plan["floor"], int(SHARE * r["plain"]))
    else:
        yield from wrong_of_floor(r, plan["floor"], 0)
        if plan["compiled_peak"] > plan["budget"]:
            yield f"{mib(plan['compiled_peak'])} MiB of {mib(plan['budget'])}"
        if plan["floor"] and plan["floor"] > plan["compiled_peak"]:
            yield f"floor {mib(plan['floor'])} MiB, plan {mib(plan['compiled_peak'])}"
        if is_unused(plan):
            yield f"{used(plan)} used, {added(plan)} added"


def is_unused(plan: Row) -> bool:
    """Whether budget is left at a price, and nothing says why."""
    left = plan["compiled_peak"] < USED * plan["budget"]
    at_a_price = plan["overhead"] > 1e-3 * plan["step_seconds"]
    return left and at_a_price and NEXT_IS_TOO_LARGE not in plan["result"]


def wrong_of_floor(r: Row, floor: int | None, above: int) -> Iterator[str]:
    """What a floor may not be."""
    if floor is None:
        yield "refused without a floor"
    elif not above < floor <= r["plain"]:
        yield f"floor {mib(floor)} MiB, plain step {mib(r['plain'])}"


HEADS = (
    *("step", "target", "plain", "by hand", "here", "60 %", "used", "added", "compiles"),
    *("seconds", "XLA"),
)


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    hand, at, plan = r.get("hand"), r.get("at_hand"), r["plan"]
    by_hand = mib(hand["peak"]) if hand else "-"
    here = mib(at.get("compiled_peak", at.get("floor"))) if at else "-"
    head = [r["step"], r["target"], mib(r["plain"]), by_hand, here]
    times = [f"{plan[what]:.1f}" for what in ("seconds", "xla")]
    if "error" in plan:
        return [*head, f"floor {mib(plan.get('floor'))}", "-", "-", "-", *times]
    figures = [mib(plan["compiled_peak"]), used(plan), added(plan), str(plan["compiles"])]
    return [*head, *figures, *times]


def used(plan: Row) -> str:
    """The compiled peak as a part of the budget."""
    return share(plan["compiled_peak"], plan["budget"])


def added(plan: Row) -> str:
    """The predicted overhead as a part of the plain step."""
    return share(plan["overhead"], plan["step_seconds"])


def failed(rows: list[Row]) -> list[list[str]]:
    """One line a program, target and failure."""
    return [[r["step"], r["target"], what] for r in rows for what in r["failures"]]


def summary(rows: list[Row]) -> list[list[str]]:
    """One line a target: how many programs, and how many of them keep which promise."""
    lines: list[list[str]] = []
    for target in dict.fromkeys(r["target"] for r in rows):
        group = [r for r in rows if r["target"] == target]
        hand = [r for r in group if "hand" in r]
        reached = [r for r in hand if "error" not in r["at_hand"]]
        plans = [r["plan"] for r in group if "error" not in r["plan"]]
        figures = (
            *(len(group), len(hand), len(reached), len(plans)),
            sum(not is_unused(plan) for plan in plans),
            sum(not r["failures"] for r in group),
        )
        lines.append([target, *map(str, figures)])
    return lines


SUMMARY = (
    *("target", "programs", "with regions", "reach the peak by hand", "planned to 60 %"),
    *("use it", "all right"),
)


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: a summary, what is not right, and all of them."""
    return study.page(
        [
            study.table(SUMMARY, summary(rows), rows),
            study.markdown(("step", "target", "what is not right"), failed(rows)),
            study.table(HEADS, map(cells, rows), rows),
        ]
    )


def jobs(
    step: Sequence[str] = LARGE,
    target: Sequence[str] = steps.TWO_TARGETS,
) -> list[Job]:
    return study.product(step, target)


STUDY = Study(
    "programs",
    "Is every promise kept for every step of the zoo?",
    jobs,
    row,
    tables,
)
