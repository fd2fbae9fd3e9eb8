"""Pictures of plans: their data, the page in a browser, and figures for files."""

import dataclasses
import html
import itertools
import json
import re
import shutil
import subprocess

import jax
import pytest

import jdelta
from jdelta import Decision
from jdelta._src.program.graph import labels
from jdelta._src.report.printed import printed
from jdelta._src.report.terminal import WIDTH
from jdelta._src.sizes import format_bytes
from tests import small

plot = pytest.importorskip("jdelta.plot", reason="needs matplotlib")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def plan():
    pin = {"*/cos": "recompute"}
    return jdelta.plan(small.unrolled_step, None, *small.make_args(), donate_argnums=0, pin=pin)


@pytest.fixture(scope="module")
def others():
    pin = {"*": "recompute"}
    by_hand = jdelta.plan(small.unrolled_step, None, *small.make_args(), donate_argnums=0, pin=pin)
    return {"by hand": by_hand}


@pytest.fixture
def page(plan, others, tmp_path):
    path = tmp_path / "page.html"
    plan.report(str(path), others=others, rok=runs())
    return path


def data_of(text):
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(match[1])


def test_the_timeline_is_that_of_the_simulation_at_the_compiled_scale(plan):
    picture = plan.picture()
    for line in (picture.plain, picture.planned):
        for before, after in itertools.pairwise(line):
            assert after.start == pytest.approx(before.start + before.seconds)
    assert max(m.bytes for m in picture.planned) == pytest.approx(plan.compiled_peak, rel=0.01)
    names = {name for m in picture.plain for name, _ in m.alive}
    assert {"region_0/sin", "region_1/sin"} <= names


def test_a_loop_is_drawn_over_all_its_iterations():
    plan = jdelta.plan(small.step, 0.5, *small.make_args(), donate_argnums=0)
    plain, planned = plan.picture().plain, plan.picture().planned
    assert max(m.bytes for m in planned) < max(m.bytes for m in plain)
    assert len(plain) > 10
    assert plain[-1].start + plain[-1].seconds == pytest.approx(plan.step_seconds, rel=1e-6)


def test_curves_that_are_scaled_are_marked_and_stay_within_the_budget(plan):
    from jdelta._src.report.page import page as render

    picture = plan.picture()
    budgeted = jdelta.plan(small.step, 0.5, *small.make_args(), donate_argnums=0)
    assert max(m.bytes for m in budgeted.picture().planned) <= budgeted.budget
    peaks = plan.ceiling, plan.compiled_peak
    alike = dataclasses.replace(picture, simulated=peaks)
    assert data_of(render(plan, alike, {}))["scale"] == ""
    above = dataclasses.replace(picture, simulated=(plan.ceiling, 2 * plan.compiled_peak))
    scale = data_of(render(plan, above, {}))["scale"]
    assert f"comes to {format_bytes(2 * plan.compiled_peak)}" in scale
    assert f"({format_bytes(plan.compiled_peak)} compiled)" in scale
    assert "plain step" not in scale
    search = dataclasses.replace(plan.search, estimates=("ceiling",))
    predicted = dataclasses.replace(plan, search=search)
    assert "its peak is predicted" in data_of(render(predicted, alike, {}))["scale"]


def advised(tmp_path, **options):
    """What the page of a scanned step advises."""
    plan = jdelta.plan(small.step, 0.6, *small.make_args(), **options)
    plan.report(str(tmp_path / "page.html"))
    return " ".join(data_of((tmp_path / "page.html").read_text("utf-8"))["advice"])


def test_the_page_advises_what_would_help(tmp_path):
    text = advised(tmp_path, per_layer=False)
    assert "Donate w (donate_argnums; up to " in text
    assert "reorder=True" in text
    assert "per_layer=False" in text


def test_the_page_advises_nothing_that_was_done(tmp_path):
    text = advised(tmp_path, donate_argnames="w", reorder=True)
    assert "onate" not in text
    assert "reorder" not in text
    assert "per_layer" not in text


def test_a_step_in_a_script_is_called_by_its_name_alone():
    from jdelta._src.plan.user_step import jitted
    from jdelta._src.report.page import titles

    def own(x):
        return x

    own.__module__ = "__main__"
    name = jitted(own).place
    assert name == "test_a_step_in_a_script_is_called_by_its_name_alone.own"
    assert jitted(jax.jit(small.step)).place == "tests.small:step"
    plan = jdelta.plan(small.step, "1GiB", *small.make_args())
    program = dataclasses.replace(plan.program, step=name)
    assert titles(dataclasses.replace(plan, program=program))[0] == name


def shown(plan):
    dropped = Decision.RECOMPUTE
    return [r.name for r in plan.residuals if r.needed or plan.decisions[r.name] is not dropped]


def test_the_grid_has_every_decision(plan):
    grid = plan.picture().grid
    told = {
        f"{column}/{row}": decision
        for row, line in zip(grid.rows, grid.cells, strict=True)
        for column, decision in zip(grid.columns, line, strict=True)
        if decision is not None
    }
    assert told == {name: plan.decisions[name] for name in shown(plan)}


