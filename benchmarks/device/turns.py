"""Programs of one step on an attached GPU, timed in turns: hand policies, plans, transfers.

*policies*: each hand policy, and the plan for the peak that it compiles to ahead of time. *to hand*
is the median, over the rounds, of what the plan took to what its policy took in the same round.
Root L is left out: its state has another shape.

*transfers*: everything recomputed but the queries, which are kept on the device, or on the host.
Both compute the same, so what the second takes more is what its transfers expose; they are *hidden*
as far as that is less than they take alone, at the rates of the link that jdelta measured there.
*read* is what it reads off the schedule: milliseconds, and what is hidden. *with graphs* is
compiled with CUDA graphs too, *as XLA would* with no options, unlike a plan that offloads.

Plans are made before, on a machine without the GPU, and loaded there. All programs of a step go on
from one state, each once in a round; *loss* is that of each one's first step from the same state.

    python -m benchmarks run turns --ahead cuda:h200 --with plans=plans
    python -m benchmarks run turns --with plans=plans --json FILE

FILE is benchmarks/results/turns-KIND.json, one for each kind of device.
"""

import dataclasses
import re
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jdelta
from benchmarks import cases, policies, steps, study
from benchmarks.compilers import offload
from benchmarks.device import device
from benchmarks.study import Job, Row, Study, mib, share
from jdelta._src.backends.target import attached, resolve
from jdelta._src.hlo.measure import measure

ROUNDS = 20
AT_ONCE = 12
"""Programs that are compiled at once."""
PLAN = "plan as "
KEPT, AWAY = "kept", "on the host"
WITHOUT = {
    "with graphs": ("xla_gpu_enable_command_buffer",),
    "as XLA would": (
        "xla_gpu_enable_command_buffer",
        "xla_gpu_enable_latency_hiding_scheduler",
    ),
}
"""What of a plan's own options is left away."""
TRANSFERS = tuple(step for step in offload.STEPS if step != "llama3-8b scanned")
"""The steps whose queries move, but for one whose state is too large to have a copy beside it."""
POLICIES = ("gpt2 scanned", "llama scanned")
VARIANTS = {
    "policies": ("plain", *(v for p in policies.POLICIES if p != "sqrt" for v in (p, PLAN + p))),
    "transfers": (KEPT, AWAY),
}
HEADS = {
    "policies": "step variant peak host median read to-hand".split(),
    "transfers": "step variant peak host median read transfers hidden read-hidden".split(),
}


def file(plans: Path, step: str, variant: str) -> Path:
    """Where the plan of a variant is."""
    return plans / (re.sub(r"\W+", "-", f"{step} {variant}") + ".json")


def make_plans(what: str, step: str, target: str, plans: Path, **options: Any) -> Row:
    """Makes the plans of a step for a target, and keeps them in the folder.

    `options` are arguments of `models.build` in place of the step's own, here and below.
    """
    make = {"policies": as_by_hand, "transfers": pinned}[what]
    row: Row = {}
    for variant, plan in make(step, target, **options):
        if plan:
            plan.save(str(file(plans, step, variant)))
            row[variant] = cases.of_plan(plan)
    return row


def pinned(step: str, target: str, **options: Any) -> Iterator[tuple[str, jdelta.Plan]]:
    """The plans that have the queries on the device, and on the host."""
    for variant, decision in ((KEPT, "save"), (AWAY, "offload")):
        yield variant, offload.queries(step, target, decision, **options)


def as_by_hand(step: str, target: str, **options: Any) -> Iterator[tuple[str, jdelta.Plan | None]]:
    """The plans for the peaks of the hand policies."""
    case = steps.build(step, remat=jdelta.remat, **options)
    for variant in VARIANTS["policies"]:
        policy = variant.removeprefix(PLAN)
        if policy == variant:
            continue
        hand = policies.program(policy, step, target, **options)
        if not isinstance(hand, str):
            yield variant, cases.plan(case, policies.same_peak(hand), target)[1]


def lowered(
    what: str, step: str, target: str, plans: Path, **options: Any
) -> Iterator[tuple[str, tuple[jax.stages.Lowered, cases.Program]]]:
    """The programs of a step, of those under plans the ones whose files are there."""
    case, where = steps.build(step, remat=jdelta.remat, **options), resolve(target)
    state, batch = where.abstract((case.state, case.batch))
    case = dataclasses.replace(case, state=state, batch=batch)
    for variant in VARIANTS[what]:
        if what == "policies" and not variant.startswith(PLAN):
            program = policies.variant(variant, step, target, **options)
            if isinstance(program, str):
                continue
        elif file(plans, step, variant).exists():
            program = cases.planned(case, loaded(file(plans, step, variant)))
        else:
            continue
        low = program.lower()
        yield variant, (low, program)
        for other, left_away in WITHOUT.items() if variant == AWAY else ():
            left = {k: v for k, v in program.options.items() if k not in left_away}
            yield other, (low, dataclasses.replace(program, options=left))


def loaded(path: Path) -> jdelta.Plan:
    """A plan from a file.

    Raises:
        TargetError: It was made for another device than the attached one.
    """
    plan = jdelta.load(str(path))
    if not attached(plan.target):
        raise jdelta.TargetError(
            f"{path} was made for {plan.target}, which is not attached to this machine; make plans "
            "for the device that is, with --ahead"
        )
    return plan


