"""The benchmark scripts do what they say, on tiny models: so they cannot rot between real runs."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from benchmarks import __main__, cases, models, policies, steps, study
from benchmarks.accuracy import peaks, prices
from benchmarks.device import device, spill, turns
from benchmarks.order import compiled_order, order
from benchmarks.plans import grouping, hand_policies, max_batch, savings
from benchmarks.programs import decisions, programs
from benchmarks.study import Job, Study
from jdelta import TargetError
from jdelta._src.api import largest
from jdelta._src.backends.chips import Rates
from jdelta._src.backends.target import resolve
from jdelta._src.residuals.file_link import Scope, hidden_scopes
from jdelta._src.search.summary import NEXT_IS_TOO_LARGE
from jdelta._src.spill import SpillRates
from tests.compilers import TARGETS
from tests.programs import PROGRAMS, SMALL
from tests.versions import fails_in_jax_0_10_with_remat3

STUDIES = study.studies()
STEP = {"step": "tiny", "target": "cpu"}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A scanned stack that compiles in a second."""

    layers: int = 12
    width: int = 64
    batch: int = 8
    scan: bool = True
    span: int = 1
    param_dtype: Any = jnp.float32

    checkpoint = staticmethod(jax.checkpoint)

    def case(self, name, remat):
        def variables(key):
            wide, narrow = (self.width, 4 * self.width), (4 * self.width, self.width)
            return models.llama.matrices(self, key, {"in": wide, "out": narrow}), {}

        def forward(params, stats, batch, key):
            del key
            x = models.llama.scanned(self, params, batch["x"], remat(layer))
            return jnp.mean(jnp.square(x)), stats

        return models.case.make_case(
            name,
            variables=variables,
            batch=lambda key: {"x": jax.random.normal(key, (64 * self.batch, self.width))},
            forward=forward,
            optimizer=optax.sgd(0.1),
        )


def layer(params, x):
    hidden = jnp.tanh(checkpoint_name(x @ params["in"], "mlpwi"))
    return x + checkpoint_name(hidden @ params["out"], "mlpwo")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(models.MODELS, "tiny", Tiny())
    monkeypatch.setitem(steps.STEPS, "tiny", {"name": "tiny", "scan": True})
    savings.plain_figures.cache_clear()


def plain():
    return cases.traced(steps.build("tiny"), "cpu")


def by_hand(policy, target="cpu"):
    return cases.traced(policies.build(policy, "tiny"), target)


def test_a_run_resumes_from_its_file(tmp_path):
    path = tmp_path / "new" / "rows.json"
    calls = []

    def measure(step, number):
        calls.append(number)
        if number == 3:
            raise KeyboardInterrupt
        return {"square": number**2}

    numbers = Study("numbers", "How large are squares?", list, measure, str)
    jobs = [Job("square", {"number": n}) for n in (1, 2, 3)]
    with pytest.raises(KeyboardInterrupt):
        numbers.run(jobs, path)
    assert [row["square"] for row in study.load(path)] == [1, 4]
    with pytest.raises(KeyboardInterrupt):
        numbers.run(jobs, path)
    assert calls == [1, 2, 3, 3]
    assert {"step", "jax", "commit"} <= json.loads(path.read_text())[0].keys()


def test_a_job_may_have_several_rows_or_none(tmp_path):
    many = Study("many", "", list, lambda step, n: [{"i": i} for i in range(n)], str)
    rows = many.run([Job("a", {"n": 2}), Job("b", {"n": 0})], tmp_path / "rows.json")
    assert [(r["step"], r["n"], r["i"]) for r in rows] == [("a", 2, 0), ("a", 2, 1)]
    assert many.run([Job("a", {"n": 2})], tmp_path / "rows.json") == rows


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_explains_itself(name, capsys):
    for command in ("run", "table"):
        with pytest.raises(SystemExit) as stopped:
            __main__.main([command, name, "--help"])
        assert stopped.value.code == 0
        said = capsys.readouterr().out
        assert "--json" in said
        assert STUDIES[name].question in said


