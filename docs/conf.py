"""The site: `make docs` builds docs/_build/html. Nothing is fetched, not when it is read either."""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS / "extensions"), *(str(ROOT / x) for x in ("src", "tour")), str(ROOT)]
# Notebooks run in processes of their own; lessons import `lesson`, which stands beside them.
here = [str(ROOT / "src"), str(ROOT / "tour")]
os.environ["PYTHONPATH"] = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("OMP_NUM_THREADS", "2")

project = "tilewise"
author = copyright = "the tilewise authors"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "interactive",
    "languages",
    "lessons",
    "mathml",
    "notebooks",
    "report",
    "used_by",
]
source_suffix = [".md"]  # and `.py`, by nb_custom_formats
exclude_patterns = ["_build", "conf.py", "extensions", "jupyter_execute"]
highlight_language = "none"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"  # by the hash of what lessons see: see extensions/lessons.py
nb_execution_in_temp = True
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_ipywidgets_js = {}
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Groups of arguments of tilewise.attention
napoleon_custom_sections = [
    (name, "params_style")
    for name in ("Scores", "Masks", "Packed sequences", "KV cache", "Eight bits", "Execution")
]
add_module_names = False
default_role = "py:obj"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

templates_path = ["_templates"]
html_theme = "furo"
html_title = "tilewise"
html_favicon = "_static/tilewise.svg"
html_logo = "_static/tilewise.svg"
html_static_path = ["_static", "../tour/diagrams/diagrams.css"]
html_css_files = ["tilewise.css", "diagrams.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_math_renderer = "mathml"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/languages.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b5c8a",
        "color-brand-content": "#0b5c8a",
        "color-brand-visited": "#5b4b8a",
        "color-code-background": "#f4f6f8",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cc7f2",
        "color-brand-content": "#7cc7f2",
        "color-brand-visited": "#b9a9ec",
    },
}
