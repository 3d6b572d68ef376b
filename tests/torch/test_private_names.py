"""A private name of torch that is gone stops only what needs it, and an error names it."""

import ast
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

# In every pickled module of every program, so torch goes on reading them: a part of its format.
_PICKLED = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}


@pytest.mark.slow
def test_missing_names_stop_what_they_are_needed_for_and_nothing_else():
    done = run_program(_WORKER, has_tenure=False, hides=True)
    assert done.returncode == 0, done.stderr
    first, second, everything = json.loads(done.stdout)
    assert {"scopes", "memory_budget", "step"} <= first.keys()
    assert first.keys().isdisjoint(
        {"profiler", "who holds what", "paging", "simulated accelerator"}
    )
    assert second.keys().isdisjoint({"scopes", "step"})
    assert first.keys() | second.keys() == everything.keys()
    for raised in (first, second, everything):
        assert all(re.fullmatch(r"torch[\w.]+", name) for name in raised.values()), raised


@pytest.mark.parametrize("bind", [bound, getter])
def test_a_missing_name_is_told_with_what_is_lost_and_what_to_do(bind):
    found = bind("torch._C._gone", "this test")
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
        lambda gone: isinstance(nn.Linear(1, 1), gone | nn.RReLU),
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


def _names(path, attributes):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and re.match(r"torch\b", node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            text = ast.unparse(node)
            of_ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if re.fullmatch(r"_?torch(\.\w+)+", text):
                yield text.removeprefix("_")
            elif node.attr in attributes and not of_ours:
                yield f"torch.{node.attr}"


def test_private_names_of_torch_are_said_in_their_package_alone():
    attributes = _private_attributes()
    may_say_one = re.compile(rf"torch[\w.]*\._|\.({'|'.join(attributes)})\b").search
    said = {
        (str(path), name)
        for path in _ROOT.rglob("*.py")
        if path.relative_to(_ROOT).parts[0] != "_torch" and may_say_one(path.read_text("utf-8"))
        for name in _names(path, attributes)
        if re.match(r"torch\b.*\._[a-zA-Z]", name)
    }
    assert said == set()