@pytest.mark.parametrize("command", ["run", "table"])
def test_every_command_lists_the_studies(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main([command, "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in STUDIES)


def test_the_list_has_every_study_and_what_it_asks(capsys):
    __main__.main(["list"])
    said = capsys.readouterr().out
    assert all(s.name in said and s.question in said for s in STUDIES.values())


@pytest.mark.parametrize("name", STUDIES)
def test_every_row_is_of_a_program_of_its_study(name):
    spec = STUDIES[name]
    labels = {job.label for job in spec.jobs()}
    for row in spec.rows():
        assert row["step"] in labels
        assert "jax" in row
        assert "commit" in row or name == "transfers"  # some of its rows are older than the field


def test_a_label_means_one_program():
    """What two studies share is in a table of steps that both take it from."""
    shared = {*steps.STEPS, *order.STEPS, *PROGRAMS}
    own = [(job.label, s.name) for s in STUDIES.values() for job in s.jobs()]
    users = {label: {name for of, name in own if of == label} for label, _ in own}
    assert {label: names for label, names in users.items() if len(names) > 1} == {
        label: names for label, names in users.items() if len(names) > 1 and label in shared
    }
    assert len(shared) == len(steps.STEPS) + len(order.STEPS) + len(PROGRAMS)


def test_plain_peaks_of_one_label_agree():
    peaks = {}
    for name in ("budgets", "savings", "peaks"):
        for r in STUDIES[name].rows():
            plain = r.get("plain", r.get("triton") if r.get("variant") == "plain" else None)
            plain = plain["peak"] if isinstance(plain, dict) else plain
            if plain:
                peaks.setdefault((r["step"], r["target"]), []).append(plain)
    assert len(peaks) > 20
    for values in peaks.values():
        assert max(values) < 1.02 * min(values)  # what revisions make of it


def test_a_table_says_at_which_revisions_its_rows_were_made():
    one, two = {"commit": "1f993d5"}, {"commit": "aa52870+"}
    assert study.table(["a"], [["b"]], [one]).endswith("| b |\n\nMade at revision 1f993d5.")
    said = study.made_at([one, two, one])
    assert said == "Made at several revisions (rows): 1f993d5 (2), aa52870+ (1)."
    assert study.table(["a"], [], []) == ""
    assert study.made_at([{}]) == "Made at revision unknown."


def test_a_run_takes_choices_and_settings(tmp_path, monkeypatch, capsys):
    asked = []

    def measure(step, target, limit=1):
        asked.append((step, target, limit))
        return {"taken": 2}

    def jobs(step=("a", "b"), target=("cpu", "cuda:h100")):
        return study.product(step, target)

    def tables(rows):
        return study.table(["step"], [[r["step"]] for r in rows], rows)

    numbers = Study("numbers", "How many?", jobs, measure, tables)
    monkeypatch.setattr(__main__, "studies", lambda: {"numbers": numbers})
    path = str(tmp_path / "rows.json")
    __main__.main(["run", "numbers", "--step", "b", "--with", "limit=3", "--json", path])
    assert asked == [("b", "cpu", 3), ("b", "cuda:h100", 3)]
    assert capsys.readouterr().out.count("| b |") == 2
    __main__.main(["table", "numbers", "--json", path])
    assert capsys.readouterr().out.count("| b |") == 2
    with pytest.raises(SystemExit):
        __main__.main(["run", "numbers", "--with", "depth=3", "--json", path])
    assert "numbers has no setting depth" in capsys.readouterr().err


def test_the_zoo_names_what_is_not_right(monkeypatch):
    name = "layers.scanned_mlp"
    small = dataclasses.replace(PROGRAMS[name], large=SMALL)
    monkeypatch.setitem(programs.PROGRAMS, name, small)
    r = {"step": name, "target": "cpu", **programs.row(name, "cpu")}
    assert r["failures"] == []
    assert 0 < r["hand"]["peak"] < r["plain"]
    assert r["at_hand"]["compiled_peak"] <= programs.BAR * r["hand"]["peak"]
    assert 0 < r["plan"]["xla"] < r["plan"]["seconds"]
    refused = {"error": "BudgetError", "says": "no", "floor": 2 * r["plain"], "budget": 1}
    raw = {"error": "KeyError", "says": "'init'", "raw": True}
    over = {**r["plan"], "compiled_peak": 2 * r["plan"]["budget"]}
    unused = {**r["plan"], "compiled_peak": r["plan"]["floor"], "overhead": 1.0}
    slow = {**r["at_hand"], "priced": 1.0}
    wrong = [("plan", refused), ("plan", raw), ("plan", over), ("at_hand", refused)]
    wrong += [("at_hand", raw), ("at_hand", slow)]
    for part, row in wrong:
        assert len(programs.failures({**r, part: row})) == 1, (part, row)
    unused["budget"] = 2 * unused["compiled_peak"]
    assert "fit" in unused["result"]
    assert programs.is_unused(unused)
    assert not programs.is_unused({**unused, "result": f"{NEXT_IS_TOO_LARGE}: with a kept too"})
    slow_refusal = {**refused, "seconds": 2.0, "xla": 1.0}
    rows = [r, {**r, "plan": slow_refusal, "failures": ["refused"]}]
    assert f"| {name} | cpu | refused |" in programs.tables(rows)


@pytest.mark.parametrize("policy", ["nothing_saveable", "sqrt", "dots_saveable"])
def test_recompute_is_priced_above_the_plain_step(policy):
    added = by_hand(policy).price.compute - plain().price.compute
    assert 0 < added < plain().price.compute


def test_cycles_of_a_tpus_compiler_are_read_where_it_notes_them():
    rates = Rates((("bfloat16", 131072e3),), 1.0, 1.0, 1e3, 1.0, 1.0)
    target = dataclasses.replace(resolve("tpu:v5e:2x2"), rates=rates)
    noted = 'backend_config={"window_config":{"estimated_cycles":"500"}}'
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (x: f32[50]) -> f32[50] {{
  %x = f32[50]{{0}} parameter(0)
  %y = f32[50]{{0}} negate(%x), {noted}
  ROOT %z = f32[50]{{0}} negate(%y)
}}
"""
    assert cases.clock(target) == 1e3
    assert cases.overlap_by_cycles(text, target).compute == pytest.approx(0.5 + 0.4)


def test_root_of_l_recomputes_once_more_than_per_block():
    assert by_hand("sqrt").price.compute > by_hand("nothing_saveable").price.compute
    assert policies.root(12) == 3
    assert policies.root(48) == 6


def test_names_that_are_saved_are_not_recomputed():
    assert plain().names() == {"mlpwi", "mlpwo"}
    saved, dropped = by_hand("maxtext:minimal"), by_hand("nothing_saveable")
    assert saved.price.compute < dropped.price.compute
    assert saved.measured.peak > dropped.measured.peak


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_blocks_carry_the_names_of_every_maxtext_set(name):
    names = cases.traced(models.build(name, small=True, scan=True), "cpu").names()
    for key, policy in policies.POLICIES.items():
        if key.startswith("maxtext:") and policy.names:
            assert names & set(policy.names), key


@fails_in_jax_0_10_with_remat3
@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
def test_copies_to_the_host_are_counted_and_charged(target):
    program = by_hand("maxtext:minimal_offloaded", target)
    hidden = 12 * 512 * 4 * 64 * 4
    assert program.price.to_host == program.price.to_device == hidden
    exposed = program.measured.overlap.exposed
    assert program.price.seconds == program.price.compute + exposed > program.price.compute


@pytest.mark.parametrize(
    ("policy", "step", "why"),
    [
        ("sqrt", "resnet50", "no scan of scans"),
        ("maxtext:minimal", "resnet50", "no values of these names"),
        ("offload_dot_with_no_batch_dims", "gpt2 unrolled", "no scan to offload from"),
        ("offload_dot_with_no_batch_dims", "gpt2 scanned", "not here"),
        ("maxtext:minimal", "gpt2 scanned", None),
    ],
)
def test_policies_are_left_out_where_they_do_not_fit(policy, step, why):
    names = {"mlpwi"} if "gpt2" in step else set()
    assert policies.refusal(policy, step, names, "not here") == why


def test_hand_policies():
    r = hand_policies.row(**STEP, policy="nothing_saveable")
    hand, plan = r["hand"], r["plan"]
    peak = policies.same_peak(policies.program("nothing_saveable", **STEP))
    assert plan["compiled_peak"] <= plan["budget"] <= peak
    assert hand["peak"] <= peak < 1.001 * hand["peak"]
    assert r["plain_seconds"] < plan["price"]["seconds"] <= 1.1 * hand["price"]["seconds"]
    cells = hand_policies.cells({**STEP, "policy": "nothing_saveable", **r})
    assert len(cells) == len(hand_policies.HEADS)
    skipped = hand_policies.row(**STEP, policy="maxtext:minimal_offloaded")
    assert "ignores memory kinds" in skipped["skipped"]


def test_savings():
    least = savings.row(**STEP, units="marked", of="floor")
    assert least["plan"]["compiled_peak"] == least["plan"]["floor"]
    r = savings.row(**STEP, units="marked", of="activation", saving=0.2)
    figures, plan = r["plain"], r["plan"]
    kept = plan["budget"] - figures["resident"]
    assert kept == pytest.approx(0.8 * (figures["peak"] - figures["resident"]), rel=1e-3)
    assert least["plan"]["floor"] <= plan["compiled_peak"] <= plan["budget"]
    total = savings.row(**STEP, units="marked", of="total", saving=0.7)
    assert "below the floor" in total["plan"]["error"]
    jobs = [
        {"of": "floor", "saving": None, **least},
        {"of": "activation", "saving": 0.2, **r},
        {"of": "total", "saving": 0.7, **total},
    ]
    table = savings.tables([{**STEP, "units": "marked", **job} for job in jobs])
    lines = table.partition("\n\n")[0].split("\n")
    assert {line.count("|") for line in lines} == {len(savings.HEADS) + 1}
    total_line, activation_line = (line.split(" | ") for line in lines[2:])
    assert total_line[-2] == "below floor"
    assert activation_line[-5:-1] == [""] * 4
    taken, plain = (int(activation_line[at]) for at in (5, 4))
    assert taken * 2**20 == pytest.approx(least["plan"]["floor"] - figures["resident"], abs=2**19)
    assert taken < plain


def test_simulation():
    rows = [
        {**job, **peaks.row(**job)}
        for job in ({**STEP, "what": "simulated", "kept": kept} for kept in (None, 0.0, 0.6))
    ]
    plain, floor, plan = (r["compiled"] for r in rows)
    assert floor < plan < plain
    assert [r["simulated"] for r in rows] == pytest.approx([plain, floor, plan], rel=0.3)
    table = peaks.tables(rows)
    assert table.count("not run") == 2
    assert "Median of the plans' errors" in table


def test_prices_of_a_step_and_of_plans():
    plain, plan, error = (
        {**job, **prices.row(**job)}
        for job in ({**STEP, "what": "steps", "share": share} for share in (None, 0.6, 0.01))
    )
    assert plain["traced"] == pytest.approx(plain["compiled"], rel=0.5)
    assert 0 < plan["estimate"] < 1
    assert 0 < plan["traced"] < 1
    refused = {**STEP, "what": "steps", "share": None, "traced": 1.0}
    slow = {**plain, "cycles": 2 * plain["traced"]}
    table = prices.tables([plain, slow, refused, plan, {**plan, "compiled": None}, error])
    assert table.count("-50%") == table.count("refused") == table.count("below floor") == 1


def test_what_single_values_are_worth():
    prices.staged.cache_clear()
    values = prices.values("tiny", "cpu", "*")
    jobs = [{**STEP, "what": "values", "base": base, "unit": "*"} for base in prices.BASES]
    rows = [{**job, **r} for job in jobs for r in prices.row(**job)]
    assert [r["value"] for r in rows] == [*values, *values]
    assert all(r["priced"] > 0 for r in rows if r["value"].endswith("dot_general"))
    assert all(r["bytes"] >= prices.SMALLEST for r in rows)
    assert [line[3] for line in prices.summary(rows)] == [str(len(values))] * 2
    exact = [{**r, "compiled": r["priced"]} for r in rows]
    assert [line[-2:] for line in prices.summary(exact)] == [["0.00", "1.00"]] * 2


def test_marked_and_unmarked_plans():
    jobs = [{**STEP, "what": "regions", "share": share} for share in (0.6, 0.01)]
    rows = [{**job, **grouping.row(**job)} for job in jobs]
    for regions in steps.REGIONS:
        assert rows[0][regions]["compiled_peak"] <= rows[0]["budget"]
        assert rows[0][regions]["price"]["seconds"] > rows[0]["plain_seconds"]
    table = grouping.tables(rows)
    assert table.count("below floor") == 2


def test_layers_decided_alike_and_apart():
    jobs = [{**STEP, "what": "layers", "share": share} for share in (0.6, 0.01)]
    rows = [{**job, **grouping.row(**job)} for job in jobs]
    for way in grouping.LAYERS:
        assert rows[0][way]["compiled_peak"] <= rows[0]["budget"]
    assert grouping.tables(rows).count("below floor") == 2


def test_every_step_gets_its_savings_and_deltas_also_the_papers():
    jobs = savings.jobs(["resnet50"], ["cpu"], ["found"], ["floor", "total"])
    assert [job.arguments["saving"] for job in jobs] == [None, 0.4, 0.5, 0.6, 0.7, 0.72]
    assert len(savings.jobs(["tiny"], ["cpu"], ["found"], ["total"])) == 4


def test_steps_of_dtrs_evaluation_stand_beside_what_it_publishes():
    asked = savings.jobs(["densenet121"], ["cpu"], ["found"])
    assert [job.arguments["saving"] for job in asked] == [0.09, 0.27, 0.45, 0.61]
    assert savings.jobs(["densenet121"], ["cpu"], ["found"], saving=[0.27, 0.5]) == [asked[1]]
    seconds = {"plain": {"price": {"seconds": 2.0}}, "plan": {"price": {"seconds": 2.5}}}
    lines = savings.tables([{**job.key, **seconds} for job in asked]).splitlines()
    assert lines[3] == "| densenet121 | cpu | found | 73% | 1.22 | 1.25 |"


def test_largest_batch_by_every_method(monkeypatch):
    monkeypatch.setattr(largest, "RESOLUTION", 1)  # double only
    jobs = [{**STEP, "method": method, "memory": "8MiB"} for method in max_batch.METHODS]
    rows = [{**job, **max_batch.row(**job)} for job in jobs]
    batch = {r["method"]: r["batch"] for r in rows}
    assert batch["plain"] < batch["hand"]
    for regions in steps.REGIONS:
        assert 2 <= batch["plain"] <= batch[f"{regions} 10%"] <= batch[regions]
        assert batch["plain"] < batch[regions]
    assert all(len(max_batch.cells(r, rows)) == 7 for r in rows)


@pytest.mark.parametrize("bandwidth", [1e9, 2e9, 4e9, 8e9])
def test_the_rule_written_out_twice(bandwidth):
    sizes, seconds = (
        [1e8 * (1 + k % 3) for k in range(12)],
        [0.02 + 0.01 * (k % 2) for k in range(12)],
    )
    scopes = [Scope(f"{k}", *both) for k, both in enumerate(zip(sizes, seconds, strict=True))]
    count = spill.predicted_scopes(sizes, seconds, bandwidth)
    assert count == hidden_scopes(scopes, bandwidth, math.inf)
    assert count > 0


def test_copies_to_the_pool_have_rates(monkeypatch):
    monkeypatch.setattr(spill, "SIZE", spill.BLOCK)
    rates = spill.row("copies", "copies", offset=64)
    assert set(rates) == {"in", "out", "numpy"}
    assert all(1e6 < rate < 1e13 for rate in rates.values())
    offset, *shown = spill.copy_cells({"offset": 64, **rates})
    assert (offset, float(shown[0])) == ("64", pytest.approx(rates["in"] / 1e9, abs=0.06))


def test_steps_spill_in_turns_with_steps_that_keep(monkeypatch, tmp_path):
    small = {"layers": 2, "width": 64, "heads": 2, "batch": 8, "length": 64}
    monkeypatch.setitem(spill.STEPS, "small", small)
    monkeypatch.setitem(spill.DEVICES, "quick", {"adapter": "memory", "least": "1KiB"})
    monkeypatch.setattr(spill, "rates_of", lambda spill: SpillRates(1e12, 1e12))
    job = {"step": "small", "what": "devices", "device": "quick", "directory": str(tmp_path)}
    r = {**job, **spill.row(**job, repeats=2), "jax": jax.__version__}
    spilled = sum(r["scopes"][: r["rule"]])
    assert 0.9 * spilled < r["written"] <= spilled  # what enters a unit may not be read
    assert r["counters"]["planned"] == (spill.WARMUP + 2) * r["written"]
    assert len(r["keep"]["seconds"]) == len(r["spill"]["seconds"]) == 2
    assert len(spill.device_cells(r)) == len(spill.HEADS)


def test_resident_memory_is_that_beyond_the_framework():
    mib = 2**20
    peaks = {"arguments": 300 * mib, "plain": 1300 * mib, "planned": 700 * mib}
    rows = [
        {"step": "nano", "way": way, "resident": peak, "loss": 1.0, "files": "", "jax": ""}
        for way, peak in peaks.items()
    ]
    assert spill.process_cells(rows[2], rows)[2:5] == ["700", "400", "60.0%"]


def test_order_of_a_compiled_step(tmp_path, monkeypatch):
    monkeypatch.setitem(order.STEPS, "tiny batch 8, Adam", {"model": "tiny", "batch": 8})
    job = {"step": "tiny batch 8, Adam", "target": "cpu"}
    rows = [{**job, **compiled_order.row(**job, directory=str(tmp_path))} for _ in range(2)]
    first, second = ({**r, "order_seconds": 0} for r in rows)
    assert first == second, "read from what was kept"
    assert first["bound"] <= first["peak"] <= first["xla_peak"]
    refused = {**job, **order.STEPS[job["step"]], "step_peak": 1, "refused": True}
    table = compiled_order.tables([*rows, refused])
    assert "refused" in table
    assert "cpu: the best order found keeps" in table


def test_small_steps_in_order():
    job = {"step": "mlp, 1 layer, SGD"}
    r = {**job, **order.row(**job, limit=1)}
    assert r["bound"] <= r["peak"] <= r["program_peak"]
    assert r["peak"] <= (r["ilp"]["peak"] or r["peak"])
    none = {**r, "ilp": {**r["ilp"], "optimal": False}}
    proven = {**r, "ilp": {**r["ilp"], "optimal": True, "peak": r["peak"]}}
    said = order.tables([none, proven])
    assert "proven least in 1 of 2, jdelta's peak equal in 1" in said


def test_device_measures_rates():
    r = device.row("cpu", "rates", sizes=(2**16,), matrix=32, repeats=2)
    assert [len(c["to_host_seconds"]) for c in r["copies"]] == [2]
    assert all(seconds > 0 for p in r["products"] for seconds in p["seconds"])
    assert r["device"] == "cpu"
    assert len(device.rates(r)) == 3


def test_device_runs_steps():
    job = {"what": "step", "step": "tiny"}
    rows = [
        {**job, "variant": variant, **device.row("cpu", **job, variant=variant, repeats=2)}
        for variant in ("plain", "nothing_saveable", "plan 80%", "plan as nothing_saveable")
    ]
    assert all(len(r["seconds"]) == 2 and len(r["warmup_seconds"]) == 3 for r in rows)
    assert all(r["loss"] == pytest.approx(rows[0]["loss"]) for r in rows)
    peak = policies.same_peak(policies.program("nothing_saveable", "tiny", "cpu"))
    assert rows[3]["compiled_peak"] <= rows[3]["budget"] <= peak < 1.001 * rows[1]["compiled_peak"]
    assert -1 <= device.agreement(rows) <= 1
    assert [len(device.cells(r, rows)) - len(device.HEADS) for r in rows] == [-1, -1, -1, 0]
    early = {"step": "tiny", "variant": "plain", "target": "cpu"}
    assert device.ahead(**early)["compiled_peak"] == rows[0]["compiled_peak"]
    peak = study.mib(rows[0]["compiled_peak"])
    before = {"step": "tiny", "what": "ahead", "variant": "plain", "target": "cpu"}
    rows.append({**before, **device.alone(**before)})
    assert device.cells(rows[0], rows)[2:4] == [peak, peak]
    assert device.tables(rows).partition("\n\n")[0].count("\n") == 5
    assert "Kendall's tau" in device.tables(rows)
    for variant in ("maxtext:minimal_offloaded", "plan as maxtext:minimal_offloaded"):
        assert "skipped" in device.row("cpu", **job, variant=variant)


def test_device_refuses_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match="no gpu is attached to this machine"):
        __main__.main(
            ["run", "device", "--step", "resnet50", "--json", str(tmp_path / "rows.json")]
        )


def test_turns_times_policies_and_plans(tmp_path, monkeypatch):
    variants = ("plain", "nothing_saveable", "plan as nothing_saveable")
    monkeypatch.setitem(turns.VARIANTS, "policies", variants)
    planned = turns.make_plans("policies", "tiny", "cpu", tmp_path)
    job = {"what": "policies", "step": "tiny"}
    r = {**job, **turns.row(**job, target="cpu", plans=tmp_path, rounds=2)}
    by_variant = {f["variant"]: f for f in r["programs"]}
    assert (*planned,) == variants[2:]
    assert (*by_variant,) == variants
    assert all(len(f["seconds"]) == 2 for f in by_variant.values())
    assert all(f["loss"] == pytest.approx(by_variant["plain"]["loss"]) for f in by_variant.values())
    assert by_variant[variants[2]]["compiled_peak"] == planned[variants[2]]["compiled_peak"]
    assert [turns.cells(r, by_variant[v])[-1] == "" for v in variants] == [True, True, False]
    other = next(iter(tmp_path.iterdir()))
    other.write_text(other.read_text().replace('"target": "cpu"', '"target": "cuda:h100"'))
    with pytest.raises(TargetError, match="make plans for the device that is"):
        turns.loaded(other)


def test_turns_reads_what_transfers_add():
    kept = {"variant": turns.KEPT, "compiled_peak": 0, "host_bytes": 0, "scheduled": 0.01}
    kept |= {"transfers": 0.0, "hidden": 1.0, "seconds": [0.010, 0.010, 0.020]}
    away = {**kept, "variant": turns.AWAY, "transfers": 0.004, "seconds": [0.011, 0.011, 0.020]}
    r = {"what": "transfers", "step": "tiny", "programs": [kept, away]}
    assert turns.cells(r, away)[-3:] == ["4.00", "75%", "100.0%"]
    assert turns.cells(r, kept)[-3:] == ["", "", ""]
    tables = turns.tables([r]).split("\n\n")
    assert [part.count("\n") for part in tables] == [3, 0]


def test_a_figure_that_changes_is_a_difference():
    job = {"step": "layers.mlp", "target": "cpu", "compiler": decisions.STAND_IN}
    before = {**job, "compiled_peak": 3, "compiles": 1, "commit": "a"}
    after = {**before, "compiled_peak": 4, "commit": "b"}
    assert decisions.differences([before, before]) == []
    assert decisions.differences([before, after]) == [[*job.values(), "compiled_peak", "3", "4"]]
    assert "Decided differently: 1 figures of 1 plans." in decisions.tables([before, after])


def test_the_same_is_decided_twice(monkeypatch):
    small = dataclasses.replace(PROGRAMS["layers.mlp"], large=SMALL)
    monkeypatch.setitem(PROGRAMS, "layers.mlp", small)
    monkeypatch.setattr(decisions, "SHARE", 0.9)
    job = {"step": "layers.mlp", "target": "cpu", "compiler": decisions.STAND_IN}
    rows = [{**job, **decisions.row(**job)} for _ in range(2)]
    assert rows[0]["decisions"]
    assert decisions.differences(rows) == []
