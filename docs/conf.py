"""How the site is built: ``pip install -e '.[docs]' && sphinx-build -W docs site``."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

# The notebook runs on the CPU, and asks no network where there is a TPU or a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from jdelta._src.versions import __version__  # noqa: E402

project = "jdelta"
author = "the jdelta authors"
version = release = __version__
html_show_copyright = False
html_title = f"jdelta {__version__}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated",
]
templates_path = ["_templates"]
exclude_patterns = ["_ext", "_static", "_templates", "**/.ipynb_checkpoints"]
root_doc = "index"

# Markdown and the notebook

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"  # what the notebook prints is that of this version, never an older one
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]

# Python: signatures without types, which the docstrings say in words

autosummary_generate = True
autosummary_filename_map = {  # where a function is called like a class, but for one capital
    f"jdelta.{name}": f"jdelta.{name}-class"
    for name in ("Endurance", "Frontier", "Largest", "Plan", "Schedule")
}
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False

# Every reference leads somewhere, but for those to other projects: no inventory is fetched.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(jax|numpy|np|matplotlib|collections|typing|Any|object)(\..*)?"),
    (r"py:class", r"optional|Axes|Figure"),
    (r"py:exc", r"[A-Z]\w*Error"),  # of Python
]

# `sphinx-build -b doctest`: the pages' examples. Those in docstrings are run by pytest.

doctest_test_doctest_blocks = ""
doctest_global_setup = (HERE / "_ext" / "example_step.py").read_text("utf-8")

# `sphinx-build -b linkcheck`, where there is a network. Anchors of the site are checked always.

linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]
linkcheck_ignore = [r"https://doi\.org/.*"]

# Looks

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
