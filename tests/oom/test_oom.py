"""What is recognised, what never is, and where in a chain it may stand."""

import asyncio
import gc
import pickle
import weakref
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenure import DisposedTensorError, ScopeUsageError, TenureError, adaptive
from tenure.adaptive import AdaptiveUsageError, OomInfo, is_oom, oom_info

from .oom_texts import (
    CUDA_ERROR_OOM,
    CUDA_MALLOC_ASYNC_OOM,
    CUDA_OOM,
    GIB,
    LOOK_ALIKES,
    MIB,
    OFTEN_OOM,
    OTHERS,
    ROWS,
)

_INTERRUPTS = [KeyboardInterrupt(), SystemExit(1), GeneratorExit(), asyncio.CancelledError()]


def _oom():
    return torch.OutOfMemoryError(CUDA_OOM)


def _caused(exc, cause):
    exc.__cause__ = cause
    return exc


def _in_context(exc, context):
    exc.__context__ = context
    return exc


def _accelerator_error(text, code=None):
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return error


class TestTexts:
    @pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
    def test_a_runtime_error_is_recognised_by_its_text(self, row):
        assert oom_info(RuntimeError(row.text)) == OomInfo(
            kind=row.kind,
            device=row.device,
            requested_bytes=row.requested_bytes,
            retry_safe=row.retry_safe,
            text=row.text,
            chain=("RuntimeError",),
        )

    @pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
    @pytest.mark.parametrize(
        "before", ["", "epoch 1\n[rank0]: RuntimeError: "], ids=["text", "log"]
    )
    def test_a_text_or_a_log_tells_as_much_as_the_error(self, row, before):
        info = oom_info(before + row.text)
        found = (info.kind, info.device, info.requested_bytes, info.retry_safe)
        assert found == (row.kind, row.device, row.requested_bytes, row.retry_safe)

    @pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
    def test_the_text_alone_is_not_enough_for_other_types(self, row):
        assert not is_oom(ValueError(row.text))
        assert not is_oom(OSError(row.text))

    @pytest.mark.parametrize("text", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
    def test_what_only_looks_like_it_is_not_recognised(self, text):
        assert oom_info(RuntimeError(text)) is None
        assert oom_info(text) is oom_info(f"RuntimeError: {text}") is None

    @pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
    def test_another_error_is_not_recognised(self, text):
        assert oom_info(RuntimeError(text)) is None
        assert oom_info(text) is None

    def test_of_a_log_the_last_message_of_an_error_of_memory_counts(self):
        texts = ["torch.OutOfMemoryError: " + CUDA_OOM, "MemoryError", "ValueError: no", "done"]
        assert oom_info("\n".join(texts)).chain == ("MemoryError",)
        texts[1] = f"RuntimeError: {LOOK_ALIKES['illegal access']}"
        info = oom_info("\n".join(texts))
        assert (info.device, info.text) == ("cuda:1", CUDA_OOM)
        assert info.chain == ("torch.OutOfMemoryError",)
        assert oom_info("a line of a log\n" * 10_000 + CUDA_OOM).requested_bytes == 20 * GIB
        assert oom_info("torch.OutOfMemoryError: pool 3 is empty").kind == "device"

    def test_any_number_of_arguments_will_do(self):
        assert is_oom(RuntimeError(CUDA_OOM, "while sampling"))
        assert not is_oom(RuntimeError())

    def test_an_exact_number_beats_the_rounded_one(self):
        text = "sim:0 out of memory. Tried to allocate 64.00 KiB (65540 bytes). sim:0 has a budget"
        info = oom_info(RuntimeError(text))
        assert (info.device, info.requested_bytes) == ("sim:0", 65_540)

    def test_a_number_that_is_none_is_left_out(self):
        text = f"CUDA out of memory. Tried to allocate {'9' * 5000} bytes."
        assert oom_info(RuntimeError(text)).requested_bytes is None

    @pytest.mark.parametrize("place", ["start", "end"])
    def test_a_huge_text_is_read_at_both_ends_and_kept_shortened(self, place):
        filler = "frame of a stack trace\n" * 100_000
        text = CUDA_OOM + filler if place == "start" else filler + CUDA_OOM
        info = oom_info(RuntimeError(text))
        assert (info.kind, info.device) == ("device", "cuda:1")
        assert len(info.text) < 17_000
        assert "\n[...]\n" in info.text


class TestOftenOom:
    """A library without a handle or an algorithm tells no reason: the memory that is free does."""

    @staticmethod
    def _free(monkeypatch, free_bytes, *, initialized=True, fraction=1.0):
        """Three devices: the current one is not in use, the next has room, the last this much."""
        free = {1: 40 * GIB, 2: free_bytes}

        def mem_get_info(device):
            assert initialized, "this would bring a context to life"
            assert device.index in free, "this would bring a context to life"
            if free[device.index] is None:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return free[device.index], 80 * GIB

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(
            torch.cuda, "memory_reserved", lambda device: 20 * MIB * (device.index in free)
        )
        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        allowed = {2: fraction}
        monkeypatch.setattr(
            torch.cuda,
            "get_per_process_memory_fraction",
            lambda device: allowed.get(device.index, 1.0),
        )

    @pytest.mark.parametrize("text", OFTEN_OOM.values(), ids=OFTEN_OOM)
    def test_it_is_for_want_of_memory_where_little_is_free(self, monkeypatch, text):
        self._free(monkeypatch, 40 * MIB)
        info = oom_info(RuntimeError(text))
        assert (info.kind, info.device, info.retry_safe) == ("workspace", "cuda:2", True)
        assert oom_info(ValueError(text)) is None

    @pytest.mark.parametrize("text", OFTEN_OOM.values(), ids=OFTEN_OOM)
    def test_it_is_for_another_reason_where_much_is_free(self, monkeypatch, text):
        self._free(monkeypatch, 2 * GIB)
        assert oom_info(RuntimeError(text)) is None

    def test_memory_that_the_process_may_not_use_is_not_free(self, monkeypatch):
        self._free(monkeypatch, 2 * GIB, fraction=1 / 400)
        assert oom_info(RuntimeError(OFTEN_OOM["no engine"])).device == "cuda:2"

    def test_another_error_of_cudnn_is_raised_at_once(self, monkeypatch):
        self._free(monkeypatch, 2 * GIB)
        tried = []

        @adaptive.batch(initial_batchsize=64)
        def work(size):
            tried.append(size)
            raise RuntimeError(OFTEN_OOM["cuDNN, not supported"])

        with pytest.raises(RuntimeError, match="non-contiguous input"):
            work()
        assert tried == [64]

    @pytest.mark.parametrize("text", OFTEN_OOM.values(), ids=OFTEN_OOM)
    def test_a_broken_device_is_no_want_of_memory(self, monkeypatch, text):
        self._free(monkeypatch, None)
        assert oom_info(RuntimeError(text)) is None

    @pytest.mark.parametrize("text", OFTEN_OOM.values(), ids=OFTEN_OOM)
    def test_a_device_that_is_not_in_use_is_not_asked(self, monkeypatch, text):
        self._free(monkeypatch, 0, initialized=False)
        assert oom_info(RuntimeError(text)) is None

    @pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
    def test_other_errors_stay_others_where_little_is_free(self, monkeypatch, text):
        self._free(monkeypatch, 0)
        assert oom_info(RuntimeError(text)) is None


class TestTypes:
    @pytest.mark.parametrize(
        ("text", "device"), [(CUDA_OOM, "cuda:1"), ("", None), ("no room left", None)]
    )
    def test_torchs_own_type_needs_no_text(self, text, device):
        info = oom_info(torch.OutOfMemoryError(text))
        assert (info.kind, info.device, info.retry_safe) == ("device", device, True)
        assert info.chain == ("torch.OutOfMemoryError",)

    def test_torchs_own_type_is_read_by_the_rules_for_its_device(self):
        info = oom_info(torch.OutOfMemoryError(CUDA_MALLOC_ASYNC_OOM))
        assert (info.kind, info.device, info.requested_bytes) == ("device", "cuda:1", 4 * GIB)

    @pytest.mark.parametrize("text", ["std::bad_alloc", "Invalid buffer size: 9.75 GB"])
    def test_torchs_own_type_is_of_a_device_whatever_its_text_says(self, text):
        assert oom_info(torch.OutOfMemoryError(text)).kind == "device"

    def test_a_memory_error_is_the_hosts(self):
        info = oom_info(MemoryError())
        assert (info.kind, info.device, info.requested_bytes) == ("host", "cpu", None)
        assert info.chain == ("MemoryError",)

    def test_a_memory_error_of_a_device_library_is_the_devices(self):
        info = oom_info(
            MemoryError("Out of memory allocating 8,000,000,000 bytes (allocated so far")
        )
        assert (info.kind, info.device, info.requested_bytes) == ("device", "cuda", 8_000_000_000)
        info = oom_info(MemoryError("std::bad_alloc: out_of_memory: CUDA error at: pool.hpp:183"))
        assert (info.kind, info.device) == ("device", "cuda")

    def test_an_accelerator_error_is_recognised_by_its_code(self):
        info = oom_info(_accelerator_error("a text of a later torch", code=2))
        assert (info.kind, info.retry_safe) == ("device", True)

    def test_an_accelerator_error_without_a_code_is_recognised_by_its_text(self):
        assert oom_info(_accelerator_error(CUDA_ERROR_OOM)).kind == "device"

    @pytest.mark.parametrize("code", [700, 710, True, "2"])
    def test_an_accelerator_error_with_another_code_is_not(self, code):
        assert not is_oom(_accelerator_error(LOOK_ALIKES["illegal access"], code=code))

    def test_the_system_calls_error_for_no_memory_is_recognised_by_its_number(self):
        info = oom_info(OSError(12, "Cannot allocate memory"))
        assert (info.kind, info.device) == ("host", "cpu")
        assert not is_oom(OSError(28, "No space left on device"))

    @pytest.mark.skipif(not torch.distributed.is_available(), reason="a build without distributed")
    def test_a_failed_communicator_is_recognised_and_not_to_be_tried_again(self):
        error = torch.distributed.DistBackendError("CUDA driver error: out of memory")
        assert oom_info(error).retry_safe is False

    def test_a_subclass_counts_as_its_base(self):
        class MyOom(torch.OutOfMemoryError, TenureError):
            pass

        assert oom_info(MyOom("no room")).kind == "device"


class TestNever:
    @pytest.mark.parametrize("exc", _INTERRUPTS, ids=repr)
    def test_an_interrupt_passes_whatever_stands_below_it(self, exc):
        assert not is_oom(_caused(type(exc)(CUDA_OOM), _oom()))
        assert not is_oom(_in_context(type(exc)(), _oom()))

    @pytest.mark.parametrize("exc", _INTERRUPTS, ids=repr)
    def test_an_interrupt_passes_when_a_clean_up_failed_after_it(self, exc):
        interrupt = _in_context(type(exc)(), _oom())
        assert not is_oom(_in_context(RuntimeError("clean-up"), interrupt))

    @pytest.mark.parametrize("exc", _INTERRUPTS, ids=repr)
    def test_an_interrupt_in_a_group_passes(self, exc):
        assert not is_oom(BaseExceptionGroup("tasks", [_oom(), type(exc)()]))
        inner = BaseExceptionGroup("inner", [_oom(), type(exc)()])
        assert not is_oom(BaseExceptionGroup("outer", [_oom(), inner]))

    @pytest.mark.parametrize(
        "exc",
        [
            AssertionError(CUDA_OOM),
            DisposedTensorError(CUDA_OOM),
            ScopeUsageError(CUDA_OOM),
            AdaptiveUsageError(CUDA_OOM),
            *map(RuntimeError, LOOK_ALIKES.values()),
            ValueError(LOOK_ALIKES["Triton"]),
        ],
        ids=lambda exc: f"{type(exc).__name__} {str(exc)[:20]}",
    )
    def test_what_is_never_one_hides_what_stands_below_it(self, exc):
        assert not is_oom(exc)
        assert not is_oom(_caused(exc, _oom()))
        assert not is_oom(_caused(ValueError("wrapped"), exc))
        assert not is_oom(ExceptionGroup("before", [exc, _oom()]))
        assert not is_oom(ExceptionGroup("after", [_oom(), exc]))

    def test_what_stands_below_an_out_of_memory_error_does_not_hide_it(self):
        assert is_oom(_in_context(_oom(), AssertionError("first")))


class TestChains:
    @pytest.mark.parametrize("link", [_caused, _in_context])
    def test_it_is_found_below_another_error(self, link):
        info = oom_info(link(ValueError("bad batch"), link(KeyError("x"), _oom())))
        assert info.chain == ("ValueError", "KeyError", "torch.OutOfMemoryError")
        assert info.text == CUDA_OOM

    def test_a_suppressed_context_is_not_looked_at(self):
        exc = _in_context(ValueError("unrelated"), _oom())
        assert is_oom(exc)
        assert not is_oom(_caused(exc, None))  # as `raise ... from None` does

    def test_the_cause_comes_before_the_context(self):
        exc = _in_context(_caused(ValueError(), MemoryError()), _oom())
        exc.__suppress_context__ = False
        assert oom_info(exc).kind == "host"

    def test_the_uppermost_is_the_one_that_is_told(self):
        assert oom_info(_caused(MemoryError("first"), _oom())).text == "first"

    def test_a_cycle_ends(self):
        first, second = ValueError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        assert not is_oom(first)
        second.__context__, second.__suppress_context__ = _oom(), False
        assert oom_info(first).chain == ("ValueError", "ValueError", "torch.OutOfMemoryError")

    def test_a_long_chain_needs_no_deep_stack(self):
        exc = _oom()
        for _ in range(20_000):
            exc = _caused(ValueError(), exc)
        assert len(oom_info(exc).chain) == 20_001

    def test_members_of_nested_groups_are_looked_at(self):
        group = ExceptionGroup("outer", [ValueError(), ExceptionGroup("inner", [_oom()])])
        assert oom_info(group).chain == (
            "ExceptionGroup",
            "ExceptionGroup",
            "torch.OutOfMemoryError",
        )
        assert not is_oom(ExceptionGroup("outer", [ValueError()]))

    def test_of_a_group_the_one_not_to_be_tried_again_is_told(self):
        broken = RuntimeError("NCCL error: Cuda failure 2 'out of memory'")
        for members in ([_oom(), broken], [broken, _oom()]):
            assert oom_info(ExceptionGroup("ranks", members)).retry_safe is False

    @given(
        st.lists(st.sampled_from(["cause", "context", "group"]), max_size=12),
        st.booleans(),
        st.integers(min_value=1, max_value=2**40),
    )
    def test_it_is_found_at_any_depth_and_only_if_it_is_there(self, links, present, n_bytes):
        text = f"CUDA out of memory. Tried to allocate {n_bytes} bytes."
        exc = RuntimeError(text if present else "another error")
        for link in links:
            if link == "group":
                exc = ExceptionGroup("group", [ValueError(), exc])
            else:
                exc = {"cause": _caused, "context": _in_context}[link](KeyError(), exc)
        info = oom_info(exc)
        assert (info is not None) == present == is_oom(exc)
        if info:
            assert info.requested_bytes == n_bytes
            assert len(info.chain) == len(links) + 1


class TestHostileExceptions:
    def test_a_failing_str_is_an_empty_text(self):
        class Mute(RuntimeError):
            def __str__(self):
                raise ValueError("no text")

        assert not is_oom(Mute(CUDA_OOM))

        class MuteOom(torch.OutOfMemoryError, Mute):
            pass

        assert oom_info(MuteOom(CUDA_OOM)).text == ""

    def test_properties_in_the_place_of_attributes_are_not_asked(self):
        def fail(_):
            raise ValueError("no attribute")

        names = ("__cause__", "__context__", "__suppress_context__", "exceptions", "__class__")
        hostile = type("Hostile", (RuntimeError,), {name: property(fail) for name in names})
        assert oom_info(hostile(CUDA_OOM)).kind == "device"
        chained = hostile("wrapped")
        BaseException.__cause__.__set__(chained, _oom())
        assert oom_info(chained).kind == "device"

    def test_a_failing_code_is_no_code(self):
        class Hostile(torch.AcceleratorError):
            @property
            def error_code(self):
                raise ValueError("no code")

        assert not is_oom(Hostile("unknown error"))
        assert is_oom(Hostile(CUDA_ERROR_OOM))

    def test_a_type_without_a_proper_name_is_called_unknown(self):
        nameless = type("Nameless", (RuntimeError,), {"__module__": 7})
        assert oom_info(nameless(CUDA_OOM)).chain == ("<unknown type>",)

    def test_a_text_of_a_type_of_its_own_becomes_plain(self):
        class Text(str):
            __slots__ = ("tensor",)

        class Wordy(RuntimeError):
            def __str__(self):
                text = Text(CUDA_OOM)
                text.tensor = torch.ones(1)
                return text

        assert type(oom_info(Wordy()).text) is str

    @pytest.mark.slow
    @given(st.text(max_size=300))
    def test_no_text_makes_it_raise(self, text):
        for kind in (RuntimeError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            oom_info(kind(text))
        oom_info(RuntimeError(f"CUDA out of memory. Tried to allocate {text}"))


class TestInfo:
    def test_it_keeps_neither_the_exception_nor_its_tensors(self):
        gc.disable()
        try:
            info, references = self._failed()
            assert info.chain[-1] == "RuntimeError"
            assert [reference() for reference in references] == [None, None]
        finally:
            gc.enable()

    @staticmethod
    def _failed():
        class Wrapper(ValueError):
            """One that can be referred to weakly."""

        def attempt():
            activations = torch.ones(8)
            references.append(weakref.ref(activations))
            raise RuntimeError(CUDA_OOM)

        references = []
        try:
            try:
                attempt()
            except RuntimeError as cause:
                raise Wrapper("wrapped") from cause
        except ValueError as error:
            references.append(weakref.ref(error))
            return oom_info(error), references

    def test_it_is_frozen_compares_by_value_and_can_be_pickled(self):
        info = oom_info(_oom())
        assert info == oom_info(_oom())
        assert pickle.loads(pickle.dumps(info)) == info
        with pytest.raises(FrozenInstanceError):
            info.kind = "host"

    @pytest.mark.parametrize("call", [oom_info, is_oom])
    @pytest.mark.parametrize(
        ("value", "described"),
        [
            (b"CUDA out of memory", "an object of type bytes"),
            (None, "an object of type NoneType"),
            (MemoryError, "the class MemoryError"),
        ],
    )
    def test_what_is_no_exception_is_named(self, call, value, described):
        message = rf"^{call.__name__}\(\) wants an exception, and got {described}\. Pass the one"
        with pytest.raises(AdaptiveUsageError, match=message):
            call(value)

    def test_the_error_reads_and_pickles_as_the_rooms(self):
        assert AdaptiveUsageError.__module__ == "tenure.adaptive"
        assert issubclass(AdaptiveUsageError, TenureError)
        assert str(pickle.loads(pickle.dumps(AdaptiveUsageError("text")))) == "text"
