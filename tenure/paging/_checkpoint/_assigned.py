"""Assigning a model the tensors of a checkpoint, without reading one.

Invariant: all tensors fit or none is assigned; what was can be taken back. A parameter stays the
object that it was, unless it is on ``meta`` and torch, which keeps weak references to it, forbids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tenure._errors import PagingError
from tenure._text import describe_elements, listed
from tenure._torch.modules import unsaved_names
from tenure._torch.quiet import aside

from .._model import is_plain
from ._files import Checkpoint, StoredTensor

_N_NAMED = 5
_COMPARED_BYTES = 64 * 2**20


@dataclass(slots=True)
class _Wanted:
    """A tensor of the model.

    Attributes:
        tensor: the object.
        names: all that it is registered under.
        sites: the modules that register it, each with its own name for it.
        is_saved: whether a state_dict has it.
    """

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    is_saved: bool = False


@contextmanager
def assigned(model: nn.Module, checkpoint: Checkpoint) -> Iterator[None]:
    """Return a block at whose begin a model gets its tensors; if it raises, they are taken back.

    Raises:
        PagingError: names, shapes or dtypes differ; the model is as before.
    """
    pairs = _matched(model, checkpoint)
    with ExitStack() as undoing:
        with aside():
            for each, stored in pairs:
                undoing.callback(_assign(each, stored.view()))
        yield
        undoing.pop_all()


def _matched(model: nn.Module, checkpoint: Checkpoint) -> list[tuple[_Wanted, StoredTensor]]:
    wanted = _wanted(model)
    pairs: list[tuple[_Wanted, StoredTensor]] = []
    troubles: list[str] = []
    known = {name for each in wanted if each.is_saved for name in each.names}
    missing: list[str] = []
    for each in wanted:
        found = [name for name in each.names if each.is_saved and name in checkpoint.tensors]
        if found:
            stored = checkpoint.tensors[found[0]]
            pairs.append((each, stored))
            troubles += _differences(each.tensor, found, checkpoint)
        elif each.is_saved:
            missing.append(each.names[0])
        elif each.tensor.device.type == "meta":
            troubles.append(
                f"{each.names[0]!r} is a buffer that no file holds (persistent=False), and it is "
                "on meta: give it its values first"
            )
    if missing:
        troubles.insert(0, f"the file lacks {_named(missing)}")
    unexpected = [name for name in checkpoint.tensors if name not in known]
    if unexpected:
        troubles.insert(0, f"the model has no {_named(unexpected)}")
    if troubles:
        raise PagingError(
            f"{checkpoint.name} does not fit {type(model).__name__}: "
            f"{listed(troubles, _N_NAMED, '; ')}. Nothing was loaded. Build the model as it "
            "was when its state_dict was saved, or save this one's."
        )
    return pairs


def _wanted(model: nn.Module) -> list[_Wanted]:
    by_tensor: dict[int, _Wanted] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        # Rotary tables and the like are computed when the model is built, and in no file.
        unsaved = unsaved_names(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                each = by_tensor.setdefault(id(tensor), _Wanted(tensor))
                each.names.append(f"{prefix}.{name}" if prefix else name)
                each.sites.append((module, name))
                each.is_saved |= name not in unsaved
    return list(by_tensor.values())


def _differences(tensor: Tensor, names: list[str], checkpoint: Checkpoint) -> Iterator[str]:
    first = checkpoint.tensors[names[0]]
    for name in names:
        stored = checkpoint.tensors[name]
        if (stored.dtype, stored.shape) != (tensor.dtype, tuple(tensor.shape)):
            yield (
                f"{name!r} is {describe_elements(stored.dtype, stored.shape)} in the file, and "
                f"{describe_elements(tensor.dtype, tensor.shape)} in the model"
            )
        elif tensor.numel() and not is_plain(tensor):
            yield f"{name!r} is a {type(tensor).__name__} in the model, whose bytes no file holds"
        elif stored is not first and not _are_equal(stored, first):
            yield f"{names[0]!r} and {name!r} are one tensor in the model, and differ in the file"


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare bytes, a part at a time; where shapes differ that is said elsewhere."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    n_bytes = one.view().nbytes
    for low in range(0, n_bytes, _COMPARED_BYTES):
        size = min(_COMPARED_BYTES, n_bytes - low)
        parts = (each.file.bytes_at(each.offset + low, size) for each in (one, other))
        if not torch.equal(*parts):
            return False
    return True


def _assign(wanted: _Wanted, view: Tensor) -> Callable[[], None]:
    """Let a tensor have other data; what takes it back."""
    tensor = wanted.tensor
    # One that was made in inference mode counts no writes, and raises when asked for them.
    if tensor.device.type != "meta" and not tensor.is_inference():
        return _set_data(tensor, view)
    twin = _twin(tensor, view)
    try:
        # The object stays the same, where it can: whoever holds a parameter has the loaded one.
        torch.utils.swap_tensors(tensor, twin)
    except RuntimeError:
        # Something refers to it weakly, as recurrent layers do.
        return _put(wanted.sites, twin, tensor)
    return lambda: torch.utils.swap_tensors(tensor, twin)


def _set_data(tensor: Tensor, data: Tensor) -> Callable[[], None]:
    before = tensor.data
    tensor.data = data
    return lambda: setattr(tensor, "data", before)


def _put(sites: list[tuple[nn.Module, str]], tensor: Tensor, before: Tensor) -> Callable[[], None]:
    for module, name in sites:
        setattr(module, name, tensor)

    def take_back() -> None:
        for module, name in sites:
            setattr(module, name, before)

    return take_back


def _twin(tensor: Tensor, view: Tensor) -> Tensor:
    twin: Tensor = view
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(view, requires_grad=tensor.requires_grad)
    elif isinstance(tensor, nn.Buffer):
        twin = nn.Buffer(view, persistent=tensor.persistent)
    vars(twin).update(vars(tensor))
    return twin


def _named(names: list[str]) -> str:
    return listed([*map(repr, names)], _N_NAMED)
