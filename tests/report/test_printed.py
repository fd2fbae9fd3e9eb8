"""Printed plans: what the first line says, and how many rows and characters they take."""

import dataclasses
import importlib

import jax
import pytest

import jdelta
from jdelta import Decision
from jdelta._src.plan.record import Figures
from jdelta._src.regions.region import Grouping
from jdelta._src.report.figures import headline, in_one_line
from jdelta._src.report.printed import MOST_LINES, printed
from jdelta._src.report.rows import rows
from jdelta._src.report.terminal import aligned
from jdelta._src.spill import SpillRates
from tests import small
from tests.planning import asking

WIDTHS = (40, 60, 80, 100, 160)


@pytest.fixture(scope="module")
def plan():
    pin = {"*/cos": "recompute"}
    return jdelta.plan(small.unrolled_step, None, *small.make_args(), donate_argnums=0, pin=pin)


@pytest.fixture(scope="module")
def plain():
    return jdelta.plan(small.unrolled_step, 1.0, *small.make_args(64))


def having(plan, **figures):
    """The plan with other figures."""
    return dataclasses.replace(plan, figures=dataclasses.replace(plan.figures, **figures))


def with_many(plan, count, prefix=""):
    """The plan with so many residuals, no two of them alike."""
    first = next(r for r in plan.residuals if r.needed and not r.region_input)
    many = [
        dataclasses.replace(first, name=f"{prefix}region/v{'abcdefghij'[i % 10]}{i}x", bytes=2**20)
        for i in range(count)
    ]
    many = [dataclasses.replace(r, shape=(i + 1,)) for i, r in enumerate(many)]
    names = frozenset(r.name for r in many)
    policy = dataclasses.replace(plan.policy, saved=names, recomputed=frozenset())
    answer = dataclasses.replace(plan.answer, residuals=tuple(many), policy=policy)
    return dataclasses.replace(plan, answer=answer)


def test_a_peak_below_what_is_saved_is_explained(plan):
    """As in the on-chip memory of a TPU."""
    assert "stores only some" not in str(having(plan, compiled_peak=2**30))
    assert "stores only some" in " ".join(str(having(plan, compiled_peak=1024)).split())


def test_the_first_line_says_whether_it_fits_what_it_costs_and_what_was_compiled(plan, plain):
    half = having(plan, compiled_peak=2**20, overhead=0.047, step_seconds=1.0)
    half = asking(half, budget=2**21, target="tpu:v5e:2x2")
    count = f"compiled {plan.compiles} programs."
    cost = "+4.7 % of a step (predicted)"
    assert headline(half) == f"Fits: 1.00 MiB of 2.00 MiB on tpu:v5e:2x2, {cost}; {count}"
    moved = having(half, host_bytes=2**22, spill_bytes=2**23)
    assert f"v5e:2x2, 4.00 MiB on the host, 8.00 MiB in files, {cost};" in headline(moved)
    assert "no time is added to a step (predicted);" in headline(having(half, overhead=0.0))
    assert "+<0.1 % (predicted);" in headline(having(half, overhead=1e-9))
    assert headline(asking(half, budget=2**19)).startswith("Does not fit: 1.00 MiB of 512.0 KiB")
    assert headline(plain).startswith("Fits as it is: ")
    assert headline(plain).endswith("nothing is added to a step; compiled 1 program.")
    for one in (half, moved, plain):
        assert str(printed(one, 200)).splitlines()[0] == headline(one)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 9, 60])
@pytest.mark.parametrize("prefix", ["", "a_very_long_name_of_a_scope/of/a_model/of_theirs/"])
def test_a_printed_plan_is_as_wide_as_the_terminal_and_no_longer(plan, width, count, prefix):
    text = str(printed(with_many(plan, count, prefix), width))
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= width
    assert "Fits: " in text
    assert "compiled peak " in text


@pytest.mark.parametrize("width", WIDTHS)
def test_all_that_can_be_said_of_a_plan_fits_too(plan, width):
    """Each figure and the hint, all of them long."""
    names = tuple(f"region_{i}/a_long_name_of_a_value" for i in range(9))
    everything = having(
        with_many(plan, 60), undone=names, host_bytes=2**30, spill_bytes=2**30, code_bytes=2**20
    )
    rates = SpillRates(1e9, 1e9)
    everything = having(everything, spill_rates=rates)
    pins = tuple((f"{name}/*", Decision.SAVE) for name in names)
    spill = jdelta.Spill("/a/directory/with/a/long/name/for/what/is/spilled")
    everything = asking(
        everything, pins=pins, per_layer=False, reorder=True, solver="milp", spill=spill
    )
    result = "How. " * 60
    search = dataclasses.replace(everything.search, hint="Hint: less. " * 30, result=result)
    answer = dataclasses.replace(everything.answer, grouping=Grouping(2), updates_moved=2**20)
    everything = dataclasses.replace(everything, search=search, answer=answer)
    text = str(printed(everything, width))
    assert len(text.splitlines()) <= MOST_LINES or width == min(WIDTHS)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("How.") == 60
    for label in ("asked", "on the host", "in files", "loops", "updates", "undone", "result"):
        assert f"\n{label} " in text
    assert "Hint: less." in text


