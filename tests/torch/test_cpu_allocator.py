import pytest
import torch

from tenure._torch import cpu_allocator


def test_where_the_table_of_sizes_cannot_be_reached_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(cpu_allocator, "_REPORTER", "no_such_symbol")
    cpu_allocator._table.cache_clear()
    try:
        assert not cpu_allocator.is_known()
        cpu_allocator.keep_sizes(True)
        cpu_allocator.enter(torch.ones(1).untyped_storage())
        assert cpu_allocator.live_bytes() == 0
    finally:
        cpu_allocator._table.cache_clear()


def test_the_counter_of_live_bytes_is_refused_where_none_behaves_like_it(monkeypatch):
    monkeypatch.setattr(cpu_allocator, "_counts", lambda word, n_bytes: False)
    with pytest.raises(LookupError, match=r"^0 counters of c10 look like that of live bytes$"):
        cpu_allocator._C10Table()
