"""Check what the pages for developers and the reference say of the code; `make lint` runs it.

Who may import whom is in `.importlinter`. This is the rest: pages that name files, rules and
public names, each of which must be there.
"""

import importlib
import inspect
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp

import tenure

from .planted_faults import FAULTS

ROOT = Path(__file__).parents[1]
CODE = ROOT / "tenure"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
REFERENCE = ROOT / "docs" / "reference.md"
# the packages of `testing` are wide: whoever needs one of many parts names the part's module
ROOMS = ("adaptive", "profiler", "paging", "integrations")
# of a package all that it exports, of a module what it makes itself
PUBLIC_PACKAGES = (
    "tenure",
    "tenure.adaptive",
    "tenure.profiler",
    "tenure.paging",
    "tenure.testing",
)
PUBLIC_MODULES = (
    "tenure.adaptive.simple", "tenure.adaptive.explicit", "tenure.adaptive.execute",
    "tenure.integrations.accelerate", "tenure.integrations.lightning",
    "tenure.integrations.transformers",
)  # fmt: skip
# users can't pass them: they are there to be refused by name
REFUSED = {"self", "options", "_"}
# by Simulator.__call__, whose arguments it passes on
TOLD_ELSEWHERE = {"tenure.testing.simulated_accelerator"}
# a checkout, and the index that PyTorch has of its own
ELSEWHERE = re.compile(r"(^|[ \"'])(\.|/path/to/checkout)(\[|[ \"']|$)|--index-url")


def _named_files(page: Path) -> set[str]:
    return set(re.findall(r"`((?:tenure|tests|benchmarks)/[\w/.]+)`", page.read_text("utf-8")))


def missing_files() -> Iterator[str]:
    """Find files that the pages for developers name, and packages that they do not."""
    for page in (ARCHITECTURE, ROOT / "CONTRIBUTING.md"):
        for name in _named_files(page):
            if not (ROOT / name).exists():
                yield f"{page.name} names {name}, which is not there"
    text = ARCHITECTURE.read_text("utf-8")
    for path in CODE.glob("*/**/__init__.py"):
        name = path.parent.name
        if not re.search(f"`{name}`|/{name}/", text):
            yield f"architecture.md does not name the package {name}"
    for path in CODE.glob("_*.py"):
        if path.stem not in ("__init__", "__main__") and f"`tenure/{path.name}`" not in text:
            yield f"architecture.md does not name tenure/{path.name}"


def wrong_citations() -> Iterator[str]:
    """Find rules of notes that code cites and the page lacks, and notes that nothing cites."""
    rules = {}
    for part in re.split(r"^##+ ", ARCHITECTURE.read_text("utf-8"), flags=re.MULTILINE):
        if note := re.match(r"Note \[(.+)\]\n", part):
            rules[note[1]] = re.findall(r"^(\d+)\. ", part, re.MULTILINE)
    for name, numbers in rules.items():
        if numbers != [str(n + 1) for n in range(len(numbers))]:
            yield f"the rules of Note [{name}] are numbered {', '.join(numbers)}"
    cited = set()
    for path in CODE.rglob("*.py"):
        # a citation may go over the end of a line of comment
        text = re.sub(r"\s+(?:# )?", " ", path.read_text("utf-8"))
        for name, number in re.findall(r"Note \[(.+?)\], rules? (\d+)", text):
            cited.add(name)
            if number not in rules.get(name, ()):
                yield f"{path.relative_to(ROOT)} cites Note [{name}], rule {number}: there is none"
    for name in rules.keys() - cited:
        yield f"no code cites Note [{name}]"


def private_imports() -> Iterator[str]:
    """Find packages that take from another what its ``__init__`` does not export."""
    graph = grimp.build_graph("tenure", exclude_type_checking_imports=True)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            package, _, name = imported.rpartition(".")
            is_inside = f"{module}.".startswith(f"{package}.")
            if name.startswith("_") and not is_inside and imported.split(".")[1] in ROOMS:
                yield f"{module} imports {imported}, and not from what {package} exports"


