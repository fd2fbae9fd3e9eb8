"""Versions: of this package, and of those that decide what becomes of a program."""

import importlib.metadata

__version__ = "0.1.0"

COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
"""Packages whose version may change a compiled program."""


def version(package: str) -> str:
    """The version of an installed package; empty where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


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
