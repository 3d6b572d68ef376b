import torch

from tenure import NewDisposeScope


def test_a_leak_is_held_by_the_users_list_and_by_nothing_of_the_scope():
    history = []
    with NewDisposeScope("step", policy="report") as scope:
        history.append(torch.ones(2))
    (record,) = scope.leaks.records
    assert [holder.rpartition(".")[2] for holder in record.holders] == ["history[0]"]
