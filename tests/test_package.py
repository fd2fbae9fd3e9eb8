"""What is installed, under which name, and what it says of itself."""

import importlib.metadata
import re
import warnings
from pathlib import Path

import pytest

from jdelta import SpillError
from jdelta._src import versions
from jdelta._src.cli import main
from jdelta._src.spill import _build, library

ROOT = Path(__file__).parents[1]
TEXTS = [
    path
    for pattern in ("*.md", "*.toml", "docs/**/*.md", "jdelta/**/*.py", "examples/*.py")
    for path in sorted(ROOT.glob(pattern))
]


def test_it_is_installed_under_its_own_name():
    assert importlib.metadata.version(versions.DISTRIBUTION) == versions.__version__


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_nobody_is_told_to_install_another_project(path):
    for command in re.findall(r"pip install ([^`&\n]*)", path.read_text("utf-8")):
        named = re.findall(r"[\w.-]*jdelta[\w.-]*", command)
        assert set(named) <= {versions.DISTRIBUTION, "jax-delta."}, command
    assert not re.findall(
        r"(?<![\w-])jdelta\[(?:tpu|cuda|flax|plot|cli|examples|dev|docs)", path.read_text("utf-8")
    )


def test_a_namesake_is_warned_of(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: "0.1.0" * (package == "jdelta"))
    with pytest.warns(UserWarning, match="'jdelta' 0.1.0 .* another project, .*uninstall jdelta"):
        versions.warn_of_namesake()


def test_nothing_is_said_where_there_is_none(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of_namesake()


def test_the_command_says_whose_it_is(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert versions.__version__ in printed
    assert versions.DISTRIBUTION in printed


def test_a_wheel_without_a_library_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "NATIVE", tmp_path / "native")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(SpillError, match=f"pip install --no-binary {versions.DISTRIBUTION}"):
        library.find_library()
    built = tmp_path / "libjdelta_spill-of-the-wheel.so"
    built.touch()
    assert library.find_library() == built
