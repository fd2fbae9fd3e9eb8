"""The largest batch that the compiler accepts in a target's memory: plain, by hand, planned.

The batch doubles, from the step's own if that fits, until the program does not fit, then is
bisected until the bracket is within 1 in 32. A program fits if the compiler accepts it, its peak is
at most the memory, which `--memory` caps, and what it offloads fits into host memory. Methods:
"plain"; "hand" (the best of the hand policies that suit the step); "found" (jdelta at any predicted
overhead, with regions that it finds); "found 10%" (at no more than 10 % of the plain step);
"marked" and "marked 10%" (the same with the regions that the model marks). What a plan adds are
predicted seconds: of the instructions of both compiled programs, the plan's and the plain step's of
the same batch. Where the compiler refuses the plain step, both are priced as they are traced.

    python -m benchmarks run max_batch --step resnet50 --target cuda:h100 --memory 8GiB
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import cases, policies, steps, study
from benchmarks.study import Job, Row, Study
from jdelta._src.api.largest import bisected
from jdelta._src.backends.target import resolve
from jdelta._src.sizes import parse_budget

STEPS = (
    "resnet50",
    "resnet101",
    "gpt2-large scanned",
    "gpt2-large unrolled",
    "gpt2-xl scanned",
    "gpt2-xl unrolled",
)
PLANS: dict[str, tuple[str, float | None]] = {
    "found 10%": ("found", 0.1),
    "found": ("found", None),
    "marked 10%": ("marked", 0.1),
    "marked": ("marked", None),
}
"""By method, whose regions a plan has and what part of the plain step's time it may add."""

METHODS = ("plain", "hand", *PLANS)
HEADS = ["step", "target", "memory", "method", "batch", "over plain", "added"]


def row(step: str, target: str, method: str, memory: str | None = None, **options: Any) -> Row:
    """Finds the largest batch by one method.

    Args:
        step: A key of `steps.STEPS`.
        target: Where to compile for.
        method: One of `METHODS`.
        memory: Bytes that the program may take; default: what the target has.
        **options: Arguments of `models.build` in place of the step's own.
    """
    room = resolve(target).memory
    if memory:
        room = min(room, parse_budget(memory).bytes or room)
    attempts: list[Row] = []
    best, own = 0, len(jax.tree.leaves(steps.build(step, **options).batch)[0])
    for way in ways(method, step, target, **options):

        def fits(batch: int, way: Callable[..., Row] = way) -> bool:
            attempt = way(step, target, room, **{**options, "batch": batch})
            attempts.append({"batch": batch, **attempt})
            return attempt["fits"]

        best = bisected(fits, best or (own if fits(own) else 0))
    return {"room": room, "batch": best, "attempts": attempts}


def ways(method: str, step: str, target: str, **options: Any) -> list[Callable[..., Row]]:
    """What a method may try."""
    if method == "plain":
        return [plain]
    if method in PLANS:
        regions, limit = PLANS[method]
        return [functools.partial(plan, regions=regions, limit=limit)]
    program = cases.traced(steps.build(step, **options), target)
    return [
        functools.partial(hand, policy=policy)
        for policy in policies.POLICIES
        if not policies.refusal(policy, step, program.names(), program.target.offload_refusal)
    ]


def plain(step: str, target: str, room: int, **options: Any) -> Row:
    """Tries the plain step."""
    return _tried(cases.traced(steps.build(step, **options), target), room)


def hand(step: str, target: str, room: int, *, policy: str, **options: Any) -> Row:
    """Tries a hand policy."""
    program = cases.traced(policies.build(policy, step, **options), target)
    return {"policy": policy, **_tried(program, room)}


def _tried(program: cases.Program, room: int) -> Row:
    measured, host_room = program.measured, program.target.host_memory
    fits = not measured.refused and measured.peak <= room
    fits = fits and (host_room is None or measured.host <= host_room)
    return {"fits": fits, "peak": measured.peak, "host": measured.host}


def plan(
    step: str, target: str, room: int, *, regions: str, limit: float | None, **options: Any
) -> Row:
    """Tries a plan, whose predicted overhead may be `limit` of the plain step."""
    case = steps.build(step, remat=steps.REGIONS[regions], **options)
    figures, plan = cases.plan(case, room, target)
    if plan is None:
        return {"fits": False, "plan": figures}
    added = 0.0
    if plan.policy is not None:
        plain = cases.traced(steps.build(step, **options), target)
        added = cases.planned(case, plan).added(plain)
    return {"fits": limit is None or added <= limit, "added": added, "plan": figures}


def cells(r: Row, rows: list[Row]) -> list[str]:
    """One line of the table."""
    group = ("step", "target", "memory")
    base = (o["batch"] for o in rows if o["method"] == "plain" and all(o[k] == r[k] for k in group))
    times = next((f"{r['batch'] / b:.2f}x" for b in base if b), "-")
    best = next((a for a in r["attempts"] if a["fits"] and a["batch"] == r["batch"]), {})
    added = f"{best['added']:.1%}" if "added" in best else best.get("policy", "")
    room = f"{r['room'] / 2**30:.1f} GiB"
    return [r["step"], r["target"], room, r["method"], str(r["batch"]), times, added]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, (cells(r, rows) for r in rows), rows)


def jobs(
    step: Sequence[str] = STEPS,
    target: Sequence[str] = steps.TWO_TARGETS,
    method: Sequence[str] = METHODS,
    memory: Sequence[str | None] = (None,),
) -> list[Job]:
    return study.product(step, target, method=method, memory=memory)


STUDY = Study(
    "max_batch",
    "How large a batch fits into a target's memory: plain, by hand, planned?",
    jobs,
    row,
    tables,
)
