"""How bytes, tensors, counts and lists are spelled, and bytes are read.

By private names, because all reports and errors use them, and none has each of these cases.
"""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenure import TenureError
from tenure._errors import ByteSizeError
from tenure._text import (
    counted,
    describe_tensor,
    format_bytes,
    format_bytes_as_torch,
    listed,
    parse_bytes,
    parse_share,
)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (-1_572_864, "-1.5 MiB"),
        (3 * 1024**3, "3.0 GiB"),
        (5000 * 1024**4, "5000.0 TiB"),
        (-1, "-1 B"),
    ],
)
def test_unit_is_the_largest_that_leaves_a_number_below_1024(n_bytes, text):
    assert format_bytes(n_bytes) == text


def test_sizes_in_the_texts_of_torch_are_spelled_as_torch_does():
    told = {0: "0 bytes", 1536: "1.50 KiB", 1 << 20: "1024.00 KiB", 5 << 40: "5120.00 GiB"}
    assert {n_bytes: format_bytes_as_torch(n_bytes) for n_bytes in told} == told


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [
        (0, 0),
        (numpy.int64(7), 7),
        ("4096", 4096),
        ("1 B", 1),
        ("512 bytes", 512),
        ("64MiB", 64 << 20),
        ("20.00 GiB", 20 << 30),
        (" 1.5 kib ", 1536),
        ("8EiB", 8 << 60),
        ("2 GB", 2 * 10**9),
        ("24mb", 24 * 10**6),
        ("0.1 TiB", 109_951_162_778),
        ("0.5 B", 1),
    ],
)
def test_a_number_is_read_with_its_unit(size, n_bytes):
    assert parse_bytes(size) == n_bytes
    assert type(parse_bytes(size)) is int


@pytest.mark.parametrize(
    ("text", "share"),
    [
        *((" 80 %", 0.8), ("100%", 1.0), ("0%", 0), ("101%", 0), ("nan%", 0), ("%", 0)),
        *(("80", None), (80, None), ("24GiB", None)),
    ],
)
def test_a_share_is_read_only_where_per_cent_are_written(text, share):
    assert parse_share(text) == share


_UNREAD = ("", "MiB", "-1 MiB", "2G", "1,5 GiB", "1e9", "64 MiBs", "\u0663 MiB")
_NO_SIZE = r"is not a number of bytes\. Write an int, or a number and a unit, such as \"64MiB\""


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (1.5, r"^A number of bytes can't be read from a float\. "),
        (True, r"^A number of bytes can't be read from a bool\. "),
        (-1, r"^-1 is not a number of bytes: it is negative\. "),
        *((each, f"^{each!r} {_NO_SIZE}") for each in _UNREAD),
        ("9" * 100_000, r"^'9{37}\.\.\.' is not a number of bytes"),
        ("1.5g", r"such as .* 1\.5G is 1\.5GiB, or 1\.5GB\.$"),
    ],
)
def test_a_value_that_is_no_size_is_named(size, told):
    with pytest.raises(ByteSizeError, match=told) as caught:
        parse_bytes(size)
    assert isinstance(caught.value, TenureError)
    assert isinstance(caught.value, ValueError)


@given(st.integers(min_value=0, max_value=2**60))
def test_what_is_spelled_is_read_back_within_half_of_the_last_decimal(n_bytes):
    text = format_bytes(n_bytes)
    unit_bytes = parse_bytes(f"1 {text.split()[1]}")
    assert abs(parse_bytes(text) - n_bytes) <= 0.05 * unit_bytes + 1


def test_things_are_counted_and_of_many_the_first_are_listed():
    assert [counted(n, "row") for n in range(3)] == ["0 rows", "1 row", "2 rows"]
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert listed(["a is gone", "b moved", "c grew"], 2, "; ") == "a is gone; b moved; and 1 more"


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def _fake():
    with torch._subclasses.FakeTensorMode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.zeros(()), "float32[] on cpu, 4 B"),
        # a view has the bytes of its storage
        (lambda: torch.zeros(1024)[:1], "float32[1] on cpu, 4.0 KiB"),
        (lambda: torch.empty(8, device="meta"), "float32[8] on meta, 32 B"),
        (lambda: torch.eye(2).to_sparse(), "float32[2, 2] on cpu, 16 B"),
        (lambda: torch.eye(2).to_sparse_csr(), "float32[2, 2] on cpu, 16 B"),
        (_fake, "float32[3] on cpu, 12 B"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "qint8[3] on cpu, 3 B",
        ),
        # without running their code
        (lambda: torch.ones(3).as_subclass(Tagged), "float32[3] on cpu, 12 B"),
        (lambda: Wrapper(torch.ones(3)), "float32[3] on cpu, 12 B"),
    ],
)
def test_every_kind_of_tensor_is_described(make, text):
    assert describe_tensor(make()) == text


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_without_a_whole_shape_is_described():
    parts = [torch.ones(2), torch.ones(3)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        assert describe_tensor(nested).startswith("float32[2")
    assert describe_tensor(torch.nn.UninitializedParameter()).startswith("float32[")
