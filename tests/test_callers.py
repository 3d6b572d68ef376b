"""Whose frame is which: where warnings point, where a tensor was made, who called torch.

Two private functions are asked too, because every room uses them, and a user sees only texts.
"""

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tenure import (
    DisposedTensorError,
    NewDisposeScope,
    ScopeUsageWarning,
    TenureWarning,
    detach_from_scope,
    is_disposed,
    owner_of,
)
from tenure._callers import created_at, warn_user
from tenure._cells import cell_of
from tests.shells import opened


class ByHelper(TorchFunctionMode):
    """Calls on in a function that its handler calls."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._call(func, args, kwargs or {})

    def _call(self, func, args, kwargs):
        return self._really(func, args, kwargs)

    def _really(self, func, args, kwargs):
        return func(*args, **kwargs)


class Undecorated(TorchFunctionMode):
    """Its handler has a wrapper of dynamo around it."""

    @torch.compiler.disable
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = [lambda: torch.device("cpu"), ByHelper, Undecorated]
each_mode = pytest.mark.parametrize("mode", MODES, ids=["device", "helper", "disabled"])


@each_mode
def test_what_the_library_makes_under_a_mode_is_its_own(mode):
    norm, scaler = nn.BatchNorm1d(2), torch.amp.GradScaler("cpu")
    with NewDisposeScope() as scope:
        with mode():
            copied = copy.deepcopy(norm)
            norm.double()
            scaler.scale(torch.ones(1))
        assert owner_of(norm.running_mean) is owner_of(copied.running_mean) is None
        scope.dispose_everything()
    assert norm(torch.ones(3, 2, dtype=torch.float64)).shape == (3, 2)
    assert copied(torch.ones(3, 2)).shape == (3, 2)
    with NewDisposeScope() as scope, mode():
        assert scope.detach(scaler.scale(torch.ones(1))).item() == 2.0**16


@each_mode
def test_what_the_block_makes_under_a_mode_is_the_blocks_and_has_its_line(mode):
    with NewDisposeScope(capture="site") as scope, mode():
        x = torch.ones(2) + 1
        parts = x.split(1)
        copied = copy.deepcopy(x)
        assert len(scope) == 4
        line = created_at(x)
    assert all(map(is_disposed, (x, *parts, copied)))
    first = test_what_the_block_makes_under_a_mode_is_the_blocks_and_has_its_line.__code__
    assert line == f"tests/test_callers.py:{first.co_firstlineno + 3}"
    with pytest.raises(DisposedTensorError, match=line):
        x + 1


def test_the_handler_of_a_mode_may_be_called_by_hand_before_a_mode_calls_it():
    class Borrowing(ByHelper):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs)

    norm = nn.BatchNorm1d(2)
    with NewDisposeScope() as scope:
        by_hand = ByHelper().__torch_function__(torch.ones, (), (2,))
        assert by_hand in scope
        with Borrowing():
            norm.double()
        assert owner_of(norm.running_mean) is None


def test_a_site_is_known_of_what_a_scope_that_captures_saw_made_and_after_it_too():
    assert created_at(torch.ones(2)) is None
    with NewDisposeScope():
        assert created_at(torch.ones(2)) is None
    with NewDisposeScope(capture="site"):
        made = torch.ones(2)
        place = created_at(made)
        detach_from_scope(made)
    with NewDisposeScope(policy="report"):
        survivor = torch.ones(2)
    first = test_a_site_is_known_of_what_a_scope_that_captures_saw_made_and_after_it_too.__code__
    lines = [f"tests/test_callers.py:{first.co_firstlineno + n}" for n in (5, 9)]
    assert [created_at(made), created_at(survivor)] == lines
    assert place == lines[0]


CODE = "def below(): warn_user('here', TenureWarning)"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, __file__) for name in ("tenure.scopes", "torch.nn", "contextlib")),
        *((name, "below.py") for name in ("torchmetrics", "tenure._cli", "program")),
    ],
)
def test_code_of_the_library_is_passed_by_and_other_code_is_the_users(name, place):
    """A warning names the file of code of a module of that name, or of who calls it."""
    names = {"__name__": name, "warn_user": warn_user, "TenureWarning": TenureWarning}
    exec(compile(CODE, "below.py", "exec"), names)
    with pytest.warns(TenureWarning, match="here") as caught:
        names["below"]()
    assert caught[0].filename == place


@pytest.mark.parametrize("of_notebook", [False, True])
def test_a_file_is_told_by_its_path_in_a_notebook_too(of_notebook):
    with opened(of_notebook=of_notebook):
        assert cell_of(__file__) is None
        with pytest.warns(ScopeUsageWarning) as caught:
            warn_user("careful", ScopeUsageWarning)
    assert caught[0].filename == __file__


def test_a_program_that_has_imported_ipython_and_runs_no_shell_has_no_cells(monkeypatch):
    assert cell_of("<ipython-input-1-abc>") is None
    # as it is while another module of it is being imported
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    assert cell_of("<ipython-input-1-abc>") is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert cell_of("<ipython-input-1-abc>") is None
