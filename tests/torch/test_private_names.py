"""A private name of torch that is gone stops only what needs it, and an error names it."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tenure
from tenure._torch import bound, getter, require
from tests.programs import run_program

_ROOT = Path(tenure.__file__).parent
_WORKER = Path(__file__).with_name("without_names.py")
# what is tried there
USES = (
    "scope", "backward_in_a_scope", "container", "retry", "budget", "sparse_in_a_budget", "step",
    "lines", "holders", "saved", "paged", "prediction", "simulated",
)  # fmt: skip

# In every pickled module of every program, so torch goes on reading them: a part of its format.
_PICKLED = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}

# By a word of what a name is needed for: the uses of without_names.py that may stop without it.
_MEANT = {
    "containers": {"container", "prediction"},
    "disposed tensors": {"scope"},
    "everything": set(USES),
    "memory_budget": {"budget", "sparse_in_a_budget"},
    "paging": {"paged"},
    "predictions": {"prediction"},
    "profiler": {"lines"},
    "scopes": {"scope", "backward_in_a_scope", "container", "retry", "step"},
    "simulated accelerator": {"simulated"},
    "sparse": {"sparse_in_a_budget"},
    "step": {"step"},
    "storages": set(USES),
    "who holds what": {"holders", "saved"},
}


def answer_to(take_away):
    done = run_program(_WORKER, stdin=json.dumps(take_away), has_tenure=False, hides=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_use_works_in_the_torch_that_is_here():
    _, raised = answer_to(False)[""]
    assert raised == dict.fromkeys(USES)


@pytest.mark.slow
def test_each_missing_name_stops_what_it_is_needed_for_and_nothing_else():
    """Also a name that nobody has listed: all are taken away in turn, as tenure has bound them."""
    answers = answer_to(True)
    of_none, of_all = answers.pop(""), answers.pop("all")
    assert set(of_none[1].values()) == {None}
    # every room imports, and says what is missing
    assert set(of_all[1]) == set(USES)
    assert all(re.fullmatch(r"torch[\w.]+", str(error)) for error in of_all[1].values())
    assert len(answers) > 100
    wrong = {}
    for name, (purposes, raised) in answers.items():
        stopped = {use: error for use, error in raised.items() if error is not None}
        meant = [uses for word, uses in _MEANT.items() if word in " ".join(purposes)]
        others = stopped.keys() - set().union(*meant) if purposes else ()
        if others or not all(error.startswith(name) for error in stopped.values()):
            wrong[name] = purposes, stopped
    assert wrong == {}


@pytest.mark.parametrize("missing", [bound, getter])
def test_a_missing_name_is_told_with_what_is_lost_and_what_to_do(missing):
    found = missing("torch._C._gone", "this test")
    message = (
        f"torch {torch.__version__} has no torch._C._gone, a private name that tenure needs for "
        "this test. Only that is lost. Install a torch that this tenure is tested with (see "
        "constraints.txt), or update tenure."
    )
    with pytest.raises(tenure.MissingTorchNameError, match=f"^{re.escape(message)}$") as caught:
        found(torch.ones(1))
    assert caught.value.name == "torch._C._gone"


@pytest.mark.parametrize(
    "use",
    [
        lambda gone: gone.attribute,
        lambda gone: isinstance(nn.Linear(1, 1), gone),
        lambda gone: isinstance(nn.Linear(1, 1), gone | nn.RReLU),
        lambda gone: issubclass(nn.Linear, gone),
        lambda gone: type("Derived", (gone,), {})(),
        lambda gone: require(len, gone),
    ],
)
def test_whatever_is_asked_of_a_missing_name_raises(use):
    gone = bound("torch._C._gone", "this test")
    with pytest.raises(tenure.MissingTorchNameError, match=r"has no torch\._C\._gone,"):
        use(gone)


def _private_attributes():
    """What torch's own objects have under a name of theirs that starts with an underscore."""
    leaf = torch.ones(1, requires_grad=True)
    objects = (
        leaf, leaf.untyped_storage(), nn.BatchNorm1d(1), torch.Generator(), (leaf * 2).grad_fn,
        torch.optim.SGD([leaf], lr=1.0), torch.ops.aten.add.Tensor,
    )  # fmt: skip
    names = {name for found in objects for name in dir(found) if re.match("_[a-z]", name)}
    return names - _PICKLED


_ATTRIBUTES = _private_attributes()


def _private_names(path):
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"torch\b", node.module or ""):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            of_ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if re.fullmatch(r"_?torch(\.\w+)+", text):
                yield text.removeprefix("_")
            elif node.attr in _ATTRIBUTES and not of_ours:
                yield f"torch.{node.attr}"


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(_ROOT.rglob("*.py")) if path.relative_to(_ROOT).parts[0] != "_torch"],
    ids=lambda path: str(path.relative_to(_ROOT)),
)
def test_private_names_of_torch_are_said_in_their_package_alone(path):
    assert [name for name in _private_names(path) if re.match(r"torch\b.*\._[a-zA-Z]", name)] == []


def test_the_reader_of_names_sees_each_way_to_say_one(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        inspect.cleandoc(
            """
            import torch._dynamo
            from torch._C import thing
            from torch.nn.modules.batchnorm import _BatchNorm
            torch._C._thing(storage._cdata)
            self._version, torch.__version__, module._buffers
            """
        )
    )
    private = {name for name in _private_names(path) if re.match(r"torch\b.*\._[a-zA-Z]", name)}
    assert private == {
        "torch._dynamo", "torch._C.thing", "torch.nn.modules.batchnorm._BatchNorm",
        "torch._C._thing", "torch._C", "torch._cdata",
    }  # fmt: skip
