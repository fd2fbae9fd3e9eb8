"""The command line: what each command prints, for people and for programs, and how it ends."""

import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import jdelta
from jdelta._src.backends import device_files
from jdelta._src.backends.chips import CHIPS
from jdelta._src.cli import answers, commands, main, output, quiet
from jdelta._src.cli.answers import ANSWERS
from jdelta._src.cli.output import in_options
from jdelta._src.report.export import FORMS
from tests import small

STEP = ["tests.small:step", "--args", "tests.small:make_args"]


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"], ["oom", "-h"]])
def test_help_waits_for_no_library(words):
    script = f"""
import sys
from jdelta._src.cli import main
try:
    main({words})
finally:
    print(sorted({{"jax", "jaxlib", "numpy", "rich", "scipy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_has_an_answer():
    assert [command.name for command in commands.COMMANDS] == list(ANSWERS)
    assert tuple(sorted(FORMS)) == commands.FORMS


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Plans of one step to two budgets, by the command line."""
    folder = tmp_path_factory.mktemp("plans")
    paths = {share: str(folder / f"{share}.json") for share in ("0.4", "0.7")}
    for share, path in paths.items():
        assert main(["plan", *STEP, "--budget", share, "--donate", "0", "-o", path]) == 0
    return paths


def said(capsys, *words, code=0):
    capsys.readouterr()
    assert main(list(words)) == code
    return capsys.readouterr().out


def record(capsys, *words, code=0):
    return json.loads(said(capsys, *words, "--json", code=code))


def test_what_goes_on_is_told_if_asked_for(capsys):
    words = ["plan", *STEP, "--budget", "0.4", "--donate", "0"]
    for verbose in (["-v"], []):
        assert main(words + verbose) == 0
        told = capsys.readouterr().err
        assert bool(verbose) == bool(re.search(r"^\d\d:\d\d:\d\d compile 1", told, re.MULTILINE))


def test_a_plan_is_printed_and_written(files, capsys, tmp_path):
    page = tmp_path / "page.html"
    text = said(capsys, "plan", *STEP, "--budget", "0.4", "--donate", "0", "--report", str(page))
    plan = jdelta.plan(small.step, 0.4, *small.make_args(), donate_argnums=0)
    assert jdelta.load(files["0.4"]) == plan
    assert " ".join(in_options(str(plan)).split()) in " ".join(text.split())
    assert page.read_text().startswith("<!doctype html>")


def test_a_terminal_shows_the_lines_of_a_pipe(files, capsys, monkeypatch):
    for width in ("60", "80"):
        monkeypatch.setenv("COLUMNS", width)
        for words in (["explain", files["0.4"]], ["explain", files["0.4"], "*"], ["targets"]):
            piped = said(capsys, *words)
            with monkeypatch.context() as terminal:
                terminal.setenv("FORCE_COLOR", "1")
                terminal.setenv("TERM", "xterm")
                coloured = said(capsys, *words)
            assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == piped
            assert max(map(len, piped.splitlines())) <= int(width)
            assert ("\x1b[" in coloured) == (words[-1] != "*")


def test_json_has_all_figures(files, capsys):
    plan = jdelta.load(files["0.4"])
    got = record(capsys, "plan", *STEP, "--budget", "0.4", "--donate", "0")
    assert got["compiled_peak"] == plan.compiled_peak <= got["budget"] == plan.budget
    assert got["decisions"] == {name: d.value for name, d in plan.decisions.items()}
    assert record(capsys, "explain", files["0.4"]) == got


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("solver='milp' proves", "--solver milp proves"),
        ("plan without spill=.", "plan without --spill."),
        ("(host_budget=0, no spill=)", "(--host-budget 0, no --spill)"),
        ("Raise host_budget.", "Raise --host-budget."),
        ("Take these out of pin=, or", "Take these out of --pin, or"),
        ("w (donate_argnums; less)", "w (--donate; less)"),
        ("make it static: static_argnames='depth'.", "make it static: --static depth."),
        ("name it (target='tpu:v5e')", "name it (--target tpu:v5e)"),
        ("4 more rows; plan.report(path)", "4 more rows; `jdelta plan --report FILE`"),
        ("(plan.decisions has all)", "(`jdelta explain PLAN '*'` has all)"),
        ("pin them (pin={'h': ...})", "pin them (--pin {'h': ...})"),
        ("with per_layer=False. Try reorder=True:", "with --no-per-layer. Try --reorder:"),
        (
            "the target, the solver and what is to spill",
            "the target, the solver and what is to spill",
        ),
    ],
)
def test_options_have_the_names_of_the_command_line(capsys, python, words):
    output.failed(python)
    assert capsys.readouterr().err == f"error: {words}\n"
    output.show(output.Answer(None, [output.Block(prose=[python])]), as_json=False)
    output.show(output.Answer(None, [output.Block(figures={"result": python})]), as_json=False)
    assert capsys.readouterr().out == f"{words}\nresult        {words}\n"
    output.show(output.Answer(None, [output.Block(notes=[python])]), as_json=False)
    assert capsys.readouterr().out == f"{python}\n"