def _public(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    exported = set(getattr(module, "__all__", ()))
    names = exported if name == "tenure" else exported | set(vars(module))
    for each in names - {"annotations"}:
        value = getattr(module, each)
        if each.startswith("_") or inspect.ismodule(value):
            continue
        is_its_own = inspect.isroutine(value) and value.__module__ == name
        if name in PUBLIC_PACKAGES or each in exported or is_its_own:
            yield f"{name}.{each}"


def wrong_reference() -> Iterator[str]:
    """Find public names that the reference lacks or repeats, and arguments without a text."""
    listed = []
    for section in re.split(r"^## ", REFERENCE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        names = re.findall(r"^\.\. auto\w+:: ([\w.]+)", section, re.MULTILINE)
        yield from (f"{n} stands under {heading}" for n in names if not n.startswith(f"{heading}."))
        listed += names
    expected = {name for each in (*PUBLIC_PACKAGES, *PUBLIC_MODULES) for name in _public(each)}
    yield from (f"reference.md lacks {name}" for name in expected - {*listed})
    yield from (f"reference.md has {name}, which is not public" for name in {*listed} - expected)
    yield from (f"reference.md has {name} twice" for name in listed if listed.count(name) > 1)
    for name in (expected & {*listed}) - TOLD_ELSEWHERE:
        module, _, attribute = name.rpartition(".")
        for argument in _without_text(getattr(importlib.import_module(module), attribute)):
            yield f"the docstring of {name} says nothing about {argument}"
    for name in set(_public("tenure.scopes")):
        if name.rpartition(".")[2] not in tenure.__all__:
            yield f"{name} is not in tenure"


def _without_text(value: object) -> set[str]:
    text = inspect.getdoc(value) or ""
    if not (inspect.isroutine(value) or "Args:" in text):
        return set()  # made by tenure, so it is shown without arguments
    called = value.__init__ if inspect.isclass(value) else value
    told = set(re.findall(r"^ +\**(\w+): ", text, re.MULTILINE))
    return set(inspect.signature(called).parameters) - REFUSED - told


def unknown_installs() -> Iterator[str]:
    """Find ``pip install`` of what neither an index nor a checkout has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {each for extra in project["optional-dependencies"].values() for each in extra}
    for folder in (CODE, ROOT / "docs"):
        for path in folder.rglob("*"):
            if path.suffix not in (".py", ".md") or path.name == "_extras.py":
                continue
            for command in re.findall(r"pip install ([^`\n]+)", path.read_text("utf-8")):
                named = set() if ELSEWHERE.search(command) else {*shlex.split(command)}
                yield from (f"{path.relative_to(ROOT)} installs {n}" for n in named - known)


def lost_faults() -> Iterator[str]:
    """Find planted faults whose line or tests are gone, and packages without one."""
    for fault in FAULTS:
        if (n := (CODE / fault.file).read_text("utf-8").count(fault.line)) != 1:
            yield f"{fault.file} has the line of a planted fault {n} times: {fault.line}"
        if not (ROOT / "tests" / fault.tests).exists():
            yield f"a planted fault in {fault.file} names {fault.tests}, which is not there"
    packages = {path.parent.name for path in CODE.glob("*/__init__.py")} - {"_demo"}
    for name in packages - {fault.file.partition("/")[0] for fault in FAULTS}:
        yield f"no fault is planted in {name}"
    if len(set(FAULTS)) < 60:
        yield f"only {len(set(FAULTS))} faults are planted, and not 60"


def tests_that_do_not_run() -> Iterator[str]:
    """Find tests on the simulated device in files that the Makefile runs only without it."""
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    (files,) = re.findall(r"^LIBRARY_TESTS := (.*)$", makefile, re.MULTILINE)
    for name in files.split():
        if re.search(r"\bsim\b", (ROOT / name).read_text("utf-8")):
            yield f"{name} asks for the simulated device: no target of the Makefile runs that"


RULES = (
    missing_files, wrong_citations, private_imports, wrong_reference, unknown_installs,
    lost_faults, tests_that_do_not_run,
)  # fmt: skip

if __name__ == "__main__":
    found = [each for rule in RULES for each in rule()]
    print(*sorted(found), sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
