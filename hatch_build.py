"""Builds the native part of the SSD tier into the wheel, or an editable install into the tree.

Without a compiler the installation goes on: all of jdelta but ``spill=`` works, which says at its
first use what is missing. A checkout has the sources, so it builds then, too; a wheel has none.
"""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "jdelta" / "_src" / "spill"


def _load_build() -> Any:
    """``jdelta/_src/spill/_build.py``, without importing jdelta, which is not installed yet."""
    spec = importlib.util.spec_from_file_location("_build", PACKAGE / "_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeBuildHook(BuildHookInterface):
    """Adds the native library to the wheel and says so in its tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects the files of a wheel."""
        native = _load_build()
        for old in PACKAGE.glob(native.ANY_LIBRARY):
            old.unlink()
        try:
            library = native.build(PACKAGE)
        except native.BuildError as error:
            self.app.display_warning(f"jdelta is installed without spill=: {error}")
            return
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
