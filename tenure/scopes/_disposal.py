"""Letting tensors go: now, later where an operation still needs them, and all at a scope's end.

A handle lets go of its tensor while autograd, views and C++ keep theirs: the impl of the handle is
swapped with an empty one, so nothing that still needs the data can see the difference; the class is
assigned first, because that is the step that can be refused cleanly. Nothing here fails for one
tensor and so stops the rest.
"""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tenure._callers import Site, SitedRef, warn_user
from tenure._errors import MissingTorchNameError, ScopeUsageError, TenureWarning
from tenure._storages import inner_tensors
from tenure._torch import swap
from tenure._torch.autograd import ENGINE_CODE, check_engine_is_seen
from tenure._torch.compiler import belongs_to_graph, has_graph_outputs
from tenure._torch.quiet import TENSOR_BASE, set_class, without_functions

from ._disposed import RECORD, Cause, DisposedTensor, notes_on
from ._ledger import Opener, Reference, owns
from ._library_objects import held_as_state
from ._thread import ThreadScopes
from ._tracker import HANDLER_CODE

Survivors = list[tuple[Tensor, Reference]]

_logger = logging.getLogger("tenure.scopes")


# --- those of a scope together


def disposable(survivors: Survivors, thread: ThreadScopes) -> Survivors:
    """Return the ``survivors`` that are no state of a module, an optimizer or a CUDA graph.

    The others go free. What a caller has attached by name is the scope's, whoever holds it; only
    from a graph, which hands the same handle out again, nothing can be taken.
    """
    held = held_as_state({id(tensor) for tensor, _ in survivors})
    # by far the most: nothing is anybody's
    if not held and not has_graph_outputs():
        return survivors
    mine: Survivors = []
    for tensor, reference in survivors:
        is_held = id(tensor) in held and not owns(thread.chosen, tensor)
        if is_held or belongs_to_graph(tensor):
            thread.hand_out(reference)
        else:
            mine.append((tensor, reference))
    return mine


def dispose_all(
    owned: Survivors, cause: Cause, thread: ThreadScopes, opener: Opener | None
) -> None:
    """Dispose tensors that no ledger of a scope has any more; ``owned`` ends empty.

    None of them may be a CUDA graph's.

    Args:
        owned: the tensors, of any shape, dtype, device and class.
        cause: what disposes them.
        thread: the thread, which counts them.
        opener: what opened the scope; None for tensors that no scope owned.
    """
    if inside_operation(opener):
        _count(len(owned), thread, opener)
        thread.waiting += [(reference, cause) for _, reference in owned]
        owned.clear()
        return
    interruptions: list[BaseException] = []
    # what dies with a twin may be a user's and run code, so it dies when all is done
    twins: list[Tensor] = []
    # once for all, because it costs as much as a disposal
    with without_functions():
        for tensor, reference in owned:
            try:
                is_new = dispose_tensor(tensor, cause, site_of(reference), twins)
                if is_new:
                    _count(1, thread, opener)
                elif is_new is None and opener is not None:
                    thread.hand_out(reference)
            # Ctrl-C, or a log handler that raises: the rest goes all the same
            except BaseException as error:
                interruptions.append(error)
    owned.clear()
    if interruptions:
        raise interruptions[-1]


def _count(n_disposed: int, thread: ThreadScopes, opener: Opener | None) -> None:
    if opener is None:
        thread.disposed_outside += n_disposed
    else:
        thread.disposed += n_disposed


def site_of(reference: Reference) -> Site | None:
    """Return the call site that made the tensor behind ``reference``, if it was captured."""
    return reference.site if type(reference) is SitedRef else None


# --- those that have to wait


def inside_operation(opener: Opener | None) -> bool:
    """Return whether the caller runs inside a torch operation that began after ``opener``.

    A hook does: see Note [Lifetimes and the tracker], rule 6.

    Args:
        opener: what opened a scope. What that scope owns is younger than an operation that runs
            around it, and need not wait for that one.
    """
    # where torch has lost the name, a pass that runs now can not be seen: that is an error
    if ENGINE_CODE is None:
        check_engine_is_seen(now=True)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if opener is not None and code is opener[0] and id(frame) == opener[2]:
            return False
        if code is HANDLER_CODE or code is ENGINE_CODE:
            return True
        frame = frame.f_back
    return False


