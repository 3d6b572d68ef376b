"""Which models can be paged, and to which devices; any other is refused by name, and why."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenure._callers import warn_user
from tenure._devices import NO_ACCELERATOR, indexed
from tenure._errors import PagingError, PagingWarning
from tenure._text import describe_tensor
from tenure._torch.sharding import is_dtensor

from .._forward import PagedDict, check_capture

_ON_STREAMS = ("Stream", "Event", "stream", "current_stream", "current_device", "device")
"""What a device's module must have for weights to be copied while it computes."""
_FOREIGN_HOOKS = {"_hf_hook": "accelerate", "_diffusers_hook": "diffusers"}


def checked_model(model: object, *, has_values: bool = True) -> nn.Module:
    """Return a module whose tensors can be paged.

    Args:
        model: the module.
        has_values: whether tensors on ``meta`` are refused.

    Raises:
        PagingError: it is none, is paged already, by whomever, or has tensors that can't be moved.
    """
    if not isinstance(model, nn.Module):
        raise PagingError(f"A model is paged, a torch.nn.Module; this is a {_kind(model)}.")
    for name, module in model.named_modules():
        _check_unpaged(name or type(model).__name__, module)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if has_values or tensor.device.type != "meta":
            _check_tensor(name, tensor)
    return model


def warn_of_uncounted_writes(model: nn.Module) -> None:
    """Warn of parameters that were made in inference mode: a write to one may go unseen."""
    name = next((name for name, each in model.named_parameters() if each.is_inference()), None)
    if name is not None:
        warn_user(
            f"{name!r} was made under torch.inference_mode(), where torch counts no writes: the "
            "pager does not see one through a reference that you kept, and goes on with the old "
            "values. Make the model outside of it; page and run it where you like.",
            PagingWarning,
        )


class NoAccelerator(Enum):
    """What stands in for an accelerator, by the function that is asked; the advice to take it."""

    NOTHING = ""
    FOLDER = ", or 'cpu' with a folder: host=Path(...)"
    CPU = ", or 'cpu'"

    @classmethod
    def of(cls, host: object, *, training: bool) -> NoAccelerator:
        """If weights come from a folder, the CPU will do; else a folder would, but not to train."""
        if isinstance(host, Path):
            return cls.CPU
        return cls.NOTHING if training else cls.FOLDER


def checked_device(
    device: str | torch.device,
    elsewhere: NoAccelerator = NoAccelerator.NOTHING,
    *,
    may_be_missing: bool = False,
) -> torch.device:
    """Return an accelerator that is there, with its index; the CPU where weights come from a disk.

    Args:
        device: what was asked for.
        elsewhere: what the user may name in its place; with ``CPU`` that is one as well.
        may_be_missing: whether it need not be here, as for a plan.

    Raises:
        PagingError: it is none, or a graph is being captured.
    """
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PagingError(f"{device!r} is not a device.") from error
    if chosen.type == "cpu" and elsewhere is NoAccelerator.CPU:
        return torch.device("cpu")
    if chosen.type in NO_ACCELERATOR:
        raise PagingError(
            f"A model in host memory can't be paged to {chosen.type!r}: there is nothing to gain. "
            f"Name an accelerator, such as 'cuda'{elsewhere.value}."
        )
    module = getattr(torch, chosen.type, None)
    if module is None or not module.is_available():
        if may_be_missing and module is not None:
            return chosen
        raise PagingError(
            f"There is no {chosen.type!r} device here that a model could be paged to. Name one "
            f"that is there{elsewhere.value}."
        )
    _check_streams(chosen, module)
    # With an index from here on: what is current may be another device when the model is called.
    found = indexed(chosen)
    if found.index >= module.device_count():
        raise PagingError(f"There is no device {str(chosen)!r}: there are {module.device_count()}.")
    check_capture(found, "A model was to be paged")
    return found


def _check_streams(device: torch.device, module: Any) -> None:
    missing = [name for name in _ON_STREAMS if not hasattr(module, name)]
    if not missing:
        return
    advice = "Name another accelerator."
    if device.type == "mps":
        # Its memory is the host's own.
        advice = (
            "Its memory is that of the host, where a paged model is anyway: move the model there "
            "with model.to('mps'), or run one that does not fit from a folder: page(model, 'cpu', "
            "host=Path(...))."
        )
    raise PagingError(
        f"A model can't be paged to {device.type!r}: weights are copied on streams beside the one "
        f"that computes, and torch.{device.type} lacks {', '.join(missing)}. {advice}"
    )


def _check_unpaged(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise PagingError(
            f"{name!r} is a module of TorchScript, which reads its weights where nobody can show "
            "it others. Page the Python module that it was made of."
        )
    if any(isinstance(vars(module)[each], PagedDict) for each in ("_parameters", "_buffers")):
        raise PagingError(
            f"{name!r}, a {type(module).__name__}, is paged already. Unpage it with unpage() "
            "of its handle first."
        )
    for attribute, library in _FOREIGN_HOOKS.items():
        if hasattr(module, attribute):
            raise PagingError(
                f"{name!r} is offloaded by {library} ({attribute}), which moves its weights. "
                "Remove its hooks first."
            )


def _check_tensor(name: str, tensor: Tensor) -> None:
    if is_dtensor(tensor):
        raise PagingError(
            f"{name!r} is a DTensor, of which other ranks have parts, as fully_shard() makes them: "
            "torch alone moves those. Page a model before it is sharded: page(model, mesh=...) "
            "shards it, and keeps the shards in host memory."
        )
    if is_lazy(tensor):
        raise PagingError(f"{name!r} is not initialized yet. Run the model once, then page it.")
    if tensor.device.type == "meta":
        raise PagingError(
            f"{name!r} has no values ({describe_tensor(tensor)}). Load the weights, then page."
        )
    if tensor.device.type != "cpu":
        raise PagingError(
            f"{name!r} is not in host memory ({describe_tensor(tensor)}). Call model.cpu() first."
        )
    if not hasattr(type(tensor), "__tensor_flatten__") and type(tensor).to is not Tensor.to:
        # As of bitsandbytes, which quantizes weights, or takes their scales along, where they move.
        kind = type(tensor).__name__
        raise PagingError(
            f"{name!r} is a {kind}, which moves itself: to() takes more along than its own bytes, "
            "or changes them, and paging would not. Page the model before it is quantized so, or "
            "quantize it with tensors that tell what they are made of (__tensor_flatten__), as "
            "torchao does."
        )
    # As of `share_memory()`, which workers of a trainer read: they would never see another write.
    if tensor.layout is torch.strided and tensor.is_shared():
        raise PagingError(
            f"{name!r} is in memory shared with other processes ({describe_tensor(tensor)}), which "
            "paging would part from theirs. Page a copy: copy.deepcopy(model)."
        )


def _kind(value: Any) -> str:
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__
