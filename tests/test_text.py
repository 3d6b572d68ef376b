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
    describe,
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
        (65_536, "64.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (-1_572_864, "-1.5 MiB"),
        (3 * 1024**3, "3.0 GiB"),
        (5000 * 1024**4, "5000.0 TiB"),
        (-1, "-1 B"),
    ],
)
def test_unit_is_the_largest_that_leaves_a_number_below_1024(n_bytes, text):
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.50 KiB"),
        (1 << 20, "1024.00 KiB"),
        (5 << 40, "5120.00 GiB"),
    ],
)
def test_sizes_in_the_texts_of_torch_are_spelled_as_torch_does(n_bytes, text):
    assert format_bytes_as_torch(n_bytes) == text


@given(st.integers(min_value=1, max_value=2**60))
def test_sign_only_adds_a_minus(n_bytes):
    assert format_bytes(-n_bytes) == f"-{format_bytes(n_bytes)}"


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [
        (0, 0),
        (4096, 4096),
        (numpy.int64(7), 7),
        ("4096", 4096),
        ("1 B", 1),
        ("512 bytes", 512),
        ("1 byte", 1),
        ("64MiB", 64 << 20),
        ("2 GiB", 2 << 30),
        ("20.00 GiB", 20 << 30),
        ("128. TiB", 128 << 40),
        (" 1.5 kib ", 1536),
        ("1 PiB", 1 << 50),
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
    "text", ["", "MiB", "-1 MiB", "2G", "1,5 GiB", "1e9", "64 MiBs", "inf", "\u0663 MiB", "1 2 B"]
)
def test_a_text_that_is_no_size_is_quoted_with_what_to_write(text):
    message = r"is not a number of bytes\. Write an int, or a number and a unit, such as \"64MiB\""
    with pytest.raises(ByteSizeError, match=message) as caught:
        parse_bytes(text)
    assert str(caught.value).startswith(repr(text))


def test_a_unit_of_one_letter_gets_both_that_it_may_be():
    with pytest.raises(ByteSizeError, match=r"such as .* 1\.5G is 1\.5GiB, or 1\.5GB\.$"):
        parse_bytes("1.5g")


def test_a_long_text_is_quoted_shortened():
    with pytest.raises(ByteSizeError, match=r"^'9{37}\.\.\.' is not a number of bytes"):
        parse_bytes("9" * 100_000)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        *((" 80 %", 0.8), ("100%", 1.0), ("0%", 0), ("101%", 0), ("nan%", 0), ("%", 0)),
        *(("80", None), (80, None), ("24GiB", None)),
    ],
)
def test_a_share_is_read_only_where_per_cent_are_written(text, share):
    assert parse_share(text) == share


@pytest.mark.parametrize(
    ("size", "kind"), [(1.5, "float"), (True, "bool"), (None, "NoneType"), (b"1 MiB", "bytes")]
)
def test_a_value_of_another_type_is_named(size, kind):
    with pytest.raises(ByteSizeError, match=rf"^A number of bytes can't be read from a {kind}\. "):
        parse_bytes(size)


def test_a_negative_number_is_refused():
    with pytest.raises(ByteSizeError, match=r"^-1 is not a number of bytes: it is negative\. "):
        parse_bytes(-1)


def test_the_error_is_caught_as_tenures_own_and_as_a_value_error():
    assert issubclass(ByteSizeError, TenureError)
    assert issubclass(ByteSizeError, ValueError)


@given(st.integers(min_value=0, max_value=2**60))
def test_what_is_spelled_is_read_back_within_half_of_the_last_decimal(n_bytes):
    text = format_bytes(n_bytes)
    unit_bytes = parse_bytes(f"1 {text.split()[1]}")
    assert abs(parse_bytes(text) - n_bytes) <= 0.05 * unit_bytes + 1


@given(st.integers(min_value=0, max_value=2**40), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_whole_numbers_of_a_unit_are_read_exactly(number, unit):
    assert parse_bytes(f"{number}{unit}") == number * parse_bytes(f"1{unit}")


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (-1, "-1 rows")]
)
def test_only_one_of_something_is_singular(n, text):
    assert counted(n, "row") == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, ""), (1, "'a'"), (2, "'a', 'b'"), (3, "'a', 'b' and 1 more")]
)
def test_the_first_of_many_are_listed_and_the_rest_is_counted(n, text):
    assert listed([*map(repr, "abc"[:n])], 2) == text


def test_clauses_are_listed_as_clauses():
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


def sparse(layout):
    return torch.eye(2).to_sparse(
        layout=layout, **({"blocksize": (1, 1)} if "bs" in str(layout) else {})
    )


def test_parts_of_a_tensor_that_is_gone():
    text = "float16[32, 1024] on cuda:0, 64.0 KiB"
    assert describe(torch.float16, (32, 1024), torch.device("cuda:0"), 65_536) == text


def test_scalar_has_empty_brackets():
    assert describe_tensor(torch.zeros(())) == "float32[] on cpu, 4 B"


def test_view_has_the_bytes_of_its_storage():
    assert describe_tensor(torch.zeros(1024)[:1]) == "float32[1] on cpu, 4.0 KiB"


def test_meta_tensor_shows_the_bytes_it_would_have():
    assert describe_tensor(torch.empty(8, device="meta")) == "float32[8] on meta, 32 B"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr]
)
def test_sparse_tensor_has_no_storage_and_counts_its_elements(layout):
    assert describe_tensor(sparse(layout)) == "float32[2, 2] on cpu, 16 B"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor(layout):
    t = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    assert describe_tensor(t).startswith("float32[2")


def test_fake_tensor():
    with torch._subclasses.FakeTensorMode():
        t = torch.ones(3)
    assert describe_tensor(t) == "float32[3] on cpu, 12 B"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantized_tensor():
    t = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    assert describe_tensor(t) == "qint8[3] on cpu, 3 B"


def test_subclasses_are_described_without_running_their_code():
    assert describe_tensor(torch.ones(3).as_subclass(Tagged)) == "float32[3] on cpu, 12 B"
    assert describe_tensor(Wrapper(torch.ones(3))) == "float32[3] on cpu, 12 B"


def test_parameter_without_a_shape_does_not_raise():
    assert describe_tensor(torch.nn.UninitializedParameter()).startswith("float32[")
