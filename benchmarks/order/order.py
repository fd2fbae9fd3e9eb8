"""Operator order and memory layout: jdelta against program order, a greedy planner and an ILP.

Each step is traced by its shapes, not compiled; weights are updated by Adam in place. Memory is
what the step allocates beside its arguments. Of published models operators run one by one and write
their results in full, as in PyTorch. The integer program (MODeL's form) gets `--with limit=1800`
seconds for its order alone. How time grows with the layers is told twice: in seconds, the least of
three times, and in calls of functions, which no cache makes slower.

*small* steps have the operators that XLA would fuse them to for an H100 (one by one they are too
many for the integer program): does jdelta find the best order too, where an integer program can?
"""

import cProfile
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from benchmarks import study
from benchmarks.models import Case, find, identity
from benchmarks.order import comparators
from benchmarks.study import Job, Row, Study, mib
from jdelta._src.backends.cuda import CUDA
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.order import Problem, arena, arrange, layout, places_taken, problem_of
from jdelta._src.program.graph import graph_of

MODELS = "resnet50 resnet101 bert-large t5-large vit-l gpt2-xl mixtral unet".split()
HEADS = [
    "model",
    "batch",
    "operators",
    "program, online",
    "greedy",
    "jdelta",
    "arena / peak",
    "peak / bound",
    "less than program",
    "any order, at most",
    "less than greedy",
    "seconds",
    "ILP",
]


SMALL_HEADS = [
    "model",
    "optimiser",
    "operators",
    "program order",
    "jdelta",
    "ILP",
    "proven least",
    "seconds of jdelta",
    "of the ILP",
    "times as fast",
]
SCALING = "gpt2-xl"
TRIES = 3
REPEATS = 5

STEPS = {
    f"{model} batch {batch}, Adam": {"model": model, "batch": batch}
    for batch in (1, 32)
    for model in MODELS
}
"""From a label to the arguments of `adam_step`."""

DEEPER = {
    f"{SCALING} batch 1, {times} times the layers, Adam": {
        "model": SCALING,
        "batch": 1,
        "layers": times,
    }
    for times in (2, 4, 8)
}
MLP = dataclasses.replace(find("mlp"), batch=64, width=256)
SMALL = {
    f"{label}, {optimizer}": (config, optimizer)
    for label, config in {
        "mlp, 1 layer": dataclasses.replace(MLP, layers=1),
        "unet, 1 level": dataclasses.replace(find("unet").small(), levels=1),
        "mlp, 2 layers": dataclasses.replace(MLP, layers=2),
    }.items()
    for optimizer in ("SGD", "Adam")
}
"""From a label to a model and its optimiser."""

OPTIMIZERS: dict[str, Any] = {"SGD": optax.sgd, "Adam": optax.adam}

Step = tuple[Callable[..., Any], Any]


def adam_step(model: str, batch: int, layers: int = 1) -> Step:
    """A step of a model with `layers` times its layers."""
    config = dataclasses.replace(find(model), batch=batch)
    if layers > 1:
        config = dataclasses.replace(config, layers=layers * config.layers)
    return step_of(config, optax.adam(1e-3))


def step_of(config: Any, optimizer: optax.GradientTransformation) -> Step:
    """A step of a model, with nothing marked in it."""
    return training(config.case("step", identity), optimizer)


def training(case: Case, optimizer: optax.GradientTransformation) -> Step:
    """A step without clipping, and shapes of its arguments: what is trained, then the rest."""

    def step(trained, rest):
        params, opt = trained
        state, data = rest
        loss, grads = case.grads(state._replace(params=params), data)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    trained = case.state.params, jax.eval_shape(optimizer.init, case.state.params)
    return step, (trained, (case.state._replace(params=(), opt=()), case.batch))


def problem(model: str, batch: int, layers: int = 1) -> Problem:
    """The operators of such a step, one by one."""
    return posed_by(adam_step(model, batch, layers), None)


def posed_by(step_and_args: Step, compiler: Compiler | None) -> Problem:
    """The operators of a step, its weights updated in place."""
    step, (trained, rest) = step_and_args
    graph = graph_of(jax.make_jaxpr(step)(trained, rest))
    arguments = graph.inputs[len(graph.inputs) - len(jax.tree.leaves((trained, rest))) :]
    donated = arguments[: len(jax.tree.leaves(trained))]
    return problem_of(graph, compiler, places_taken(graph, donated))


def row(step: str, limit: float = 1800) -> Row:
    """Orders one step in all ways; one of more layers, in jdelta's only.

    Args:
        step: A key of `STEPS`, `DEEPER` or `SMALL`.
        limit: Seconds that the integer program may take.
    """
    if step in SMALL:
        return small(step, limit)
    arguments = {"layers": 1, **(STEPS.get(step) or DEEPER[step])}
    posed = problem(**arguments)
    figures = {
        **arguments,
        "operators": len(posed),
        "program_peak": posed.peak(posed.program),
        **min((planned(fresh(posed)) for _ in range(TRIES)), key=seconds),
    }
    if arguments["model"] == SCALING:
        figures["calls"] = calls(posed)
    return figures if step in DEEPER else {**figures, **others(posed, limit)}


def small(step: str, limit: float) -> Row:
    """Orders one small step in both ways."""
    config, optimizer = SMALL[step]
    posed = posed_by(step_of(config, OPTIMIZERS[optimizer](1e-3)), Compiler(CUDA))
    taken = [seconds(planned(fresh(posed))) for _ in range(REPEATS)]
    arrangement = arrange(posed)
    return {
        "operators": len(posed),
        "program_peak": posed.peak(posed.program),
        "peak": arrangement.peak,
        "bound": arrangement.bound,
        "seconds": taken,
        "limit": limit,
        "ilp": dataclasses.asdict(comparators.integer_program(posed, limit)),
    }


