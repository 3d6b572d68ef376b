import pytest

from ._units import format_bytes, parse_bytes

pytestmark = pytest.mark.simdevice


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (1 << 20, "1.00 MiB")],
)
def test_sizes_are_printed_like_torch_prints_them(n_bytes, text):
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize(("text", "n_bytes"), [("64KiB", 65536), ("1.5 MiB", 1572864), (7, 7)])
def test_sizes_are_read_with_binary_units(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("size", ["64 MB", "MiB", "", "nan MiB", "-4KiB", -1, 1.5, None])
def test_what_is_not_a_size_says_what_to_write(size):
    match = f"^{size!r} is not a size; write an int or a number with KiB, MiB or GiB, not below 0"
    with pytest.raises(ValueError, match=match):
        parse_bytes(size)
