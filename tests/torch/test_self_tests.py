"""The private names of torch that tenure stands on still do what it takes them for."""

import json
import re
import sys
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

from tenure import NewDisposeScope, TenureWarning, is_disposed, statistics
from tenure._torch import (
    _stand_in,
    autograd,
    bound,
    cpu_allocator,
    modes,
    optional,
    quiet,
    storages,
    swap,
)
from tenure._torch.counting import OF_CPP, SOLE
from tenure.scopes import _self_test, _tracker
from tests.programs import run_program

# --- what is asked at run time


def test_a_block_from_before_is_seen_to_end_once_it_is_entered():
    old = torch.empty(96, dtype=torch.uint8, device="cpu")
    cpu_allocator.keep_sizes()
    try:
        cpu_allocator.enter(old.untyped_storage())
        before = cpu_allocator.live_bytes()
        del old
        assert cpu_allocator.is_known()
        assert cpu_allocator.live_bytes() == before - 96
        assert cpu_allocator.is_lazily_copied(optional("torch._lazy_clone")(torch.ones(1)))
    finally:
        cpu_allocator.keep_sizes_as_before()


def test_a_block_that_is_freed_unseen_is_counted_and_c10_does_not_log_it(capfd):
    old = torch.empty(96, dtype=torch.uint8, device="cpu")
    with cpu_allocator.sizes_kept():
        count = cpu_allocator._table().n_unseen
        before = count.value
        del old
        assert (before, count.value) == (1, 2)
    assert capfd.readouterr().err == ""


# --- autograd


def test_a_hook_has_the_engine_below_it():
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(
        lambda _: seen.append((autograd.is_in_engine(sys._getframe()), autograd.is_running_node()))
    )
    product = leaf * leaf
    product.backward()
    assert seen == [(True, True)]
    assert autograd.hooks_of(leaf)
    assert not autograd.post_hooks_of(leaf)
    with pytest.raises(RuntimeError, match=autograd.BACKWARD_TWICE):
        product.backward()
    assert not autograd.is_running_node()


def test_the_end_of_a_pass_is_told_and_a_pass_that_fails_lets_go_of_who_is_told():
    told = []

    class Ending:
        def __call__(self):
            told.append("end")

        def __del__(self):
            told.append("gone")

    def fail(_):
        autograd.at_end_of_backward(Ending())
        raise ZeroDivisionError

    def end(_):
        autograd.at_end_of_backward(lambda: told.append("end"))

    for hook in (end, fail):
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(hook)
        with suppress(ZeroDivisionError):
            leaf.sum().backward()
    assert told == ["end", "gone"]


# --- storages


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_view_and_a_graph_are_seen_to_hold_a_tensor_and_their_end_too(mode):
    holder = {0: nn.Parameter(torch.ones(2, 2), requires_grad=False)}
    assert not storages.is_held(holder, 0)
    with mode():
        view = holder[0].t()[0]
    assert storages.is_held(holder, 0)
    del view
    product = torch.ones(2, 2, requires_grad=True) * holder[0]
    assert storages.is_held(holder, 0)
    del product
    assert not storages.is_held(holder, 0)


# --- modes


class Seeing(modes.DispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Refusing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, *_):
        raise AssertionError("a quiet block ran a mode")


def test_modes_of_both_kinds_and_transforms_see_nothing_of_quiet_blocks():
    seen = []
    is_wrapped = bound("torch._C._functorch.is_functorch_wrapped_tensor", "this test")

    def transformed(x):
        for block in (quiet.aside, quiet.aside_with_subclasses):
            with Seeing(seen), block():
                made = torch.ones(1, device="cpu") + 1
            assert not is_wrapped(made)
        return x * 2

    torch.func.vmap(transformed)(torch.ones(2))
    t = torch.ones(1)
    with Refusing(), Seeing(seen), quiet.quietly():
        t + 1
    assert seen == []


# --- at import: a torch or a Python with which scopes would dispose gradients is refused


def test_the_self_test_of_scopes_passes_in_any_mode_and_counts_nothing():
    before = str(statistics())
    with torch.inference_mode(), torch.device("meta"), torch.no_grad():
        _self_test.check()
    assert str(statistics()) == before


def test_a_gradient_that_is_taken_for_a_new_tensor_is_noticed(monkeypatch):
    # as it was on Python 3.14: of a gradient that is read, one reference went uncounted
    monkeypatch.setattr(_tracker, "SOLE", SOLE + OF_CPP)
    with pytest.raises(ImportError, match=r"on Python 3.*: a scope disposes gradients that were"):
        _self_test.check()


def test_without_the_name_that_frees_a_tensor_it_passes_and_scopes_leave_tensors_alone(monkeypatch):
    """A handle that is disposed without a twin would be what `.grad` gives."""
    name = "torch._C._swap_tensor_impl"
    monkeypatch.setattr(swap, "_swap", _stand_in(name, "freeing memory"))
    with pytest.warns(TenureWarning, match=name):
        _self_test.check()
    with pytest.warns(TenureWarning, match=name), NewDisposeScope():
        made = torch.ones(3)
    assert not is_disposed(made)
    assert made.sum() == 3


REFUSED = (
    r"tenure can't be used with torch \S+ on Python 3\.\S+: reference counts don't say what else "
    r"holds a tensor, so a scope could free gradients that are in use\. Use torch 2\.10 or later "
    r"on a Python with the GIL \(docs/versions\.md lists tested versions\)\."
)
# as if gradients counted as new tensors, and as if there were no GIL
COUNTS, GIL = "sys.getrefcount = lambda _: 2", "sys._is_gil_enabled = lambda: False"
PROGRAM = """
import json, runpy, sys, tenure
{}
refused = []
for name in ("DisposeScope", "adaptive", "paging", "profiler", "testing"):
    try:
        getattr(tenure, name)
    except ImportError as error:
        refused.append(str(error))
print(json.dumps(refused), flush=True)
sys.argv = ["tenure", "report", sys.argv[1]]
runpy.run_module("tenure", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [COUNTS, GIL])
def test_each_name_of_tenure_is_refused_and_the_command_line_says_so_in_one_line(spoiled, tmp_path):
    file = tmp_path / "report.json"
    file.write_text("{}")
    done = run_program(PROGRAM.format(spoiled), str(file), has_tenure=False)
    refused = json.loads(done.stdout)
    assert len(refused) == 5
    assert all(re.fullmatch(REFUSED, error) for error in refused)
    (line,) = done.stderr.splitlines()
    assert line.startswith("tenure report: error: tenure can't be used with torch ")
    assert done.returncode == 2
