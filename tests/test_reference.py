"""The reference has every public name under its module, and each argument of it has a text."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import tenure

_PAGE = Path(tenure.__file__).parent.parent / "docs" / "reference.md"
pytestmark = pytest.mark.skipif(not _PAGE.exists(), reason="runs where the docs are")

# of a package all that it exports, of a module what it makes itself
_PACKAGES = (
    "tenure", "tenure.adaptive", "tenure.profiler", "tenure.paging", "tenure.testing",
)  # fmt: skip
_MODULES = (
    "tenure.adaptive.simple", "tenure.adaptive.explicit", "tenure.adaptive.execute",
    "tenure.integrations.accelerate", "tenure.integrations.lightning",
    "tenure.integrations.transformers",
)  # fmt: skip
_DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)", re.MULTILINE)
# what users can't pass: they are there to be refused by name
_REFUSED = {"self", "options", "_"}


def _public(module):
    exported = getattr(module, "__all__", None)
    names = set(exported or ()) | {name for name in vars(module) if not name.startswith("_")}
    for name in names - {"annotations"}:
        value = getattr(module, name)
        if not inspect.ismodule(value) and not name.startswith("__"):
            yield name, value


def _expected():
    for name in _PACKAGES:
        names = dict(_public(importlib.import_module(name)))
        if name == "tenure":
            names = {each: value for each, value in names.items() if each in tenure.__all__}
        yield from (f"{name}.{each}" for each in names)
    for name in _MODULES:
        module = importlib.import_module(name)
        exported = set(getattr(module, "__all__", ()))
        for each, value in _public(module):
            is_its_own = inspect.isroutine(value) and value.__module__ == name
            if each in exported or is_its_own:
                yield f"{name}.{each}"


def _sections():
    """The names that the page documents, by the module whose heading they stand under."""
    found = {}
    if not _PAGE.exists():  # asked as tests are collected, also where they are skipped then
        return found
    for section in re.split(r"^## ", _PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        found[heading] = [name for _, name in _DIRECTIVE.findall(section)]
    return found


def _value(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_name_stands_on_it_once():
    names = [name for section in _sections().values() for name in section]
    assert sorted(names) == sorted(_expected())


def test_each_name_stands_under_its_module():
    for heading, names in _sections().items():
        assert all(name.startswith(f"{heading}.") for name in names), heading
    assert len(_sections()) == 6


def test_scopes_has_the_same_names_as_tenure():
    names = {name for name, _ in _public(importlib.import_module("tenure.scopes"))}
    assert names
    assert names <= set(tenure.__all__)


@pytest.mark.parametrize("name", [name for section in _sections().values() for name in section])
def test_each_argument_has_a_text(name):
    value = _value(name)
    text = inspect.getdoc(value) or ""
    if not (inspect.isroutine(value) or "Args:" in text):
        return  # made by tenure, so it is shown without arguments
    called = value.__init__ if inspect.isclass(value) else value
    told = set(re.findall(r"^ +\**(\w+): ", text, re.MULTILINE))
    if name == "tenure.testing.simulated_accelerator":
        told |= set(
            inspect.signature(
                importlib.import_module("tenure.testing").Simulator.__call__
            ).parameters
        )
    assert set(inspect.signature(called).parameters) - _REFUSED <= told