def compiled(low: jax.stages.Lowered, program: cases.Program) -> tuple[Any, Row]:
    """A program that can be called (None if it does not fit), and what the compiler says of it."""
    call, measurement = measure(low, program.target, program.options, executable=True)
    return call, {
        "compiled_peak": measurement.peak,
        "host_bytes": measurement.host,
        "scheduled": measurement.overlap.seconds,
        "transfers": measurement.overlap.seconds_out + measurement.overlap.seconds_in,
        "hidden": measurement.overlap.hidden,
    }


def row(
    what: str, step: str, target: str, plans: Path, rounds: int = ROUNDS, **options: Any
) -> Row:
    """Compiles the programs of a step and times them in turns.

    Args:
        what: "policies" or "transfers".
        step: A key of `steps.STEPS`.
        target: Name of the attached device.
        plans: The folder of plans.
        rounds: Times taken of each program, after warm-up.
        **options: Arguments of `models.build` in place of the step's own.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {
            variant: pool.submit(compiled, *arguments)
            for variant, arguments in lowered(what, step, target, plans, **options)
        }
    ready = {variant: job.result() for variant, job in jobs.items()}
    calls = {variant: call for variant, (call, _) in ready.items() if call}
    timed = in_turns(calls, *steps.build(step, remat=jdelta.remat, **options).init(0), rounds)
    programs = [{"variant": v, **figures, **timed.get(v, {})} for v, (_, figures) in ready.items()]
    return {"device": jax.devices()[0].device_kind, "programs": programs}


def in_turns(calls: dict[str, Any], state: Any, batch: Any, rounds: int) -> dict[str, Row]:
    """Raw seconds of each program, and the loss of its first step."""
    timings: dict[str, Row] = {}
    for variant, call in calls.items():
        _, metrics = call(jax.tree.map(jnp.copy, state), batch)
        timings[variant] = {"loss": float(metrics["loss"]), "seconds": []}
    for turn in range(device.WARMUP + rounds):
        for variant, call in calls.items():
            taken, (state, _) = device.seconds(lambda call=call, state=state: call(state, batch))
            if turn >= device.WARMUP:
                timings[variant]["seconds"].append(taken)
    return timings


def cells(r: Row, entry: Row) -> list[str]:
    """One line of the table; sizes in MiB, times in milliseconds."""
    head = [r["step"], entry["variant"]]
    if "seconds" not in entry:
        return [*head, "did not fit"]
    by_variant = {f["variant"]: f for f in r["programs"]}
    sizes = mib(entry["compiled_peak"]), mib(entry["host_bytes"])
    times = f"{1e3 * statistics.median(entry['seconds']):.2f}", f"{1e3 * entry['scheduled']:.2f}"
    if r["what"] == "policies":
        beside = by_variant.get(entry["variant"].removeprefix(PLAN), entry)
        quotient = "" if beside is entry else f"{ratio(entry, beside):.3f}"
        return [*head, *sizes, *times, quotient]
    if not entry["transfers"]:
        return [*head, *sizes, *times, "", "", ""]
    added = statistics.median(a - b for a, b in pairs(entry, by_variant[KEPT]))
    hidden = 1 - added / entry["transfers"]
    return [
        *head,
        *sizes,
        *times,
        f"{1e3 * entry['transfers']:.2f}",
        f"{hidden:.0%}",
        share(entry["hidden"], 1.0),
    ]


def pairs(a: Row, b: Row) -> Iterator[tuple[float, float]]:
    """The seconds of two programs in each round."""
    return zip(a["seconds"], b["seconds"], strict=True)


def ratio(a: Row, b: Row) -> float:
    """What one program takes to what the other does, in the median round."""
    return statistics.median(x / y for x, y in pairs(a, b))


def tables(rows: list[Row]) -> str:
    """The tables as the docs show them."""
    of = {what: [r for r in rows if r["what"] == what] for what in HEADS}
    return study.page(
        study.table(HEADS[what], [cells(r, f) for r in group for f in r["programs"]], group)
        for what, group in of.items()
    )


def run(step: str, what: str, ahead: str | None = None, plans: str = "plans") -> Row | list[Row]:
    """Times the programs of a step; or makes their plans for a target, which gives no row."""
    folder = Path(plans)
    if ahead:
        folder.mkdir(parents=True, exist_ok=True)
        make_plans(what, step, ahead, folder)
        return []
    device.attached("gpu")
    return row(what, step, resolve(args=jnp.zeros(())).name, folder)


def jobs(
    step: Sequence[str] = (*POLICIES, *TRANSFERS),
    what: Sequence[str] = tuple(HEADS),
    ahead: Sequence[str | None] = (None,),
) -> list[Job]:
    """With `ahead` the plans that the other jobs need."""
    having = {"policies": POLICIES, "transfers": TRANSFERS}
    return [
        Job(s, {"what": w, **({"ahead": target} if target else {})})
        for w in what
        for s in step
        if s in having[w]
        for target in ahead
    ]


STUDY = Study(
    "turns",
    "On one GPU, in turns: is a plan quicker than its hand policy, and do transfers hide?",
    jobs,
    run,
    tables,
)
