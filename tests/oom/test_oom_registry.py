"""Patterns of users: registering, taking back, and what is refused."""

import re
import threading

import pytest
import torch

from tenure.adaptive import AdaptiveUsageError, is_oom, oom_info, register_oom

from .oom_texts import CUDA_OOM, LOOK_ALIKES

_EXHAUSTED = RuntimeError("pool exhausted on npu:0, Tried to allocate 3.00 MiB")


def test_a_registration_lasts_until_it_is_taken_back():
    registration = register_oom("pool exhausted", "device", retry_safe=False)
    try:
        info = oom_info(_EXHAUSTED)
        assert (info.kind, info.retry_safe, info.requested_bytes) == ("device", False, 3 << 20)
    finally:
        registration.unregister()
    assert not is_oom(_EXHAUSTED)
    registration.unregister()


def test_as_a_context_it_ends_with_the_block_even_if_that_fails():
    def failing_block():
        with register_oom("pool exhausted", "driver"):
            assert oom_info(_EXHAUSTED).kind == "driver"
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        failing_block()
    assert not is_oom(_EXHAUSTED)


def test_a_compiled_pattern_keeps_its_flags():
    with register_oom(re.compile("POOL exhausted", re.IGNORECASE), "host"):
        assert oom_info(_EXHAUSTED).kind == "host"


def test_the_newest_registration_wins_and_comes_before_what_is_built_in():
    error = RuntimeError(CUDA_OOM)
    with register_oom("CUDA out of memory", "host"):
        with register_oom("out of memory", "size_limit"):
            assert oom_info(error).kind == "size_limit"
        assert oom_info(error).kind == "host"
    assert oom_info(error).kind == "device"


def test_the_same_pattern_may_be_registered_twice():
    with register_oom("pool exhausted", "device"):
        with register_oom("pool exhausted", "device"):
            pass
        assert is_oom(_EXHAUSTED)


def test_it_counts_on_every_thread():
    seen = []
    with register_oom("pool exhausted", "device"):
        thread = threading.Thread(target=lambda: seen.append(is_oom(_EXHAUSTED)))
        thread.start()
        thread.join()
    assert seen == [True]


def test_it_is_asked_for_runtime_errors_only_and_after_the_type():
    with register_oom("pool exhausted", "host"):
        assert not is_oom(ValueError("pool exhausted"))
        assert oom_info(torch.OutOfMemoryError("pool exhausted")).kind == "device"


def test_what_is_never_out_of_memory_stays_none():
    with register_oom(r"out of resource|assert", "device"):
        assert not is_oom(RuntimeError(LOOK_ALIKES["Triton"]))
        assert not is_oom(AssertionError("assert"))


def test_its_repr_carries_its_state():
    with register_oom("pool exhausted", "device") as registration:
        assert repr(registration) == ("<OomRegistration 'pool exhausted' as 'device', registered>")
    assert repr(registration) == "<OomRegistration 'pool exhausted' as 'device', taken back>"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "exhausted (pool",
            r"^register_oom\(\) got the pattern 'exhausted \(pool', which is no regular "
            r"expression: missing \), .* Escape plain text with re\.escape\(\)\.$",
        ),
        ("", r"^register_oom\(\) got the pattern '', which fits any text, so that every Run"),
        ("x*", r"which fits any text"),
        (re.compile("x*"), r"which fits any text"),
        (b"pool", r"^register_oom\(\) wants a regular expression over str, and got one of type b"),
        (re.compile(b"pool"), r"wants a regular expression over str, and got one of type bytes"),
        (None, r"got one of type NoneType\. Write it as text, such as r'pool exhausted'\.$"),
    ],
)
def test_a_pattern_that_can_not_be_used_is_refused(pattern, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        register_oom(pattern, "device")
    assert not is_oom(RuntimeError("another error"))


@pytest.mark.parametrize("kind", ["gpu", "Device", None, 2, ["device"]])
def test_an_unknown_kind_is_refused_with_those_there_are(kind):
    message = rf"^kind={re.escape(repr(kind))} is not one of 'device', 'host', 'workspace', "
    with pytest.raises(AdaptiveUsageError, match=message):
        register_oom("pool exhausted", kind)
    assert not is_oom(_EXHAUSTED)
