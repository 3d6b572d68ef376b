"""Sphinx configuration; `make docs` builds the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer

import tenure

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "tenure"
author = "The tenure developers"
copyright = f"2026, {author}"
version = release = tenure.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_typehints = "description"
# an argument is told once: with its text, and not again for its type alone
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
default_role = "py:obj"  # of names between single backticks, in docstrings
python_use_unqualified_type_names = True

# the prompts of a session are not copied, nor what it printed
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_title = f"tenure {version}"


def _signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str, result: str
) -> tuple[str, str] | None:
    """Show the arguments of a class where users make it, and none that are there to be refused."""
    if what == "function":
        # one signature that can be read; what else the overloads say, the text says in words
        analyzer = ModuleAnalyzer.for_module(obj.__module__)
        analyzer.analyze()
        analyzer.overloads.clear()
    if not signature:
        return None
    if what in ("class", "exception") and "Args:" not in (obj.__doc__ or ""):
        return "", ""
    return re.sub(r"\*(options|others)(?=,)", "*", signature), result


def _types(app: Sphinx, domain: str, kind: str, content: nodes.Element) -> None:
    """Write plainly what Sphinx reads wrongly, Literals and TypeVars; leave out a result of Any."""
    for name in list(content.findall(nodes.field_name)):
        if name.astext() == "rtype" and name.parent[-1].astext().endswith("typing.Any"):
            name.parent.parent.remove(name.parent)
        elif name.astext().startswith(("type", "rtype")):
            for text in list(name.parent[-1].findall(nodes.Text)):
                plain = re.sub(r"~(\w+)(?![\w.])", r"\1", text)
                if "Literal[" in plain:
                    plain = re.sub(r"~(?:\w+\.)+", "", plain)
                text.parent.replace(text, nodes.Text(plain))


def setup(app: Sphinx) -> None:
    """Register the hooks of the site with Sphinx."""
    app.connect("autodoc-process-signature", _signature)
    # behind autodoc's own, which adds them
    app.connect("object-description-transform", _types, priority=900)
