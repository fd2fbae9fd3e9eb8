"""Builds the native part with the machine's C++ compiler; also what ``hatch_build.py`` runs.

It stands alone (standard library only, no import of jdelta), because it runs before jdelta is
installed. The library is no Python extension: nothing of it depends on the Python version, nor, as
XLA's FFI is a C interface, on the version of jaxlib whose headers it was built with.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
FLAGS = "-std=c++17 -O2 -fPIC -shared -fvisibility=hidden -pthread".split()
COMPILERS = ("c++", "g++", "clang++")
ANY_LIBRARY = "libjdelta_spill-*.so"


class BuildError(Exception):
    """The native part cannot be built; says why."""


def has_sources() -> bool:
    """Whether the sources are here: in a checkout, not in a wheel."""
    return NATIVE.is_dir()


def library_name() -> str:
    """File name of the library; another one when the sources or the platform are others."""
    digest = hashlib.sha256(shlex.join(FLAGS).encode())
    for source in sorted(NATIVE.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"libjdelta_spill-{platform}-{digest.hexdigest()[:16]}.so"


def build(folder: Path) -> Path:
    """Compiles the library into ``folder``, whole or not at all.

    Raises:
        BuildError: There is no compiler or no jaxlib, or the compiler does not accept the sources.
    """
    command = [*compiler(), *FLAGS, f"-I{_headers()}", *map(str, sorted(NATIVE.glob("*.cc")))]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as temporary:
            built = Path(temporary) / library_name()
            _run([*command, "-o", str(built)])
            return Path(shutil.move(built, folder / built.name))
    except OSError as error:
        raise BuildError(f"{folder}: {error}") from error


def compiler() -> list[str]:
    """The C++ compiler: ``$CXX``, or the first one found."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path")


def _headers() -> Path:
    """Where XLA's FFI headers are; jaxlib itself is not imported."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise BuildError("jaxlib, whose headers are needed, is not installed")
    return Path(spec.origin).parent / "include"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
