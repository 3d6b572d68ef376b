"""Making a handle let go of its tensor, while autograd, views and C++ keep theirs.

The impl of the handle is swapped with an empty one, so nothing that still needs the data can see
the difference; the class is assigned first, because that is the step that can be refused cleanly.
"""

from __future__ import annotations

import enum
import logging
import warnings
from typing import Any

import torch
from torch import Tensor

from tenure._callers import Site, SiteStack
from tenure._errors import TenureWarning
from tenure._storages import inner_tensors
from tenure._torch import swap
from tenure._torch.compiler import belongs_to_graph
from tenure._torch.quiet import TENSOR_BASE, without_functions

from ._disposed import RECORD, Cause, DisposedTensor, Record, set_record

_logger = logging.getLogger("tenure.scopes")
_set_class = vars(object)["__class__"].__set__  # past a __setattr__ of the subclass


class Disposal(enum.Enum):
    """What came of an attempt to dispose a tensor."""

    HARD = "the handle lets go of its data"
    SOFT = "the handle refuses every use, but pins its data until it dies"
    INNER = "the handle stays, the tensors inside it are disposed"
    ALREADY = "it had been disposed before"
    GRAPHS = "a CUDA graph hands the very tensor out again; it stays as it is, owned by no scope"
    IMPOSSIBLE = "its class allows none of these; it stays alive and is owned by no scope"


def dispose_tensor(
    tensor: Tensor, cause: Cause, created: Site | SiteStack | None = None
) -> Disposal:
    """Dispose one handle of any shape, dtype, device, layout and subclass.

    Never raises for a tensor that can't be disposed: the answer and the log say so.
    """
    cls = type(tensor)
    if cls is DisposedTensor:
        return Disposal.ALREADY
    if belongs_to_graph(tensor):  # a soft disposal would come out of the next replay as well
        return Disposal.GRAPHS
    record = _describe(tensor, cause, created)
    try:
        _set_class(tensor, DisposedTensor)
    except TypeError:  # a class with slots, such as DTensor, can't be exchanged
        return _dispose_inner(tensor, cause, created)
    return _take_data(tensor, cls, record)


def dispose_plain(
    tensor: Tensor, cause: Cause, created: Site | SiteStack | None, twins: list[Tensor]
) -> bool:
    """As `dispose_tensor` for one of exactly ``Tensor`` that is no graph's.

    It runs in a block of ``without_functions``.

    Args:
        tensor: a tensor of any shape, dtype, device and layout.
        cause: what disposes it.
        created: where it was made.
        twins: gets the handle that has taken over what ``tensor`` was.

    Returns:
        False where that was refused; it is the long way's turn then, and nothing has changed.
    """
    handle: Any = tensor
    try:
        dtype, notes = handle.dtype, handle.__dict__  # of a disposed one they are slow to read
        record = dtype, handle.shape, handle.device, created, cause
        handle.__class__ = DisposedTensor
        twin: Any = swap.make_empty(DisposedTensor, dtype)
        swap.swap(handle, twin)
    except (TypeError, RuntimeError):  # a nested tensor; a C++ weak reference
        handle.__class__ = Tensor
        return False
    # as in _take_data
    if notes:
        twin.__dict__, notes = notes, {}
        handle.__dict__ = notes
    notes[RECORD] = record
    twin.__class__ = Tensor
    twins.append(twin)
    return True


def is_disposed(tensor: Tensor) -> bool:
    """Whether the handle has been disposed; of a wrapper with slots, whether its inner ones were.

    Args:
        tensor: a tensor of any shape, dtype and device.
    """
    if type(tensor) is DisposedTensor:
        return True
    try:
        inner = inner_tensors(tensor)
    except (
        Exception
    ):  # a __tensor_flatten__ of the user's; what can't be taken apart is not disposed
        return False
    return bool(inner) and all(map(is_disposed, inner))


def _describe(tensor: Tensor, cause: Cause, created: Site | SiteStack | None) -> Record:
    # torch's own getters: a subclass may raise from its properties
    with without_functions():
        dtype = TENSOR_BASE.dtype.__get__(tensor)
        try:
            shape, device = TENSOR_BASE.shape.__get__(tensor), TENSOR_BASE.device.__get__(tensor)
        except Exception:  # a nested tensor has no shape, and a subclass may compute its own
            shape, device = (), _device_of(tensor)
    return dtype, shape, device, created, cause


def _device_of(tensor: Tensor) -> torch.device:
    try:
        return tensor.device
    except Exception:  # as above
        return torch.device("meta")


def _take_data(tensor: Tensor, cls: type[Tensor], record: Record) -> Disposal:
    twin = _twin_of(tensor, record[0])
    if twin is None:
        set_record(tensor, record)
        return Disposal.SOFT
    # The twin is what autograd and views hand out from here on: it must be what the handle was.
    handle: Any = tensor
    handle.__dict__, twin.__dict__ = twin.__dict__, handle.__dict__
    twin.__class__ = cls
    set_record(tensor, record)
    return Disposal.HARD


def _twin_of(tensor: Tensor, dtype: torch.dtype) -> Any:
    """A new handle that has taken over the impl of ``tensor``; None if that was refused."""
    if not swap_is_trusted():
        return None
    with without_functions():
        twin = swap.make_empty(DisposedTensor, dtype)
        try:
            swap.swap(tensor, twin)
        except RuntimeError:  # a C++ weak reference: retain_grad() of a non-leaf, autocast's cache
            return None
    return twin


def _dispose_inner(tensor: Tensor, cause: Cause, created: Site | SiteStack | None) -> Disposal:
    try:
        inside, trouble = inner_tensors(tensor), None
    except Exception as error:  # a __tensor_flatten__ of the user's
        inside, trouble = [], error
    results = [dispose_tensor(inner, cause, created) for inner in inside]
    if not results or Disposal.IMPOSSIBLE in results:
        name = type(tensor).__name__
        _logger.warning("A %s could not be disposed; it stays alive.", name, exc_info=trouble)
        return Disposal.IMPOSSIBLE
    already = all(result is Disposal.ALREADY for result in results)
    return Disposal.ALREADY if already else Disposal.INNER


def swap_is_trusted() -> bool:
    """Whether handles can be emptied on this torch; warns once where they can't."""
    if swap.works():
        return True
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"torch {torch.__version__} no longer swaps tensors as tenure expects. Disposed "
            "tensors still refuse every use, but their memory goes only with the last handle. "
            "Use a tested torch (see constraints.txt), or update tenure.",
            TenureWarning,
            stacklevel=2,
        )
    return False


_warned = False
