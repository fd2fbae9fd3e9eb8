"""At the peak that a hand policy reaches, how much faster is the plan?

For each step, target and hand policy: the policy's own compiled peak (and a ten-thousandth more)
becomes the budget of a plan, and the seconds that both add to the plain step are compared. Both are
predicted by the same cost model: the traced program less the plain program, and copies to and from
the host as far as the compiled schedule exposes them. *plan/hand* is the plan's step over the hand
policy's by another reading: the instructions of both compiled programs, fusions as XLA makes them;
on TPUs, where nothing is offloaded, in the cycles that the compiler expects of each. The estimate
is what the plan's own items add up to. Nothing is run on a device.

    python -m benchmarks run hand_policies --step "gpt2 scanned" --target cuda:h100
"""

from collections.abc import Sequence
from typing import Any

import jdelta
from benchmarks import cases, policies, steps, study
from benchmarks.study import Job, Row, Study, mib, share

HEADS = (
    "step target policy peak host overhead plan/peak plan/host plan/overhead plan/hand estimate"
).split()


def row(step: str, target: str, policy: str, **options: Any) -> Row:
    """Compares one hand policy with the plan for its peak.

    Args:
        step: A key of `steps.STEPS`.
        target: Where to compile for.
        policy: A key of `policies.POLICIES`.
        **options: Arguments of `models.build` in place of the step's own.
    """
    hand = policies.program(policy, step, target, **options)
    if isinstance(hand, str):
        return {"skipped": hand}
    case = steps.build(step, remat=jdelta.remat, **options)
    planned, plan = cases.plan(case, policies.same_peak(hand), target)
    if plan:
        planned |= cases.planned(case, plan).scheduled
    return {
        "plain_seconds": policies.plain(step, target, **options).price.seconds,
        "hand": {**hand.figures(), **hand.scheduled},
        "plan": planned,
    }


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB, overheads in percent of the plain step."""
    head = [r["step"], r["target"], r["policy"]]
    if "skipped" in r:
        return [*head, r["skipped"]]
    plain, hand, plan = r["plain_seconds"], r["hand"], r["plan"]
    added = share(hand["price"]["seconds"] - plain, plain)
    head += [mib(hand["peak"]), mib(hand["host"]), added]
    if "error" in plan:
        return [*head, f"floor {mib(plan['floor'])}"]
    return [
        *head,
        mib(plan["compiled_peak"]),
        mib(plan["host_bytes"]),
        share(plan["price"]["seconds"] - plain, plain),
        ratio(plan, hand),
        share(plan["overhead"], plan["step_seconds"]),
    ]


def ratio(plan: Row, hand: Row) -> str:
    """What the plan's compiled instructions take, over what the hand policy's do."""
    if not hand.get("scheduled"):
        return "refused"
    unit = "cycles" if hand.get("cycles") and not hand["host"] else "scheduled"
    return f"{plan[unit] / hand[unit]:.3f}x"


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(
    step: Sequence[str] = steps.PUBLISHED,
    target: Sequence[str] = steps.FOUR_TARGETS,
    policy: Sequence[str] = tuple(policies.POLICIES),
) -> list[Job]:
    return study.product(step, target, policy=policy)


STUDY = Study(
    "hand_policies",
    "At the peak that a hand policy reaches, how much faster is the plan?",
    jobs,
    row,
    tables,
)
