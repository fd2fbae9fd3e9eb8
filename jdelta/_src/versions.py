"""Versions: of this package, and of those that decide what becomes of a program."""

import functools
import importlib.metadata
import warnings

__version__ = "0.2.0"

DISTRIBUTION = "jax-delta"
"""What this package is installed as; `jdelta` is another project's name there, a JSON tool's."""

COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
"""Packages whose version may change a compiled program."""


@functools.cache
def version(package: str) -> str:
    """The version of an installed package; empty where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_with(extra: str) -> str:
    """The command that installs this package with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def warn_of_namesake() -> None:
    """Warn where that other project is installed too: its files have the same places as these."""
    namesake = version("jdelta")
    if namesake:
        warnings.warn(
            f"The distribution 'jdelta' {namesake} is installed here, too. It is another project, "
            "or an early version of this one, and has files where this one has its own: "
            f"pip uninstall jdelta, then pip install --force-reinstall {DISTRIBUTION}.",
            stacklevel=3,
        )


def versions() -> tuple[tuple[str, str], ...]:
    """What stages and plans a program here, each with its version."""
    return ("jdelta", __version__), *((package, version(package)) for package in ("jax", "jaxlib"))


def other_versions(then: tuple[tuple[str, str], ...]) -> str:
    """Which of the versions that a plan was made with are others here; empty if none is."""
    now = dict(versions())
    return ", ".join(
        f"{package} {old} (here {now.get(package, 'none')})"
        for package, old in then
        if old != now.get(package)
    )
