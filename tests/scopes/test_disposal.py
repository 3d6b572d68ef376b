import pytest
import torch

from tenure import NewDisposeScope


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