def test_explain_says_why(files, capsys):
    (got,) = record(capsys, "explain", files["0.4"], "*mlpwi")
    plan = jdelta.load(files["0.4"])
    assert plan.decisions[got["name"]].value == got["decision"]
    assert got["bytes"] == small.LAYERS * 2048 * 4 * small.WIDTH * 4
    assert got["name"] in said(capsys, "explain", files["0.4"], "*mlpwi")


def test_diff_lists_what_differs(files, capsys):
    got = record(capsys, "diff", files["0.4"], files["0.7"], code=1)
    first, second = (jdelta.load(files[share]) for share in ("0.4", "0.7"))
    assert got["figures"]["compiled_peak"] == [first.compiled_peak, second.compiled_peak]
    assert got["decisions"] == {
        name: [first.decisions[name].value, second.decisions[name].value]
        for name in first.decisions
        if first.decisions[name] is not second.decisions[name]
    }
    assert "The plans are alike" in said(capsys, "diff", files["0.4"], files["0.4"])


def test_diff_takes_a_hundred_columns_and_cuts_nothing(files, capsys):
    first, second = (jdelta.load(files[share]) for share in ("0.4", "0.7"))
    assert first.result != second.result
    text = said(capsys, "diff", files["0.4"], files["0.7"], code=1)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    words = " ".join(text.split())
    assert in_options(first.result) in words
    assert in_options(second.result) in words


def test_layers_that_differ_alike_are_one_row_of_a_diff(capsys, tmp_path):
    step = ["tests.small:unrolled_step", "--args", "tests.small:make_args"]
    names = []
    for decision in ("save", "recompute"):
        names.append(str(tmp_path / f"{decision}.json"))
        main(["plan", *step, "--pin", f"*/mlpwi={decision}", "-o", names[-1]])
    both = record(capsys, "diff", *names, code=1)["decisions"]
    assert len([name for name in both if name.endswith("mlpwi")]) == small.LAYERS
    rows = [line for line in said(capsys, "diff", *names, code=1).splitlines() if "mlpwi" in line]
    assert [row.split() for row in rows] == [["region_*/mlpwi", "×4", "save", "recompute"]]


def test_equal_plans_are_one_row_of_a_frontier(capsys):
    budgets = [f"--budget={size}" for size in ("1GiB", "500MiB", "300MiB", "0.5")]
    assert len(record(capsys, "frontier", *STEP, *budgets)["plans"]) == 4
    _, _, *rows = said(capsys, "frontier", *STEP, *budgets).splitlines()
    assert len(rows) == 2
    assert rows[0].startswith("300.0 MiB to 1.00 GiB  ")


def test_frontier_ends_at_the_floor(capsys):
    got = record(capsys, "frontier", *STEP, "--budget", "0.7", "--budget", "0.01")
    (plan,) = got["plans"]
    assert got["floor"] <= plan["compiled_peak"] <= plan["budget"]
    assert "floor" in said(capsys, "frontier", *STEP, "--budget", "0.01", code=3)


