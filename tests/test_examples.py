"""Every example runs, as its own docstring says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICK = ["plain", "linen", "nnx_modules", "equinox_modules", "fsdp"]


def run(*words):
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", *words],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_example_is_run_here():
    known = {*QUICK, "for_a_tpu", "gpt2", "ssd"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == known


@pytest.mark.parametrize("name", QUICK)
def test_training(name):
    text = run(f"examples/{name}.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]
    assert len(losses) >= 3
    assert losses[-1] < losses[0]
    assert "recompute" in text
    assert re.search(r"compiled peak +\d", text)


def test_a_language_model():
    text = run("examples/gpt2.py", "--steps", "6")
    assert "Largest relative difference" in text


def test_files_as_a_further_memory(tmp_path):
    text = run("examples/ssd.py", str(tmp_path))
    pairs = re.findall(r"loss (\d+\.\d+) with files, (\d+\.\d+) without", text)
    assert len(pairs) == 3
    assert all(float(a) == pytest.approx(float(b), rel=1e-5) for a, b in pairs)
    assert float(pairs[-1][0]) < float(pairs[0][0])
    (written,) = re.findall(r"written to files: (\d+) MiB", text)
    (forwarded,) = re.findall(r"before they were written: (\d+) MiB", text)
    assert int(written) > 0
    assert int(written) + int(forwarded) == pytest.approx(3 * 256, abs=1)
    (less, more) = re.findall(r"(\d+) MiB with files, (\d+) MiB without", text)[-1]
    assert int(less) < int(more)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.compiler
def test_for_a_tpu(tmp_path):
    pytest.importorskip("libtpu", reason="no TPU compiler here")
    page, plan = tmp_path / "page.html", tmp_path / "plan.json"
    text = run("examples/for_a_tpu.py", "--report", str(page), "--output", str(plan))
    assert "tpu:v5e:2x2" in text
    assert page.stat().st_size > 20_000
    assert plan.exists()
