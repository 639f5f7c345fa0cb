"""Settings of the documentation: `make docs` builds it, and executes every code cell."""

import importlib.metadata
import os
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent

project = "flowrl"
author = "the flowrl authors"
copyright = "the flowrl authors"
version = release = importlib.metadata.version("flowrl")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_title = "flowrl"
html_static_path = ["_static"]
html_css_files = ["flowrl.css"]
html_theme_options = {
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "navbar_persistent": [],
    "use_download_button": False,  # it would offer the sources, which are not copied
}
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

# Cells run in a folder of their own, beside the installed commands.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # a cell takes seconds, and more where a machine is busy
nb_merge_streams = True
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(HERE / "_build" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Pages compile much and compute little, so XLA takes no pains over it.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false"
)
os.environ["COLUMNS"] = "88"
# A notebook starts commands by a fork, of which Python warns where JAX has been imported.
os.environ["PYTHONWARNINGS"] = "ignore:os.fork:RuntimeWarning"
# A page may import an example, and what it writes itself.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "examples"), "."])

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
# A name in single backquotes is a link where the reference has it.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_prompt_text = "$ "
