import mmap
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenure.paging._host._mapped_file import tells_written, written_range

PAGE = mmap.PAGESIZE
N_PAGES = 8

pytestmark = pytest.mark.skipif(not tells_written(), reason="this system does not tell")


def mapped():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(range(256)) * (N_PAGES * PAGE // 256))
        file.flush()
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)


def test_reading_writes_nothing():
    pages = mapped()
    assert pages.sum() > 0
    assert written_range(pages.data_ptr(), pages.numel()) == (0, 0)


def test_a_range_that_cuts_pages_gets_offsets_of_its_own():
    pages = mapped()
    pages[PAGE] = 0
    assert written_range(pages.data_ptr() + PAGE + 10, 20) == (0, 20)
    assert written_range(pages.data_ptr() + PAGE - 10, 20) == (10, 20)
    assert written_range(pages.data_ptr() + 2 * PAGE - 10, 20) == (0, 10)


@given(
    written=st.lists(st.integers(0, N_PAGES * PAGE - 1), max_size=4),
    low=st.integers(0, N_PAGES * PAGE - 1),
    n_bytes=st.integers(1, N_PAGES * PAGE),
)
def test_the_range_is_from_the_first_to_the_last_page_that_was_written(written, low, n_bytes):
    pages = mapped()
    for byte in written:
        pages[byte] = 1
    high = min(low + n_bytes, pages.numel())
    begin, end = written_range(pages.data_ptr() + low, high - low)
    dirty = {byte // PAGE for byte in written}
    expected = [byte - low for byte in range(low, high) if byte // PAGE in dirty]
    assert list(range(begin, end)) == list(range(expected[0], expected[-1] + 1) if expected else [])
