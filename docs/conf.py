"""Sphinx configuration; `make docs` builds the site."""

import tenure

project = "tenure"
author = "The tenure developers"
copyright = f"2026, {author}"
version = release = tenure.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"tenure {version}"
