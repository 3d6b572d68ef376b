"""The mode that sees each operation on tensors without data, and notes which storages it makes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from tenure._callers import Site, is_internal
from tenure._containers import passed_tensors
from tenure._torch import cpu_allocator, gradient_sums
from tenure._torch.fakes import is_fake
from tenure._torch.modes import DispatchMode
from tenure._torch.modules import module_called_by
from tenure._torch.sharding import dtensor_class
from tenure._torch.storages import key_of

from ._assumptions import CAN_NOT, STAND_INS, worked_out
from ._blocks import BlockEvent, Category, LiveBlock, MemoryRecord, Phase
from ._exchanges import exchanged
from ._known import KnownValues, storages_of
from ._scratch import Inside, inside
from ._target import Target
from ._workspaces import Workspaces, taken_inside

# Formulas of autograd that ask whether a tensor is of a subclass, which is so while a mode is open,
# and then work in another way: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/
# FunctionsManual.cpp. Of the others that ask, the way without data takes as much or more; see
# gradient_sums.writes_in_place.
_SPREADING = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"})
_WITH_ZERO = "a factor of a product is taken to be 0"
_BY_DATA = {
    "LinalgHouseholderProductBackward0": (
        "LinalgHouseholderProductBackward0 works in another way on tensors with data"
    ),
    **dict.fromkeys(("ProdBackward0", "ProdBackward1", "CumprodBackward0"), _WITH_ZERO),
}


class OperationPlace(NamedTuple):
    """Where an operation runs.

    Attributes:
        module: the innermost module whose forward runs.
        code: the code of the user's program that called torch.
        instruction: how far that was.
    """

    module: ref[nn.Module] | None
    code: CodeType | None
    instruction: int

    def line(self) -> str:
        """Return the line of the program, as ``train.py:12``; "" where none is known."""
        return "" if self.code is None else str(Site(self.code, self.instruction))


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


class _LiveStorage(ref[UntypedStorage]):
    """A storage that is alive, and the block it lies in."""

    __slots__ = ("block", "key")

    key: int
    block: LiveBlock


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
        unforeseen: leaves that nobody found before the work used them, with their gradients then.
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
        self.unforeseen: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._target = target
        self._entries: dict[int, _LiveStorage] = {}
        self._owners: dict[LiveBlock, int] = {}
        self._real = LiveBlock(0, "forward", "temporaries")
        self._real_live = cpu_allocator.live_counter()
        self._real_before = 0
        # what kernels have taken that let go of it later: a group has two threads for them
        self._kept = deque(LiveBlock(0, "forward", "temporaries") for _ in range(2))
        self._is_over = False
        self._shared = dtensor_class()

    def enter_existing(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Note what was there before; what is known already keeps its category."""
        for tensor in tensors:
            if tensor.device != self._target.runs_on:
                continue
            for storage in storages_of(tensor):
                if key_of(storage) not in self._entries:
                    block = LiveBlock(
                        storage.nbytes(), category=category, is_offloaded=self.is_offloading
                    )
                    self._record_of(block).existing[block] = block.n_bytes
                    self._enter(storage, block)

    def name_blocks(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Say what tensors that the work has made are for."""
        for storage in (each for tensor in tensors for each in storages_of(tensor)):
            entry = self._entries.get(key_of(storage))
            if entry is not None and entry.block.category is None:
                entry.block.category = category

    def note_resized(self, storage: UntypedStorage, n_bytes: int) -> None:
        """Notice that a storage gets another size by no operation."""
        entry = self._entries.get(key_of(storage))
        if entry is not None and n_bytes != entry.block.n_bytes:
            entry.block.n_bytes = n_bytes
            self._change(entry.block, n_bytes)

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass ran."""
        return any(each.phase == "backward" for each in self.operations)

    @property
    def _is_on_host(self) -> bool:
        return self._target.is_host or self.is_offloading

    def begin(self) -> None:
        """Count from now on what is really taken."""
        self._real_before = self._real_live.value - self.known.held_bytes

    def end(self) -> None:
        """Notice what the work has left alive; what dies from now on is no part of it."""
        self._is_over = True
        for entry in list(self._entries.values()):
            entry.block.outlived_forward = True

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
        self._note_unforeseen(args, kwargs)
        kwargs = self._target.made_on(kwargs)
        shown: Any = STAND_INS.get(func) or exchanged(func) or func
        try:
            result = shown(*args, **kwargs)
        except CAN_NOT as error:
            result, reason = worked_out(func, args, kwargs, self.known, error)
            if reason is not None:
                self.reasons.setdefault(f"{reason} at {_place(sys._getframe(1)).line()}")
        taken = Inside(0, result)
        if self._is_on_host:
            taken = inside(func, args, kwargs, result)
            if n_beside := _beside_mask(func, args):
                taken = replace(taken, n_bytes=taken.n_bytes + n_beside)
        self.known.follow(func, args, kwargs, taken.result)
        self._note(func, args, kwargs, taken)
        return taken.result

    def _note_pass(self) -> None:
        """Notice that a backward pass has begun, or ended: the work may run several."""
        if self.phase != "optimizer step":
            node = gradient_sums.current_node()
            phase: Phase = "forward" if node is None else "backward"
            if phase != self.phase == "forward":
                for entry in list(self._entries.values()):
                    entry.block.outlived_forward = True
            self.phase = phase
            if node is not None and node.name() in _BY_DATA:
                self.reasons.setdefault(_BY_DATA[node.name()])

    def _note_unforeseen(self, *arguments: Any) -> None:
        """Notice a leaf with data: autograd is about to give it a gradient that has none."""
        for tensor in passed_tensors(arguments):
            if tensor.requires_grad and tensor.is_leaf and not is_fake(tensor):
                self.reasons.setdefault("it uses parameters that no name in its code leads to")
                self.unforeseen.setdefault(id(tensor), (tensor, tensor.grad))

    def _note(self, func: Any, args: Any, kwargs: Any, taken: Inside) -> None:
        result = taken.result
        n_before = len(self.record.events) + len(self.offloaded.events)
        if self._target.is_host and not self._is_counted:
            self._note_real()
        for tensor in passed_tensors(result):
            if tensor.device == self._target.runs_on:
                for storage in storages_of(tensor):
                    self._note_result(func, args, storage)
        if not self._is_on_host:
            for n_bytes in self.workspaces.note(func, args, kwargs, result, self.phase):
                block = LiveBlock(n_bytes, self.phase, "temporaries", is_of_library=True)
                self._change(block, n_bytes)
            sizes = taken_inside(func, args)
            blocks = [LiveBlock(n_bytes, self.phase, "temporaries") for n_bytes in sizes]
            for block in blocks:
                self._change(block, block.n_bytes)
            for block in blocks:
                self._change(block, 0)
        elif not self._is_counted:
            if taken.n_bytes:
                block = LiveBlock(
                    taken.n_bytes, self.phase, "temporaries", is_offloaded=self.is_offloading
                )
                self._change(block, taken.n_bytes)
                if taken.is_kept:
                    self._kept.append(block)
                    block = self._kept.popleft()
                self._change(block, 0)
            if taken.reason is not None:
                self.reasons.setdefault(taken.reason)
        if len(self.record.events) + len(self.offloaded.events) > n_before:
            self.operations.append(_operation(str(func), self.phase))

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
        entry = self._entries.get(key_of(storage))
        if entry is not None:
            # grown in place
            if storage.nbytes() != entry.block.n_bytes:
                entry.block.n_bytes = storage.nbytes()
                self._change(entry.block, storage.nbytes())
            return
        taken_over = self._block_added_to(func, args)
        if taken_over is not None:
            self._enter(storage, taken_over)
            return
        block = LiveBlock(storage.nbytes(), self.phase, is_offloaded=self.is_offloading)
        self._enter(storage, block)
        if block.n_bytes:
            self._change(block, block.n_bytes)

    def _block_added_to(self, func: Any, args: Any) -> LiveBlock | None:
        """Return the block of an operand that autograd writes a result into.

        It does not while a mode looks on, and makes a third.
        """
        if func not in gradient_sums.IN_PLACE or self.phase != "backward":
            return None
        # a budget is a mode as well: under it, formulas write nothing in place
        if self._is_counted and func is not gradient_sums.SUM:
            return None
        frame: FrameType | None = sys._getframe()
        # Called for a result, for an operation, by the handler, by the caller of the sum: a frame
        # that a thread of autograd's engine may not have.
        for _ in range(4):
            frame = frame and frame.f_back
        if not gradient_sums.writes_in_place(func, args[0], frame):
            return None
        entry = self._entries.get(key_of(args[0].untyped_storage()))
        return None if entry is None else entry.block

    def _enter(self, storage: UntypedStorage, block: LiveBlock) -> None:
        entry = self._entries[key_of(storage)] = _LiveStorage(storage, self._forget)
        entry.key, entry.block = key_of(storage), block
        self._owners[block] = self._owners.get(block, 0) + 1

    def _forget(self, entry: Any) -> None:
        del self._entries[entry.key]
        self._owners[entry.block] -= 1
        if not self._owners[entry.block]:
            del self._owners[entry.block]
            self._change(entry.block, 0)

    def _change(self, block: LiveBlock, n_bytes: int) -> None:
        if self._is_over:
            return
        self._record_of(block).events.append(BlockEvent(block, n_bytes, len(self.operations)))

    def _record_of(self, block: LiveBlock) -> MemoryRecord:
        return self.offloaded if block.is_offloaded else self.record


def _operation(name: str, phase: Phase) -> Operation:
    if gradient_sums.current_node() is not None:
        return Operation(name, phase, None, gradient_sums.sequence_of_node())
    return Operation(name, phase, _place(sys._getframe(3)), gradient_sums.next_sequence())


def _beside_mask(func: Any, args: Any) -> int:
    """Return by how much more stands beside the sum of a mask, on tensors with data."""
    if func is not torch.ops.aten.sum.default or args[0].dtype is not torch.bool:
        return 0
    node = gradient_sums.current_node()
    if node is None or node.name() not in _SPREADING:
        return 0
    # zeros to fill, but not the two further masks that there are without data
    n_bytes: int = args[0].numel() * (gradient_sums.dtype_of(node).itemsize - 2)
    return n_bytes


def _place(frame: FrameType | None) -> OperationPlace:
    module, code, instruction = None, None, -1
    while frame is not None and (module is None or code is None):
        if module is None:
            module = module_called_by(frame)
        if code is None and not is_internal(frame):
            code, instruction = frame.f_code, frame.f_lasti
        frame = frame.f_back
    return OperationPlace(None if module is None else ref(module), code, instruction)
