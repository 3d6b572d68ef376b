import pytest
import torch

from tenure import NewDisposeScope, is_disposed
from tenure.scopes import _disposal


@pytest.mark.parametrize(
    "run", [lambda body: body, torch._dynamo.run], ids=["plain", "evaluated by torch.compile"]
)
def test_a_leak_is_held_by_the_users_list_and_by_nothing_of_the_scope(run):
    history = []

    def step():
        with NewDisposeScope("step", policy="report") as scope:
            history.append(torch.ones(2))
        return scope.leaks.records

    (record,) = run(step)()
    assert [holder.rpartition(".")[2] for holder in record.holders] == ["history[0]"]


def test_a_report_is_in_the_order_of_creation_where_an_address_was_used_again():
    kept = []
    with NewDisposeScope("step", policy="report") as scope:
        junk = [torch.zeros(1) for _ in range(50)]
        kept.append(torch.zeros(2))
        del junk
        kept.append(torch.zeros(3))
    assert [record.shape for record in scope.leaks.records] == [(2,), (3,)]


def test_an_exception_while_one_tensor_is_disposed_stops_no_other(monkeypatch):
    dispose_tensor = _disposal.dispose_tensor
    unlucky = []

    def dispose_or_interrupt(tensor, *args):
        if not unlucky:
            unlucky.append(tensor)
            raise KeyboardInterrupt
        return dispose_tensor(tensor, *args)

    made = []
    monkeypatch.setattr(_disposal, "dispose_tensor", dispose_or_interrupt)
    with pytest.raises(KeyboardInterrupt), NewDisposeScope():
        made += [torch.ones(1) for _ in range(4)]
    assert [is_disposed(tensor) for tensor in made if tensor is not unlucky[0]] == [True] * 3
    assert torch._C._len_torch_function_stack() == 0