@pytest.mark.parametrize("what", ["batch", "length"])
def test_the_largest_size_fits_and_more_does_not(capsys, what):
    words = [f"max-{what}", *STEP, "--budget", "8MiB", "--step", "64", "--overhead", "50%"]
    got = record(capsys, *words)
    size = got[what]
    assert size % 64 == 0
    assert got["plan"]["compiled_peak"] <= 8 * 2**20
    assert any(tried[0] == size for tried in got["tried"])
    above = min(tried[0] for tried in got["tried"] if tried[0] > size)
    assert above - size <= max(64, size // 32)


def test_a_search_for_the_largest_size_says_how_it_ended(capsys):
    words = ["max-batch", *STEP, "--budget", "8MiB", "--step", "256", "--overhead", "50%"]
    got = record(capsys, *words)
    text = said(capsys, *words)
    assert f"batch: {got['batch']}; {len(got['tried'])} sizes were tried, and" in text
    end = rf"and {got['too_large']} (does not fit|adds more than 50%)\."
    assert re.search(end, " ".join(text.split()))
    assert all(str(size) in text for size, *_ in got["tried"])
    text = said(capsys, "max-batch", *STEP, "--budget", "1GiB", "--most", "2")
    assert "batch: 2; 2 sizes were tried, as many as --most says, and none was too large" in text


def test_a_size_that_changes_nothing_is_refused(capsys):
    step = ["tests.small:step", "--args", "tests.small:same_args"]
    assert main(["max-batch", *step]) == 4
    assert "makes the same arguments for the sizes 1 and 2" in capsys.readouterr().err


def test_nothing_fits(capsys):
    assert record(capsys, "max-batch", *STEP, "--budget", "1MiB", code=3)["batch"] == 0
    assert main(["plan", *STEP, "--budget", "1KiB"]) == 3
    assert "below the floor" in capsys.readouterr().err


def test_targets_need_no_compiler(capsys):
    listed = {target["name"]: target for target in record(capsys, "targets")}
    assert {"tpu:v5e:2x2", "cuda:h100:1x1x8"} <= set(listed)
    assert all(name in said(capsys, "targets") for name in listed)


def test_targets_say_why_a_gpu_has_less_for_a_program(capsys, monkeypatch):
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    listed = {target["name"]: target for target in record(capsys, "targets")}
    h100 = listed["cuda:h100:1x1x8"]
    assert h100["device_memory"] == CHIPS["cuda"]["h100"].memory
    assert h100["memory"] == int(0.75 * h100["device_memory"])
    text = said(capsys, "targets")
    assert "59.33 GiB  79.11 GiB" in text
    assert "JAX takes 75% of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says" in text
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    text = said(capsys, "targets")
    assert "71.20 GiB  79.11 GiB" in text
    assert "JAX takes 90% of a GPU's memory, as XLA_PYTHON_CLIENT_MEM_FRACTION says." in text


def test_targets_say_what_is_not_installed(capsys, monkeypatch):
    for has in (False, True):
        with monkeypatch.context() as installed:
            plugin = importlib.metadata.EntryPoint("xla_cuda13", "a:b", "jax_plugins")
            installed.setattr(importlib.util, "find_spec", lambda name, has=has: has or None)
            plugins = (plugin,) if has else ()
            installed.setattr(importlib.metadata, "entry_points", lambda group, p=plugins: p)
            text = " ".join(said(capsys, "targets").split())  # however wide a line is
            got = record(capsys, "targets")
        for platform in ("tpu", "cuda"):
            needed = f"Targets {platform}:… need an install: pip install 'jax-delta[{platform}]'"
            assert (needed in text) != has
        assert all(target["compiler"] == has for target in got)
        assert "cpu where it has no accelerator" in text


def test_check_compiles_again(files, capsys):
    got = record(capsys, "check", files["0.4"], *STEP)
    planned, now = got["compiled peak"]
    assert planned == now == jdelta.load(files["0.4"]).compiled_peak
    assert got["within"]


def test_check_refuses_another_program(files, capsys):
    other = ["tests.small:unrolled_step", "--args", "tests.small:make_args"]
    assert main(["check", files["0.4"], *other]) == 4
    assert "another" in capsys.readouterr().err


def test_check_refuses_the_arguments_of_another_step(files, capsys):
    other = ["tests.cli.wrong_steps:other_step", "--args", "tests.small:make_args"]
    assert main(["check", files["0.4"], *other]) == 4
    error = capsys.readouterr().err
    assert "made for tests.small:step with w, x, but was given batch, params" in error
    assert "this may be another step" in error


def test_check_says_what_changed(files, capsys, tmp_path):
    record_ = json.loads(Path(files["0.4"]).read_text())
    path = tmp_path / "plan.json"
    peak = record_["figures"]["compiled_peak"]
    lower = {**record_, "figures": {**record_["figures"], "compiled_peak": peak - 1}}
    path.write_text(json.dumps(lower))
    assert "within the budget" in said(capsys, "check", str(path), *STEP, code=1)
    tight = {**record_, "question": {**record_["question"], "budget": peak - 1}}
    path.write_text(json.dumps(tight))
    assert "over the budget" in said(capsys, "check", str(path), *STEP, code=1)


def test_oom_names_what_is_alive(capsys):
    got = record(capsys, "oom", *STEP)
    assert got["needed"] < got["memory"]
    assert any(alive["what"] == "argument" for alive in got["alive"])
    assert "fits" in said(capsys, "oom", *STEP)


def test_oom_plans_to_a_budget(capsys):
    got = record(capsys, "oom", *STEP, "--budget", "0.6")
    assert got["plan"]["compiled_peak"] <= got["plan"]["budget"] == got["budget"] < got["needed"]
    text = said(capsys, "oom", *STEP, "--budget", "0.6")
    assert "does not fit: the budget is" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    got = record(capsys, "oom", *STEP, "--budget", "1MiB")
    assert (got["budget"], got["plan"]) == (2**20, None)
    assert "No plan fits" in got["remedies"][-1]


def test_oom_advises_to_donate_what_is_not_donated(capsys):
    advised = [
        record(capsys, "oom", *STEP, "--budget", "0.6", *words)["remedies"][0]
        for words in ([], ["--donate", "0"], ["--donate", "w"])
    ]
    assert "Donate w (donate_argnums; up to 512.0 KiB less)" in advised[0]
    assert not any("Donate" in other for other in advised[1:])


def test_arguments_are_named_by_number_or_by_name(capsys):
    words = ["tests.small:deep_step", "--args", "tests.small:deep_args", "--static", "depth"]
    by_name = record(capsys, "plan", *words, "--donate", "w", "--budget", "0.6")
    words = ["tests.small:deep_step", "--args", "tests.small:deep_args", "--static", "2"]
    by_number = record(capsys, "plan", *words, "--donate", "0", "--budget", "0.6")
    assert by_name == by_number
    args = small.deep_args()
    options = {"static_argnums": 2, "donate_argnums": 0}
    plan = jdelta.plan(small.deep_step, 0.6, *args, **options)
    assert by_name["fingerprint"] == plan.fingerprint


def test_what_jit_was_told_holds_where_the_command_line_says_nothing(capsys, tmp_path):
    words = ["tests.small:jitted_step", "--args", "tests.small:make_args", "--budget", "0.6"]
    said(capsys, "plan", *words, "-o", str(tmp_path / "plan.json"))
    assert jdelta.load(str(tmp_path / "plan.json")).donate_argnums == (0,)


def test_updates_are_moved_and_layers_kept_alike_if_asked(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    said(capsys, "plan", *STEP, "--budget", "0.6", "--reorder", "--no-per-layer", "-o", path)
    asked = jdelta.load(path).question
    assert (asked.reorder, asked.per_layer) == (True, False)


def test_libraries_of_devices_that_are_not_here_are_silent(monkeypatch, caplog):
    monkeypatch.setattr(quiet, "present", lambda *patterns: False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    logger = logging.getLogger("jax._src.xla_bridge")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "propagate", True)
    quiet.hush()
    logger.error("Jax plugin configuration error: Exception when calling initialize()")
    logger.error("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


def test_libtpu_is_told_what_it_would_complain_of(monkeypatch):
    names = ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
    monkeypatch.setattr(logging.getLogger("jax._src.xla_bridge"), "filters", [])
    for tpus in (True, False):
        for name in names:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for place in (quiet, device_files):
            monkeypatch.setattr(place, "present", lambda *patterns, tpus=tpus: tpus)
        quiet.hush()
        assert [name in os.environ for name in names] == [not tpus] * 3


def test_everything_is_said_to_those_who_ask(monkeypatch):
    monkeypatch.setattr(quiet, "present", lambda *patterns: False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    logger = logging.getLogger("jax._src.xla_bridge")
    monkeypatch.setattr(logger, "filters", [])
    quiet.hush()
    assert logger.filters == []


def test_export(files, capsys):
    assert "remat_policy: custom" in said(capsys, "export", files["0.4"], "maxtext")
    assert "levanter" in record(capsys, "export", files["0.4"], "levanter")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "nowhere:step", "--args", "tests.small:make_args"], "no module 'nowhere'"),
        (["plan", "tests.small:other", "--args", "tests.small:make_args"], "has no 'other'"),
        (["plan", "tests.small", "--args", "tests.small:make_args"], "module:function"),
        (
            ["plan", "tests.small:NOT_A_FUNCTION", "--args", "tests.small:make_args"],
            "but 'tests.small:NOT_A_FUNCTION' is of type int",
        ),
        (["plan", *STEP, "--pin", "everything"], "PATTERN=DECISION"),
        (["plan", "tests/small.py:step", "--args", "x:y"], "did you mean tests.small:step?"),
        (["plan", "tests.small:stap", "--args", "x:y"], "did you mean step?"),
        (["plan", *STEP, "--budget", "12banana"], "argument --budget: budget '12banana'"),
        (["plan", *STEP, "--budget", "0"], "above zero"),
        (["plan", *STEP, "--budget", "-5"], "'-5' is not understood"),
        (["plan", *STEP, "--budget", "12"], "did you mean '12GiB'?"),
        (["frontier", *STEP, "--budget", "0.5", "--budget", "much"], "'much'"),
        (["plan", *STEP, "--host-budget", "50%"], "argument --host-budget"),
        (["plan", *STEP, "--budgte", "1GiB"], "no option --budgte; did you mean --budget?"),
        (["plan", "--arsg=x:y"], "no option --arsg; did you mean --args?"),
        (["pln"], "no command 'pln'; did you mean plan?"),
        (["plan"], "required: MODULE:STEP, --args"),
        ([], "required: COMMAND"),
        (["explain", "nowhere.json"], "there is no file 'nowhere.json': expected a plan's file"),
        (["check", STEP[0], "plan.json"], "a step (MODULE:STEP), which comes after PLAN"),
        (["max-batch", *STEP, "--overhead", "much"], "such as 10%"),
        (["max-batch", *STEP, "--most", "0"], "a whole number above zero"),
    ],
)
def test_a_wrong_command_line_is_refused(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    said_in_full = capsys.readouterr().err
    assert message in said_in_full
    assert len(said_in_full.splitlines()) == 2
    assert re.fullmatch(r"Run `jdelta.* --help` for what there is.", said_in_full.splitlines()[1])


def test_options_may_be_shortened_and_values_may_begin_with_a_dash(files, capsys):
    said(capsys, "explain", files["0.4"], "--js")
    assert main(["explain", files["0.4"], "--", "--such"]) == 4
    assert "no residual called '--such'" in capsys.readouterr().err


TOO_EARLY = ["tests.small:step", "--args", "tests.cli.wrong_steps:too_early"]


@pytest.mark.parametrize(
    ("command", "option"), [("plan", "-o"), ("plan", "--report"), ("frontier", "--plot")]
)
def test_files_that_cannot_be_written_are_refused_first(capsys, tmp_path, command, option):
    (tmp_path / "folder.png").mkdir()
    for path, message in (
        (tmp_path / "none" / "x.png", f"there is no folder '{tmp_path}/none'"),
        (tmp_path / "folder.png", "is a folder"),
        ("/proc/version.png", "permission denied") if os.geteuid() else (tmp_path, "is a folder"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([command, *TOO_EARLY, option, str(path)])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert option in error.splitlines()[0]
        assert message in error or (option == "--plot" and "expected a picture" in error)


def test_a_picture_without_matplotlib_or_of_an_unknown_kind_is_refused_first(capsys, monkeypatch):
    for ending, message in (("pgn", "ending in one of"), ("png", "pip install 'jax-delta[plot]'")):
        with pytest.raises(SystemExit) as stopped:
            main(["frontier", *TOO_EARLY, "--plot", f"x.{ending}"])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


TAKEN = "train_step takes 5: p, s, x, y, key."


@pytest.mark.parametrize(
    ("step", "make", "message"),
    [
        ("train_step", "too_few", f"too_few returned 3 values, {TAKEN}"),
        ("train_step", "too_many", f"too_many returned 6 values, {TAKEN}"),
        ("train_step", "a_dict", f"a_dict returned one value, a dict, {TAKEN}"),
        ("train_step", "one_value", f"one_value returned one value, a float, {TAKEN}"),
        ("open_step", "nothing", "returned 0 values, open_step takes 1 or more: x, others, scale."),
        ("train_step", "of_a_size", "of_a_size is given no value"),
    ],
)
def test_what_a_step_does_not_take_is_counted(capsys, step, make, message):
    here = "tests.cli.wrong_steps"
    assert main(["plan", f"{here}:{step}", "--args", f"{here}:{make}"]) == 4
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_an_error_of_the_users_code_shows_where_it_is_and_no_other_code(capsys):
    here = "tests.cli.wrong_steps"
    assert main(["plan", f"{here}:failing_step", "--args", f"{here}:make_args"]) == 4
    error = capsys.readouterr().err
    assert error.count("Traceback") == 1
    assert error.splitlines()[-1].startswith("TypeError: dot_general requires")
    assert "in failing_step" in error
    assert "in inner" in error
    files = re.findall(r'File "(.*?)"', error)
    assert {Path(file).name for file in files} == {"wrong_steps.py"}
    assert main(["plan", f"{here}:train_step", "--args", f"{here}:no_file"]) == 4
    error = capsys.readouterr().err
    assert "in no_file" in error
    assert error.endswith("FileNotFoundError: [Errno 2] no such data\n")


def test_a_module_that_fails_shows_where(capsys):
    assert main(["plan", "tests.cli.broken_module:step", "--args", "x:y"]) == 4
    error = capsys.readouterr().err
    assert "broken_module.py" in error
    assert error.endswith("ValueError: of the module itself\n")


def test_an_error_of_files_is_a_line(files, capsys, monkeypatch):
    full = OSError(28, "No space left on device", "plan.json")
    monkeypatch.setattr(answers, "figures", mock.Mock(side_effect=full))
    assert main(["explain", files["0.4"]]) == 4
    error = capsys.readouterr().err
    assert "error: [Errno 28] No space left on device" in error


def test_an_error_of_jdelta_itself_is_shown_whole(files, capsys, monkeypatch):
    monkeypatch.setattr(answers, "figures", None)
    assert main(["explain", files["0.4"]]) == 4
    error = capsys.readouterr().err
    assert error.startswith("Traceback:\n")
    assert "in _explain" in error


def test_an_interrupted_command_says_so_in_a_line(capsys):
    here = "tests.cli.wrong_steps"
    assert main(["plan", f"{here}:train_step", "--args", f"{here}:interrupted"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_beginning_of_names_is_no_name(files, capsys):
    assert main(["explain", files["0.4"], "region"]) == 4
    error = capsys.readouterr().err
    assert "no residual called 'region'; did you mean 'region/*'? `jdelta explain PLAN" in error


def test_errors_are_said_in_one_place(files, capsys):
    assert main(["explain", files["0.4"], "nothing/such"]) == 4
    assert "no residual called 'nothing/such'" in capsys.readouterr().err
    assert main(["plan", *STEP, "--pin", "*=keep"]) == 4
    assert "keep" in capsys.readouterr().err


def test_it_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "jdelta", "targets", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert len(json.loads(done.stdout)) >= 6


def test_whoever_reads_its_words_may_stop_early():
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "jdelta", "targets"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a file that is full")
def test_a_full_disk_is_an_error_in_a_line():
    command = [sys.executable, "-m", "jdelta", "targets"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    message = "error: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (4, message)