@pytest.mark.parametrize("width", WIDTHS)
def test_no_figure_of_a_row_is_cut(plan, width):
    many = with_many(plan, 9)
    residuals = tuple(dataclasses.replace(r, seconds=0.001, holding=2.0) for r in many.residuals)
    policy = dataclasses.replace(many.policy, saved=frozenset(), recomputed=many.policy.saved)
    answer = dataclasses.replace(many.answer, residuals=residuals, policy=policy)
    parts = printed(dataclasses.replace(many, answer=answer), width)
    rows_of_text = [line for line in str(parts).splitlines() if "1.00 MiB  " in line]
    assert rows_of_text
    assert all("  1.00 MiB  recompute" in line for line in rows_of_text)
    why = "costs 1 ms, saving takes 2 s"
    assert all(line.endswith(why if width > 50 else "recompute") for line in rows_of_text)


def test_a_row_that_is_too_long_goes_on_between_two_columns():
    head, body = ("name", "first size", "second size"), [("a", "1.00 MiB", "2.00 MiB")]
    assert aligned(head, body, 40) == [
        "name  first size  second size",
        "-----------------------------",
        "a     1.00 MiB    2.00 MiB",
    ]
    assert aligned(head, body, 20) == [
        "name  first size",
        "  second size",
        "----------------",
        "a     1.00 MiB",
        "  2.00 MiB",
    ]


def test_the_largest_rows_are_printed_and_what_is_left_out_is_counted(plan):
    many = with_many(plan, 60)
    sizes = {r.name: 2**23 if i % 20 == 7 else r.bytes for i, r in enumerate(many.residuals)}
    residuals = tuple(dataclasses.replace(r, bytes=sizes[r.name]) for r in many.residuals)
    many = dataclasses.replace(many, answer=dataclasses.replace(many.answer, residuals=residuals))
    text = str(printed(many, 100))
    large = [name for name, size in sizes.items() if size == 2**23]
    assert all(name in text for name in large)
    shown = sum(f"{name} " in text for name in sizes)
    size = sum(r.bytes for r in residuals if f"{r.name} " not in text) >> 20
    left = f"… and {60 - shown} more rows ({size:.2f} MiB)"
    assert f"{left}; more of them: plan.report(path)" in text


def test_equal_layers_are_one_row(plan):
    text = str(printed(plan, 100))
    assert "region_*/mlpwi" in text
    assert "×4" in text
    assert "region_2" not in text


def test_the_width_is_that_of_the_terminal(plan, monkeypatch):
    for width in (60, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert str(plan) == str(printed(plan, width))
    monkeypatch.setenv("COLUMNS", "3")
    assert str(plan) == str(printed(plan, 40))


def test_reasons_say_what_saving_spares_and_recompute_costs(plan):
    reasons = {(row.sample.region_input, row.decision): row.why for row in rows_of(plan)}
    assert reasons[False, Decision.SAVE].startswith("spares ")
    assert reasons[True, Decision.SAVE] == "input of the region"
    recomputed = [r.why for r in rows_of(plan) if r.decision is Decision.RECOMPUTE and r.matters]
    assert all(why.startswith(("costs ", "free: ")) for why in recomputed)


def rows_of(plan):
    return rows(plan.residuals, plan.decisions)


def test_the_repr_of_a_plan_and_of_its_parts_is_a_line(plan, plain):
    kept = sum(decision is Decision.SAVE for decision in plan.decisions.values())
    assert f"{kept} of {len(plan.residuals)} residuals kept, +" in repr(plan)
    assert repr(plan) == f"<jdelta.Plan: {in_one_line(plan)}>"
    assert repr(plain).endswith("on cpu, the plain step>")
    records = [getattr(plan, f.name) for f in dataclasses.fields(plan)[:5]]
    for record in (plan, plain, *records, plan.policy, plan.residuals[0], plan.jit()):
        assert len(repr(record).splitlines()) == 1
        assert len(repr(record)) < 400, type(record)
    assert isinstance(plan.figures, Figures)


def test_the_repr_of_what_makes_plans_is_a_line():
    deferred = jdelta.plan(small.step, "64MiB", target="cpu")
    assert repr(deferred) == "<jdelta.DeferredPlan: step, budget '64MiB' on cpu>"
    step = jdelta.jit(small.step)
    assert repr(step) == "<jdelta.jit step: step, all memory but 5 %, 0 plans made>"
    args = small.make_args(64)
    frontier = jdelta.frontier(small.step, *args, budgets=(1.0, "1KiB"))
    assert repr(frontier).startswith("<jdelta.Frontier: 1 plan from ")
    assert ", floor " in repr(frontier)
    assert repr(jdelta.explain_oom(small.step, *args)).startswith("<jdelta.OutOfMemory: ")
    step = jdelta.largest(lambda x: x, lambda n: (jax.numpy.ones(n),), 1 << 10)
    assert repr(step).startswith("<jdelta.Largest: size ")


def test_the_digest_of_a_policy_does_not_depend_on_how_it_is_printed(plan):
    """A policy in a checkpoint of the user's is a part of the program, and its repr is short."""
    digest = importlib.import_module("jdelta._src._jax.digest")
    saved = plan.policy
    other = dataclasses.replace(saved, saved=saved.recomputed, recomputed=saved.saved)
    values = [digest._Digests().value(p) for p in (saved, dataclasses.replace(saved), other)]
    assert values[0] == values[1] != values[2]