def test_the_page_holds_the_plan(plan, page):
    data = data_of(page.read_text("utf-8"))
    assert data["budget"] == plan.budget
    assert dict(data["figures"])["target"] == "cpu"
    assert "<h1>unrolled_step in tests.small</h1>" in page.read_text("utf-8")
    assert [point[0] for point in data["plans"]] == ["this plan", "by hand"]
    cells = sum(cell is not None for row in data["grid"]["cells"] for cell in row)
    assert cells == len(shown(plan))


def test_the_page_asks_for_nothing_else(page):
    text = page.read_text("utf-8")
    assert not re.search(
        r"""(?:src|href)=|url\(|@import|fetch\(|https?://(?!www\.w3\.org/2000)""", text
    )


def test_names_cannot_break_out_of_the_page(plan):
    from jdelta._src.report.page import page as render

    others = {"</script><script>alert(1)</script>": plan}
    text = render(plan, None, others)
    assert "<script>alert" not in text
    assert data_of(text)["plans"][1][0] in others


def test_a_notebook_shows_a_plan(plan):
    shown = plan._repr_html_()
    assert html.unescape(shown.partition("</pre>")[0]) == f"<pre>{printed(plan, WIDTH)}"
    inner = html.unescape(re.search(r'srcdoc="(.*?)" loading', shown, re.DOTALL)[1])
    assert data_of(inner)["memory"] is None


def test_a_loaded_plan_has_a_page_without_pictures_of_the_step(plan, tmp_path):
    plan.save(str(tmp_path / "plan.json"))
    loaded = jdelta.load(str(tmp_path / "plan.json"))
    loaded.report(str(tmp_path / "page.html"))
    assert data_of((tmp_path / "page.html").read_text("utf-8"))["memory"] is None
    with pytest.raises(jdelta.PlanMismatchError, match="no step"):
        loaded.picture()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1100])
def test_the_page_draws_itself(plan, page, tmp_path, width):
    shot = tmp_path / "page.png"
    words = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},900",
    ]
    done = subprocess.run(
        [*words, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    dom = done.stdout
    assert "Uncaught" not in done.stderr
    assert len(re.findall(r'class="line"', dom)) == 2
    assert len(re.findall(r'class="budget"', dom)) == 1
    assert len(re.findall(r'class="plan"', dom)) == 2
    assert len(re.findall(r'class="cell"', dom)) == len(shown(plan))
    assert len(re.findall(r'class="curve"', dom)) == 6
    assert "NaN" not in dom
    assert re.search(r'<section id="lanes" hidden', dom)
    subprocess.run(
        [*words, f"--screenshot={shot}", page.as_uri()], capture_output=True, timeout=120
    )
    assert shot.stat().st_size > 10_000


def test_figures_for_files(plan, others, tmp_path):
    frontier = jdelta.frontier(small.step, *small.make_args(), budgets=(0.9, 0.5, 0.01))
    figures = [plot.memory(plan), plot.decisions(plan), plot.frontier(frontier, others)]
    for number, figure in enumerate(figures):
        figure.savefig(path := tmp_path / f"{number}.png")
        assert path.stat().st_size > 5_000
    with pytest.raises(jdelta.PlanMismatchError, match="no transfers"):
        plot.lanes(plan)


def runs():
    ways = {"keep": 4.0, "recompute": 1.0, "spill": 1.5}
    return [
        jdelta.RokPoint(way, batch, int(batch * size * 2**20), 1e9 * batch / (1 + size), step)
        for step in ("gpt", "t5")
        for way, size in ways.items()
        for batch in (8, 4)
    ]


def test_throughput_over_activation_memory(plan, tmp_path):
    figure = plot.rok(runs())
    assert [axes.get_title() for axes in figure.axes] == ["gpt", "t5"]
    for axes in figure.axes:
        lines = axes.get_lines()
        assert [line.get_label() for line in lines] == ["keep", "recompute", "spill"]
        assert all(list(line.get_xdata()) == sorted(line.get_xdata()) for line in lines)
        assert [text.get_text() for text in axes.texts] == ["4", "8"] * 3
    figure.savefig(tmp_path / "rok.png")
    with pytest.raises(ValueError, match=r"at least one jdelta\.RokPoint"):
        plot.rok([])
    plan.report(str(tmp_path / "page.html"), rok=runs())
    curves = data_of((tmp_path / "page.html").read_text("utf-8"))["rok"]
    assert [(name, role) for name, role, _ in curves[:3]] == [
        ("gpt keep", "plain"),
        ("gpt recompute", "recompute"),
        ("gpt spill", "spill"),
    ]
    assert curves[0][2] == [[4, 16 * 2**20, 8e8], [8, 32 * 2**20, 16e8]]


def test_every_decision_has_a_colour():
    assert set(plot.COLOURS) == set(Decision)


def test_values_are_called_by_their_names():
    from jdelta._src.regions.trace import trace

    step_trace = trace(small.step, *small.make_args(8))
    names = set(labels(step_trace.graph, step_trace.plan_name).values())
    assert {"region/sin", "region/input"} <= names
