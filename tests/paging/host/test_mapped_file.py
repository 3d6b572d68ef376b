import os

import pytest
import torch

from tenure.paging import PagingError
from tenure.paging._host import _mapped_file as module
from tenure.paging._host._mapped_file import MappedFile

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=["told", "untold"])
def file(request, path, monkeypatch):
    """A mapped file where the kernel tells which pages were written, and where it does not."""
    if request.param == "untold":
        monkeypatch.setattr(module, "tells_written", lambda: False)
    file = opened(path)
    yield file
    file.close()


def opened(path, **options):
    with path.open("rb") as file:
        return MappedFile(file, path.name, **options)


def read(file, offset, n_bytes):
    target = torch.zeros(n_bytes, dtype=torch.uint8)
    file.read_into(target.data_ptr(), offset, n_bytes)
    return bytes(target.tolist())


def test_a_read_gives_the_bytes_of_the_file(file):
    assert read(file, 100, 9000) == CONTENT[100:9100]


def test_a_tensor_lies_over_the_file_in_a_storage_of_its_own(file):
    tensor = file.tensor(torch.int16, (2, 3), 8)
    numbers = [int.from_bytes(CONTENT[at : at + 2], "little") for at in range(8, 20, 2)]
    assert tensor.tolist() == [numbers[:3], numbers[3:]]
    assert tensor.untyped_storage().nbytes() == 12
    assert file.offset_of(tensor.data_ptr()) == 8


def test_a_tensor_that_begins_anywhere_has_its_values(file):
    expected = torch.tensor(list(CONTENT[3:11]), dtype=torch.uint8).view(torch.float64)
    assert file.tensor(torch.float64, (1,), 3).equal(expected)


def test_a_tensor_without_elements_needs_no_bytes(file):
    assert file.tensor(torch.float32, (0, 3), len(CONTENT)).shape == (0, 3)


def test_an_address_outside_has_no_offset(file):
    assert file.offset_of(file.address - 1) is None
    assert file.offset_of(file.address + len(CONTENT)) is None


def test_what_is_written_to_a_tensor_is_read_and_never_reaches_the_file(file, path):
    file.tensor(torch.uint8, (10,), 5000).fill_(7)
    expected = CONTENT[:5000] + b"\7" * 10 + CONTENT[5010:]
    assert read(file, 0, len(CONTENT)) == expected
    assert read(file, 5005, 10) == expected[5005:5015]
    assert path.read_bytes() == CONTENT


def test_a_tensor_outlives_the_closed_and_deleted_file(file, path):
    tensor = file.tensor(torch.uint8, (4,), 4)
    file.close()
    path.unlink()
    assert tensor.tolist() == [4, 5, 6, 7]


def test_a_file_that_was_written_is_refused(file, path):
    with path.open("r+b") as other:
        other.write(b"x")
    os.utime(path, ns=(0, 1))  # the clock of the file system may not have ticked
    message = (
        r"weights.bin was changed while a model is paged from it \(it had 16.0 KiB, and has 16.0 "
        r"KiB\): .* none were used. Load the model anew. To replace such a file, write another and "
        "rename it"
    )
    with pytest.raises(PagingError, match=message):
        read(file, 0, 10)


def test_a_file_that_was_cut_is_refused(file, path):
    os.truncate(path, 100)
    with pytest.raises(PagingError, match=r"it had 16.0 KiB, and has 100 B"):
        read(file, 0, 10)


def test_a_file_that_nobody_else_can_reach_is_not_asked_again(path):
    file = opened(path, is_ours=True)
    os.utime(path, ns=(0, 1))
    assert read(file, 0, 10) == CONTENT[:10]
    file.close()


def test_a_file_that_another_took_the_name_of_is_still_read(file, path):
    other = path.with_suffix(".new")
    other.write_bytes(b"other")
    other.rename(path)
    assert read(file, 0, 10) == CONTENT[:10]


def test_a_read_that_the_disk_refuses_says_where(path, monkeypatch):
    file = opened(path)

    def refuse(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.os, "preadv", refuse)
    monkeypatch.setattr(module, "written_range", lambda address, n_bytes: (0, 0))
    with pytest.raises(
        PagingError, match=r"weights.bin can't be read at byte 3: Input/output error"
    ):
        read(file, 3, 10)
    file.close()


def test_a_read_that_comes_in_parts_is_whole(path, monkeypatch):
    whole = os.preadv
    monkeypatch.setattr(module.os, "preadv", lambda fd, views, at: whole(fd, [views[0][:1000]], at))
    monkeypatch.setattr(module, "written_range", lambda address, n_bytes: (0, 0))
    file = opened(path)
    assert read(file, 1, 9000) == CONTENT[1:9001]
    file.close()
