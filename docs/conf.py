"""Sphinx configuration; `make docs` builds the site."""

import tenure

project = "tenure"
author = "The tenure developers"
copyright = f"2026, {author}"
version = release = tenure.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"

# the prompts of a session are not copied, nor what it printed
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"tenure {version}"