def dispose_waiting(thread: ThreadScopes) -> None:
    """Dispose what had to wait and is still alive, unless an operation still runs."""
    if inside_operation(None):
        return
    waiting, thread.waiting = thread.waiting, []
    for reference, cause in waiting:
        tensor = reference()
        # a CUDA graph's would come out of the next replay as well
        if tensor is not None and not belongs_to_graph(tensor):
            twins: list[Tensor] = []
            with without_functions():
                dispose_tensor(tensor, cause, site_of(reference), twins)


# --- one handle


def dispose_tensor(
    tensor: Tensor, cause: Cause, created: Site | None, twins: list[Tensor]
) -> bool | None:
    """Dispose one handle of any shape, dtype, device, layout and subclass that is no graph's.

    It runs in a block of ``without_functions``. It never raises for a tensor that can't be
    disposed: the answer and the log say so.

    Args:
        tensor: the handle.
        cause: what disposes it.
        created: where it was made.
        twins: gets the handle that has taken over what ``tensor`` was.

    Returns:
        Whether it was not disposed before; None if its class allows no disposal.
    """
    handle: Any = tensor
    cls = type(tensor)
    if cls is DisposedTensor:
        return False
    dtype = _dtype_of(tensor)
    try:
        record = dtype, _shape_of(tensor), _device_of(tensor), created, cause
    # a nested tensor has no shape, and a subclass may compute its own
    except Exception:
        record = dtype, (), _own_device_of(tensor), created, cause
    try:
        set_class(tensor, DisposedTensor)
    # a class with slots, such as DTensor, can't be exchanged
    except TypeError:
        return _dispose_inner(tensor, cause, created, twins)
    # See Note [Lifetimes and the tracker], rule 5.
    try:
        twin: Any = swap.make_empty(DisposedTensor, dtype)
        swap.swap(tensor, twin)
    # A C++ weak reference: retain_grad() of a non-leaf, autocast's cache; a nested tensor. The
    # handle refuses every use, but pins its data until it dies.
    except RuntimeError as error:
        if isinstance(error, MissingTorchNameError):
            # without a twin autograd would hand out the handle itself, as in ``.grad``
            set_class(tensor, cls)
            warn_user(str(error), TenureWarning)
            return None
        notes_on(tensor)[RECORD] = record
        return True
    # The twin is what autograd and views hand out from here on: it must be what the handle was.
    notes = handle.__dict__
    if notes:
        twin.__dict__, notes = notes, {}
        handle.__dict__ = notes
    notes[RECORD] = record
    twin.__class__ = cls
    twins.append(twin)
    return True


def is_disposed(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has been disposed; reading it never raises.

    A wrapper with slots has been if the tensors were that it is made of.

    Args:
        tensor: a tensor of any shape, dtype and device.

    Raises:
        ScopeUsageError: it is no tensor.
    """
    if type(tensor) is DisposedTensor:
        return True
    if not isinstance(tensor, Tensor):
        raise ScopeUsageError(
            f"is_disposed() got a {type(tensor).__name__}, which is no tensor. Pass a tensor."
        )
    try:
        inner = inner_tensors(tensor)
    # a __tensor_flatten__ of the user's; what can't be taken apart is not disposed
    except Exception:
        return False
    return bool(inner) and all(map(is_disposed, inner))


# torch's own getters: a subclass may raise from its properties
_dtype_of, _shape_of, _device_of = (
    getattr(TENSOR_BASE, name).__get__ for name in ("dtype", "shape", "device")
)


def _own_device_of(tensor: Tensor) -> torch.device:
    try:
        return tensor.device
    # as above
    except Exception:
        return torch.device("meta")


def _dispose_inner(
    tensor: Tensor, cause: Cause, created: Site | None, twins: list[Tensor]
) -> bool | None:
    """Dispose the tensors that a handle is made of, which stays itself."""
    try:
        inside, trouble = inner_tensors(tensor), None
    # a __tensor_flatten__ of the user's
    except Exception as error:
        inside, trouble = [], error
    results = [
        None if belongs_to_graph(inner) else dispose_tensor(inner, cause, created, twins)
        for inner in inside
    ]
    if not results or None in results:
        name = type(tensor).__name__
        _logger.warning("A %s could not be disposed; it stays alive.", name, exc_info=trouble)
        return None
    return any(results)
