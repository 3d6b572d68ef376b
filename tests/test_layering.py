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
    "_cli": {"scopes", "profiler", "adaptive", "paging"},
    "testing": set(),
}
# The packages of a room, the lowest first; each may import those before it.
_PACKAGES = {"adaptive": ("_oom", "_memory", "_retry", "_sizes", "_functions", "_step")}
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


@pytest.mark.parametrize("room", _PACKAGES)
def test_a_package_of_a_room_imports_only_packages_below_it(room):
    packages = _PACKAGES[room]
    assert set(packages) == {path.parent.name for path in (_ROOT / room).glob("*/__init__.py")}
    for path in sorted((_ROOT / room).glob("*/*.py")):
        own = packages.index(path.parent.name)
        for imported in _imports(ast.parse(path.read_text("utf-8")), path):
            if imported[1:2] == (room,) and imported[2] in packages[own + 1 :]:
                pytest.fail(f"{'.'.join(_name_of(path))} imports {'.'.join(imported)}")


@pytest.mark.parametrize("room", _PACKAGES)
def test_a_package_of_a_room_is_used_by_what_its_init_exports(room):
    for path in sorted((_ROOT / room).rglob("*.py")):
        for imported in _imports(ast.parse(path.read_text("utf-8")), path):
            own = _name_of(path)[2:3]
            other = imported[1:2] == (room,) and imported[2:3] != own
            if other and imported[2] in _PACKAGES[room] and imported[3:4]:
                assert not imported[3].startswith("_"), f"{path} imports {'.'.join(imported)}"


def _allowed_outside_rooms(path):
    if path.name == "__main__.py":
        return {"_cli"}
    return {"scopes", "profiler", "adaptive", "paging", "testing"}


def test_the_reader_of_imports_sees_relative_and_nested_ones():
    source = "def f():\n    from ..adaptive import _retry\nimport tenure.paging._ring"
    path = _ROOT / "scopes" / "_scope.py"
    assert set(_imports(ast.parse(source), path)) == {
        ("tenure", "adaptive", "_retry"),
        ("tenure", "paging", "_ring"),
    }
