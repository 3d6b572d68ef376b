"""The mode that sees each operation on tensors without data, and notes which storages it makes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from tenure._callers import Site, is_internal, maker_of, module_of
from tenure._containers import passed_tensors
from tenure._cuda_blocks import MIB, taken_by
from tenure._torch import cpu_allocator, gradient_sums
from tenure._torch.fakes import is_fake
from tenure._torch.modes import DispatchMode, all_modes
from tenure._torch.modules import module_called_by
from tenure._torch.sharding import dtensor_class
from tenure._torch.storages import key_of

from ._blocks import BlockEvent, Category, LiveBlock, MemoryRecord, Phase
from ._device import Target, Workspaces, taken_inside
from ._scratch import Inside, inside
from ._values import CAN_NOT, KnownValues, shown_for, storages_of, worked_out

# Formulas of autograd that ask whether a tensor is of a subclass, which is so while a mode is open,
# and then work in another way: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/
# FunctionsManual.cpp. Of the others that ask, the way without data takes as much or more; see
# gradient_sums.writes_in_place.
_WITH_ZERO = dict.fromkeys(
    ("ProdBackward0", "ProdBackward1", "CumprodBackward0"),
    "a factor of a product is taken to be 0",
)
_OTHER_WAY = frozenset(
    {
        "LinalgHouseholderProductBackward0",
        *("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"),
    }
)


class OperationPlace(NamedTuple):
    """The place where an operation runs.

    Attributes:
        module: the innermost module whose forward runs.
        site: the place in the user's program that called torch.
    """

    module: ref[nn.Module] | None
    site: Site | None


class Operation(NamedTuple):
    """An operation that made or freed memory.

    Attributes:
        name: as torch calls it.
        phase: of the step.
        place: where it was called; None in a backward pass.
        sequence: the number of the node that it belongs to.
    """

    name: str
    phase: Phase
    place: OperationPlace | None
    sequence: int


class Observer(DispatchMode):
    """Notes what operations make on a device, and when it dies.

    Args:
        target: the device.
        is_counted: whether a memory budget looks on: it counts storages alone, and not what kernels
            take for themselves; and formulas of autograd write nothing in place there.

    Attributes:
        record: what was noted.
        offloaded: what was noted of the host's memory, as far as work on an accelerator keeps there
            what ``fully_shard`` offloads.
        is_offloading: whether what is made now is there.
        phase: which part of the step runs now.
        operations: all operations that made something, by number.
        known: values that are computed along.
        workspaces: what kernels of an accelerator may take on top.
        reasons: why the record may be wrong; each once.
        unforeseen: leaves that nobody found before the work used them, as `leaves_in` returns them.
    """

    supports_higher_order_operators = True

    def __init__(self, target: Target, *, is_counted: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self._is_counted = is_counted
        self.record, self.offloaded = MemoryRecord(), MemoryRecord()
        self.is_offloading = False
        self.phase: Phase = "forward"
        self.operations: list[Operation] = []
        self.reasons: dict[str, None] = {}
        self.known = KnownValues()
        self.workspaces = Workspaces(target.device)
        self.unforeseen: dict[int, tuple[Tensor, bool, Tensor | None]] = {}
        self._target = target
        # of each storage that is alive, what notices its end, and the block that it lies in
        self._entries: dict[int, tuple[ref[UntypedStorage], LiveBlock]] = {}
        self._owners: dict[LiveBlock, int] = {}
        self._real = self._temporary(0)
        self._real_live = cpu_allocator.live_counter()
        self._real_before = 0
        # what kernels have taken that free it later: a group has two threads for them
        self._kept = deque(self._temporary(0) for _ in range(2))
        self._is_over = False
        self._shared = dtensor_class()

    def enter_existing(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Note what was there before; what is known already keeps its category."""
        here = [each for each in tensors if each.device == self._target.runs_on]
        for storage in (storage for tensor in here for storage in storages_of(tensor)):
            if key_of(storage) not in self._entries:
                n_bytes = storage.nbytes()
                block = LiveBlock(n_bytes, category=category, is_offloaded=self.is_offloading)
                self._record_of(block).existing[block] = n_bytes
                self._enter(storage, block)

    def name_blocks(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Say what tensors that the work has made are for."""
        for storage in (each for tensor in tensors for each in storages_of(tensor)):
            block = self._block_of(storage)
            if block is not None and block.category is None:
                block.category = category

    def note_resized(self, storage: UntypedStorage, n_bytes: int) -> None:
        """Notice that a storage gets another size, in place or by no operation."""
        block = self._block_of(storage)
        if block is not None and n_bytes != block.n_bytes:
            block.n_bytes = n_bytes
            self._change(block, n_bytes)

    @property
    def live_bytes(self) -> int:
        """The bytes that are alive on the device now, as its allocator rounds them."""
        blocks = {block for _, block in self._entries.values() if not block.is_offloaded}
        taken = taken_by((block.n_bytes for block in blocks), self._target.device)
        return self._real.n_bytes + taken.allocated_bytes

    def add(self, n_bytes: int) -> None:
        """Count bytes that work which is left out would leave behind, if it is like the rest."""
        self.reasons.setdefault("what further micro-batches leave behind is counted in proportion")
        # no larger than blocks of small segments, because most are losses and random states
        for start in range(0, n_bytes, MIB):
            size = min(MIB, n_bytes - start)
            self._change(LiveBlock(size, self.phase, "activations"), size)

    @property
    def has_backward(self) -> bool:
        """True if a backward pass ran."""
        return any(each.phase == "backward" for each in self.operations)

    def begin(self) -> None:
        """Count from now on what is really taken."""
        self._real_before = self._real_live.value - self.known.held_bytes

    def end(self) -> None:
        """Notice what the work has left alive; what dies from now on is no part of it."""
        self._is_over = True
        self._note_outlived()

    def _note_outlived(self) -> None:
        for _, block in list(self._entries.values()):
            block.outlived_forward = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # the class does it with the parts that are here, which come by one by one
        if self._shared in types:
            return NotImplemented
        # a question about a tensor; the process ends where one raises
        if func.namespace == "prim":
            return func(*args, **kwargs)
        # inference mode hands over whole functions, before they are taken apart
        if torch.is_inference_mode_enabled():
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._note_pass()
        for tensor in passed_tensors((args, kwargs)):
            # a leaf with data: autograd is about to give it a gradient that has none
            if tensor.requires_grad and tensor.is_leaf and not is_fake(tensor):
                self.reasons.setdefault("it uses parameters that no name in its code leads to")
                self.unforeseen.setdefault(id(tensor), (tensor, True, tensor.grad))
        kwargs = self._target.made_on(kwargs)
        try:
            result = shown_for(func)(*args, **kwargs)
        except CAN_NOT as error:
            result, reason = worked_out(func, args, kwargs, self.known, error)
            if result is False and _is_check(sys._getframe(1)):
                result, reason = True, None
            if reason is not None:
                _, site = _place(sys._getframe(1))
                self.reasons.setdefault(f"{reason} at {site or ''}")
        is_on_host = self._target.is_host or self.is_offloading
        taken = inside(func, args, kwargs, result) if is_on_host else Inside(0, result)
        self.known.follow(func, args, kwargs, taken.result)
        n_before = len(self.record.events) + len(self.offloaded.events)
        if self._target.is_host and not self._is_counted:
            self._note_real()
        for tensor in passed_tensors(taken.result):
            if tensor.device == self._target.runs_on:
                for storage in storages_of(tensor):
                    self._note_result(func, args, storage)
        if not is_on_host:
            self._note_kernel_of_device(func, args, kwargs, result)
        elif not self._is_counted:
            self._note_kernel_of_host(taken)
        if len(self.record.events) + len(self.offloaded.events) > n_before:
            self.operations.append(_operation(str(func), self.phase))
        return taken.result

    def _note_pass(self) -> None:
        """Notice that a backward pass has begun, or ended: the work may run several."""
        if self.phase != "optimizer step":
            node = gradient_sums.current_node()
            phase: Phase = "forward" if node is None else "backward"
            if phase != self.phase == "forward":
                self._note_outlived()
            self.phase = phase
            name = "" if node is None else node.name()
            if name in _WITH_ZERO:
                self.reasons.setdefault(_WITH_ZERO[name])
            elif name in _OTHER_WAY:
                self.reasons.setdefault(f"{name} works in another way on tensors with data")

    def _note_kernel_of_device(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        for n_bytes in self.workspaces.note(func, args, kwargs, result, self.phase):
            block = LiveBlock(n_bytes, self.phase, "temporaries", is_of_library=True)
            self._change(block, n_bytes)
        blocks = [self._temporary(n_bytes) for n_bytes in taken_inside(func, args)]
        for block in blocks:
            self._change(block, block.n_bytes)
        for block in blocks:
            self._change(block, 0)

    def _note_kernel_of_host(self, taken: Inside) -> None:
        if taken.n_bytes:
            block = self._temporary(taken.n_bytes)
            self._change(block, taken.n_bytes)
            if taken.is_kept:
                self._kept.append(block)
                block = self._kept.popleft()
            self._change(block, 0)
        if taken.reason is not None:
            self.reasons.setdefault(taken.reason)

    def _note_real(self) -> None:
        """Notice memory that was really taken: states of generators, which no operation makes."""
        # what was there before may end as well, and is not to hide what is new
        live_bytes = self._real_live.value - self.known.held_bytes
        self._real_before = min(self._real_before, live_bytes)
        n_bytes = live_bytes - self._real_before
        if n_bytes != self._real.n_bytes:
            self._real.n_bytes = n_bytes
            self._change(self._real, n_bytes)

    def _note_result(self, func: Any, args: Any, storage: UntypedStorage) -> None:
        if key_of(storage) in self._entries:
            self.note_resized(storage, storage.nbytes())
            return
        block = self._block_added_to(func, args)
        if block is None:
            block = LiveBlock(storage.nbytes(), self.phase, is_offloaded=self.is_offloading)
            if block.n_bytes:
                self._change(block, block.n_bytes)
        self._enter(storage, block)

    def _block_added_to(self, func: Any, args: Any) -> LiveBlock | None:
        """Return the block of an operand that autograd writes a result into.

        It does not while a mode looks on, and makes a third.
        """
        if func not in gradient_sums.IN_PLACE or self.phase != "backward":
            return None
        # a budget hides no others
        if self._is_counted and func not in gradient_sums.SUMS_AND_FILLS:
            return None
        frame: FrameType | None = sys._getframe()
        # Called for a result, by the handler, by the caller of the sum: a frame that a thread of
        # autograd's engine may not have.
        for _ in range(3):
            frame = frame and frame.f_back
        if not gradient_sums.writes_in_place(func, args[0], frame):
            return None
        return self._block_of(args[0].untyped_storage())

    def _block_of(self, storage: UntypedStorage) -> LiveBlock | None:
        _, block = self._entries.get(key_of(storage), (None, None))
        return block

    def _temporary(self, n_bytes: int) -> LiveBlock:
        return LiveBlock(n_bytes, self.phase, "temporaries", is_offloaded=self.is_offloading)

    def _enter(self, storage: UntypedStorage, block: LiveBlock) -> None:
        key = key_of(storage)
        self._entries[key] = ref(storage, partial(self._forget, key)), block
        self._owners[block] = self._owners.get(block, 0) + 1

    def _forget(self, key: int, _: object) -> None:
        _, block = self._entries.pop(key)
        self._owners[block] -= 1
        if not self._owners[block]:
            del self._owners[block]
            self._change(block, 0)

    def _change(self, block: LiveBlock, n_bytes: int) -> None:
        if not self._is_over:
            event = BlockEvent(block, n_bytes, len(self.operations))
            self._record_of(block).events.append(event)

    def _record_of(self, block: LiveBlock) -> MemoryRecord:
        return self.offloaded if block.is_offloaded else self.record


def observer_here() -> Observer:
    """Return the observer that looks at the work that runs now."""
    return next(each for each in reversed(all_modes()) if isinstance(each, Observer))


def _operation(name: str, phase: Phase) -> Operation:
    if gradient_sums.current_node() is not None:
        return Operation(name, phase, None, gradient_sums.sequence_of_node())
    return Operation(name, phase, _place(sys._getframe(2)), gradient_sums.next_sequence())


def _is_check(frame: FrameType | None) -> bool:
    """Return whether torch.distributions checks its arguments: those of a program are valid."""
    while frame is not None and module_of(frame).startswith("torch._"):
        frame = frame.f_back
    return frame is not None and module_of(maker_of(frame)).startswith("torch.distributions.")


def _place(frame: FrameType | None) -> OperationPlace:
    module, site = None, None
    while frame is not None and (module is None or site is None):
        # a module may be empty, and false
        module = module_called_by(frame) if module is None else module
        if site is None and not is_internal(frame):
            site = Site(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return OperationPlace(None if module is None else ref(module), site)
