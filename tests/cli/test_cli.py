"""The command line: what each command prints, for people and for programs, and how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jdelta
from jdelta._src.cli import main
from tests import small

STEP = ["tests.small:step", "--args", "tests.small:make_args"]


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


def test_a_plan_is_printed_and_written(files, capsys, tmp_path):
    page = tmp_path / "page.html"
    text = said(capsys, "plan", *STEP, "--budget", "0.4", "--donate", "0", "--report", str(page))
    plan = jdelta.plan(small.step, 0.4, *small.make_args(), donate_argnums=0)
    assert jdelta.load(files["0.4"]) == plan
    assert str(plan) in text
    assert page.read_text().startswith("<!doctype html>")


def test_json_has_all_figures(files, capsys):
    plan = jdelta.load(files["0.4"])
    got = record(capsys, "plan", *STEP, "--budget", "0.4", "--donate", "0")
    assert got["compiled_peak"] == plan.compiled_peak <= got["budget"] == plan.budget
    assert got["decisions"] == {name: d.value for name, d in plan.decisions.items()}
    assert record(capsys, "explain", files["0.4"]) == got


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


def test_nothing_fits(capsys):
    assert record(capsys, "max-batch", *STEP, "--budget", "1MiB", code=3)["batch"] == 0
    assert main(["plan", *STEP, "--budget", "1KiB"]) == 3
    assert "below the floor" in capsys.readouterr().err


def test_targets_need_no_compiler(capsys):
    listed = {target["name"]: target for target in record(capsys, "targets")}
    assert {"tpu:v5e:2x2", "cuda:h100:1x1x8"} <= set(listed)
    assert all(name in said(capsys, "targets") for name in listed)


def test_check_compiles_again(files, capsys):
    got = record(capsys, "check", files["0.4"], *STEP)
    planned, now = got["compiled peak"]
    assert planned == now == jdelta.load(files["0.4"]).compiled_peak
    assert got["within"]


def test_check_refuses_another_program(files, capsys):
    other = ["tests.small:unrolled_step", "--args", "tests.small:make_args"]
    assert main(["check", files["0.4"], *other]) == 4
    assert "another" in capsys.readouterr().err


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


def test_export(files, capsys):
    assert "remat_policy: custom" in said(capsys, "export", files["0.4"], "maxtext")
    assert "levanter" in record(capsys, "export", files["0.4"], "levanter")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "nowhere:step", "--args", "tests.small:make_args"], "no module 'nowhere'"),
        (["plan", "tests.small:other", "--args", "tests.small:make_args"], "has no 'other'"),
        (["plan", "tests.small", "--args", "tests.small:make_args"], "module:function"),
        (["plan", "tests.small:NOT_A_FUNCTION", "--args", "tests.small:make_args"], "is a int"),
        (["plan", *STEP, "--pin", "everything"], "PATTERN=DECISION"),
        (["explain", "nowhere.json"], "nowhere.json"),
        (["max-batch", *STEP, "--overhead", "much"], "such as 10%"),
    ],
)
def test_a_wrong_command_line_is_refused(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


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
