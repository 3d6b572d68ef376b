"""Who may import whom; held by reading the source, so that a lazy import counts too."""

import ast
from pathlib import Path

import pytest

import tenure

_ROOT = Path(tenure.__file__).parent
_MAY_IMPORT = {
    "scopes": set(),
    "profiler": {"scopes"},
    "adaptive": {"scopes", "profiler"},
    "paging": {"scopes", "profiler"},
    "testing": set(),
    "_demo": {"scopes", "profiler", "adaptive", "paging"},
    "_cli": {"scopes", "profiler", "adaptive", "paging", "_demo"},
}
# The packages of a package, the lowest first; each may import those before it.
_PACKAGES = {
    ("adaptive",): (
        "_oom",
        "_memory",
        "_undo",
        "_attempt",
        "_sizes",
        "_decorators",
        "_step",
    ),
    ("adaptive", "_step"): (
        "_gradients",
        "_samples",
        "_loss",
        "_modules",
        "_split",
        "_check",
        "_verify",
    ),
    ("profiler",): ("_allocator", "_trace", "_lines", "_owners", "_reports", "_courtesy"),
    ("paging",): (
        "_model",
        "_host",
        "_checkpoint",
        "_link",
        "_device",
        "_inside",
        "_planning",
    ),
    ("testing",): ("_allocator", "_device", "_operators", "_interface"),
}
_FILES = sorted(_ROOT.rglob("*.py"))


def _name_of(path):
    parts = ("tenure", *path.relative_to(_ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(tree, path):
    """The dotted names, as tuples, that a module imports; those of `from` with what they take."""
    name = _name_of(path)
    package = name if path.name == "__init__.py" else name[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)


def _imports_of_other_rooms(path):
    room = _name_of(path)[1:2]
    for imported in _imports(ast.parse(path.read_text("utf-8")), path):
        if imported[0] == "tenure" and imported[1:2] != room and imported[1:2]:
            yield imported


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_a_room_imports_only_the_rooms_below_it(path):
    room = (*_name_of(path)[1:2], "")[0]
    rooms = {imported[1] for imported in _imports_of_other_rooms(path)} & set(_MAY_IMPORT)
    assert rooms <= _MAY_IMPORT.get(room, _allowed_outside_rooms(path))


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_no_module_imports_private_names_of_another_room(path):
    private = [
        ".".join(imported)
        for imported in _imports_of_other_rooms(path)
        if imported[1] in _MAY_IMPORT and any(part.startswith("_") for part in imported[2:])
    ]
    assert private == []


def _shown(package):
    return ".".join(package)


@pytest.mark.parametrize("package", _PACKAGES, ids=_shown)
def test_a_package_imports_only_those_below_it(package):
    order = _PACKAGES[package]
    home = _ROOT.joinpath(*package)
    assert set(order) == {path.parent.name for path in home.glob("*/__init__.py")}
    n = len(package) + 1
    for path in sorted(home.glob("*/**/*.py")):
        own = order.index(_name_of(path)[n])
        for imported in _imports(ast.parse(path.read_text("utf-8")), path):
            if imported[1:n] == package and imported[n] in order[own + 1 :]:
                pytest.fail(f"{'.'.join(_name_of(path))} imports {'.'.join(imported)}")


# the packages of `testing` are wide: whoever needs one of many parts names the part's module
@pytest.mark.parametrize("package", sorted({*_PACKAGES} - {("testing",)}), ids=_shown)
def test_a_package_is_used_by_what_its_init_exports(package):
    n = len(package) + 1
    for path in sorted(_ROOT.joinpath(*package).rglob("*.py")):
        for imported in _imports(ast.parse(path.read_text("utf-8")), path):
            other = imported[1:n] == package and imported[n] != (*_name_of(path), "")[n]
            if other and imported[n] in _PACKAGES[package] and imported[n + 1 :]:
                assert not imported[n + 1].startswith("_"), f"{path} imports {'.'.join(imported)}"


def _allowed_outside_rooms(path):
    if path.name == "__main__.py":
        return {"_cli"}
    return {"scopes", "profiler", "adaptive", "paging", "testing"}


def test_the_reader_of_imports_sees_relative_and_nested_ones():
    source = "def f():\n    from ..adaptive import _oom\nimport tenure.paging._link"
    path = _ROOT / "scopes" / "_scope.py"
    assert set(_imports(ast.parse(source), path)) == {
        ("tenure", "adaptive", "_oom"),
        ("tenure", "paging", "_link"),
    }