def fresh(posed: Problem) -> Problem:
    """The same operators, without what has been remembered of them."""
    return dataclasses.replace(posed)


def planned(posed: Problem) -> Row:
    """The order of a step and its layout, and the seconds that they take."""
    start = time.perf_counter()
    arrangement = arrange(posed)
    ordered = time.perf_counter()
    offsets = layout(posed.bytes, *posed.lives(arrangement.order))
    return {
        "peak": arrangement.peak,
        "bound": arrangement.bound,
        "arena": arena(posed.bytes, offsets),
        "order_seconds": ordered - start,
        "layout_seconds": time.perf_counter() - ordered,
    }


def seconds(r: Row) -> float:
    """Seconds of order and layout."""
    return r["order_seconds"] + r["layout_seconds"]


def calls(posed: Problem) -> int:
    """How often a function, of Python's own and of NumPy's too, is called to plan a step."""
    unseen = fresh(posed)
    with cProfile.Profile() as profile:
        planned(unseen)
    return sum(entry.callcount for entry in profile.getstats())


def others(posed: Problem, limit: float) -> Row:
    """What other planners make of it."""
    start = time.perf_counter()
    order = comparators.greedy_list(posed)
    greedy = comparators.greedy_layout(posed, order)
    took = time.perf_counter() - start
    return {
        "program_online": comparators.online(posed, posed.program),
        "greedy_peak": posed.peak(order),
        "greedy_arena": greedy,
        "greedy_seconds": took,
        "ilp": dataclasses.asdict(comparators.integer_program(posed, limit)),
    }


def less(r: Row, than: str) -> float:
    """The part of another planner's memory that jdelta spares."""
    return 1 - r["arena"] / r[than]


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    ilp = r["ilp"]
    return [
        r["model"],
        str(r["batch"]),
        str(r["operators"]),
        mib(r["program_online"]),
        mib(r["greedy_arena"]),
        mib(r["arena"]),
        f"{r['arena'] / r['peak']:.4f}",
        f"{r['peak'] / r['bound']:.4f}",
        f"{less(r, 'program_online'):.1%}",
        f"{ceiling(r):.1%}",
        f"{less(r, 'greedy_arena'):.1%}",
        f"{seconds(r):.2f}",
        f"{mib(ilp['peak'])} in {ilp['seconds']:.0f} s" if ilp["peak"] else "none",
    ]


def ceiling(r: Row) -> float:
    """The most that any order could spare of the memory that program order takes."""
    return 1 - r["bound"] / r["program_online"]


def means(rows: list[Row]) -> str:
    """The mean of what is spared, over models and batches."""
    spared = [statistics.mean(less(r, k) for r in rows) for k in ("program_online", "greedy_arena")]
    most = statistics.mean(map(ceiling, rows))
    return (
        f"mean: {spared[0]:.1%} less than program order, where no order could spare more than "
        f"{most:.1%}; {spared[1]:.1%} less than greedy"
    )


def faster(r: Row) -> float:
    """How many times the seconds of jdelta the integer program took."""
    return r["ilp"]["seconds"] / statistics.median(r["seconds"])


def small_cells(r: Row) -> list[str]:
    """One line of the table; sizes in KiB."""
    ilp = r["ilp"]
    return [
        *(*r["step"].rsplit(", ", 1), str(r["operators"])),
        *(f"{size / 2**10:.1f}" if size else "none" for size in (r["program_peak"], r["peak"])),
        f"{ilp['peak'] / 2**10:.1f}" if ilp["peak"] else "none",
        "yes" if ilp["optimal"] else "no",
        f"{statistics.median(r['seconds']):.3f}",
        f"{ilp['seconds']:.0f}",
        f"{faster(r):.0f}",
    ]


def summary(rows: list[Row]) -> str:
    """In how many steps both come to the same, and how much faster jdelta is there."""
    proven = [r for r in rows if r["ilp"]["optimal"]]
    equal = sum(r["peak"] == r["ilp"]["peak"] for r in proven)
    times = f"{min(map(faster, proven)):.0f}" if proven else "-"
    return (
        f"proven least in {len(proven)} of {len(rows)}, jdelta's peak equal in {equal} of those, "
        f"at least {times} times as fast"
    )


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: published models, more of their layers, and small steps."""
    of_small = [r for r in rows if r["step"] in SMALL]
    plain = [r for r in rows if r["step"] in STEPS]
    scaled = [r for r in rows if r.get("model") == SCALING and r["batch"] == 1]
    lines = [
        [*(str(r[key]) for key in ("layers", "operators", "calls")), f"{seconds(r):.2f}"]
        for r in scaled
    ]
    heads = [f"times the layers of {SCALING}", "operators", "calls", "seconds"]
    parts = [study.table(HEADS, map(cells, plain), plain)]
    parts += [means(plain)] if plain else []
    parts += [study.table(heads, lines, scaled)]
    parts += [study.table(SMALL_HEADS, map(small_cells, of_small), of_small)]
    parts += [summary(of_small)] if of_small else []
    return study.page(parts)


def jobs(step: Sequence[str] = (*STEPS, *DEEPER, *SMALL)) -> list[Job]:
    return [Job(label) for label in step]


STUDY = Study(
    "order",
    "How much memory do jdelta's order and layout spare, beside those of other planners?",
    jobs,
    row,
    tables,
)
