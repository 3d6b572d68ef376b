"""Who may import whom; held by reading the source, so that a lazy import counts too."""

import ast
from functools import cache
from pathlib import Path

import pytest

import tenure

_ROOT = Path(tenure.__file__).parent
_MAY_IMPORT = {
    "scopes": set(),
    "profiler": {"scopes"},
    "adaptive": {"scopes", "profiler"},
    "paging": {"scopes", "profiler", "adaptive"},
    "integrations": {"scopes", "profiler", "adaptive"},
    "testing": set(),
    "_pytest": {"scopes", "profiler"},
    "_demo": {"scopes", "adaptive", "paging"},
    "_cli": {"scopes", "profiler", "adaptive", "paging", "_demo"},
}
# What belongs to no room, the lowest first: one home for each idea that several rooms share. A
# module of `_torch` that words what it refuses, or looks at the heap, stands above what it uses.
_GROUND = (
    "_errors",
    "_byte_sizes",
    "_extras",
    "_visible",
    "_report_files",
    "_reserve",
    "_torch",
    "_devices",
    "_without_data",
    "_storages",
    "_text",
    "_oom",
    "_torch.lending",
    "_cells",
    "_callers",
    "_containers",
    "_registries",
    "_cuda_blocks",
    "_host_memory",
    "_heap",
    "_graph_capture",
    "_torch.device_allocator",
    "_account",
    "_stream",
    "_show",
)
# The packages of a package, the lowest first; each may import those before it.
_PACKAGES = {
    ("adaptive",): (
        "_ranks",
        "_memory",
        "_undo",
        "_attempt",
        "_predict",
        "_sizes",
        "_decorators",
        "_step",
        "_advice",
        "_plan",
        "_lazy",
    ),
    ("adaptive", "_predict"): ("_scratch", "_brought_back"),
    ("adaptive", "_step"): (
        "_gradients",
        "_samples",
        "_modules",
        "_split",
        "_across",
        "_verify",
    ),
    ("_cli",): ("_program", "_fleet"),
    ("integrations",): ("_lightning", "_transformers"),
    ("profiler",): (
        "_lines",
        "_owners",
        "_reports",
        "_oom_report",
        "_courtesy",
        "_timeline",
        "_recording",
    ),
    ("paging",): (
        "_model",
        "_host",
        "_checkpoint",
        "_link",
        "_device",
        "_training",
        "_sharing",
        "_forward",
        "_planning",
    ),
    ("testing",): ("_allocator", "_device", "_operators", "_interface"),
}


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


@cache
def _all_imports():
    """Pairs of names: who imports what of `tenure`."""
    return [
        (_name_of(path), imported)
        for path in sorted(_ROOT.rglob("*.py"))
        for imported in _imports(ast.parse(path.read_text("utf-8")), path)
        if imported[0] == "tenure" and imported[1:]
    ]


def _told(offences):
    return [f"{'.'.join(name)} imports {'.'.join(imported)}" for name, imported in offences]


def test_a_room_imports_only_the_rooms_below_it_and_the_ground_none():
    def may(name, imported):
        room = name[1:2]
        if room in ((), ("__main__",), ("_errors",)) or imported[1:2] == room:
            return True
        return imported[1] not in _MAY_IMPORT or imported[1] in _MAY_IMPORT.get(room[0], ())

    assert _told(each for each in _all_imports() if not may(*each)) == []


def test_one_module_of_paging_alone_asks_adaptive_and_only_when_it_runs():
    asking = {
        name
        for name, imported in _all_imports()
        if name[1:2] == ("paging",) and imported[1:2] == ("adaptive",)
    }
    assert asking == {("tenure", "paging", "_planning", "_peak")}
    path = _ROOT / "paging" / "_planning" / "_peak.py"
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    assert not any(imported[1:2] == ("adaptive",) for imported in _imports(tree, path))


def _place_in_the_ground(name):
    """The place of a module, or of what is imported from one; None outside of the ground."""
    places = [_GROUND.index(each) for each in (".".join(name[1:3]), *name[1:2]) if each in _GROUND]
    return places[0] if places else None


def test_the_ground_imports_no_module_of_the_ground_above_itself():
    at = {path.relative_to(_ROOT).parts[0].removesuffix(".py") for path in _ROOT.glob("_*")}
    assert at - {"__init__", "__main__", "__pycache__", "_demo", "_cli", "_pytest"} == {
        each for each in _GROUND if "." not in each
    }
    places = ((_place_in_the_ground(n), _place_in_the_ground(i), n, i) for n, i in _all_imports())
    assert (
        _told(
            (name, imported)
            for place, other, name, imported in places
            if place is not None and other is not None and other > place
        )
        == []
    )


def test_no_module_imports_private_names_of_another_room():
    assert (
        _told(
            (name, imported)
            for name, imported in _all_imports()
            if imported[1:2] != name[1:2]
            and imported[1] in _MAY_IMPORT
            and any(part.startswith("_") for part in imported[2:])
        )
        == []
    )


def _inside(package):
    """The imports from one package inside another into a second one; each with their places."""
    n = len(package) + 1
    for name, imported in _all_imports():
        if (
            name[1:n] == imported[1:n] == package
            and imported[n:]
            and name[n:][:1] != imported[n : n + 1]
        ):
            yield name, imported


@pytest.mark.parametrize("package", _PACKAGES, ids=".".join)
def test_a_package_imports_only_those_below_it(package):
    order, n = _PACKAGES[package], len(package) + 1
    assert set(order) == {
        path.parent.name for path in _ROOT.joinpath(*package).glob("*/__init__.py")
    }
    assert (
        _told(
            (name, imported)
            for name, imported in _inside(package)
            if name[n:] and name[n] in order and imported[n] in order[order.index(name[n]) :]
        )
        == []
    )


# the packages of `testing` are wide: whoever needs one of many parts names the part's module
@pytest.mark.parametrize("package", sorted({*_PACKAGES} - {("testing",)}), ids=".".join)
def test_a_package_is_used_by_what_its_init_exports(package):
    n = len(package) + 1
    assert (
        _told(
            (name, imported)
            for name, imported in _inside(package)
            if imported[n] in _PACKAGES[package]
            and imported[n + 1 :][:1]
            and imported[n + 1][0] == "_"
        )
        == []
    )


def test_the_reader_of_imports_sees_relative_and_nested_ones():
    source = "def f():\n    from ..adaptive import _ranks\nimport tenure.paging._link"
    path = _ROOT / "scopes" / "_scope.py"
    assert set(_imports(ast.parse(source), path)) == {
        ("tenure", "adaptive", "_ranks"),
        ("tenure", "paging", "_link"),
    }
