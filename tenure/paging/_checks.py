"""Which numbers, models and devices paging takes; the rest is refused by name before it begins.

Invariant: nothing here changes the model, and nothing is allocated for a question.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenure._account import available_bytes
from tenure._callers import warn_user
from tenure._devices import NO_ACCELERATOR, free_memory, indexed
from tenure._errors import ByteSizeError, PagingError, PagingWarning
from tenure._host_memory import free_host_bytes
from tenure._text import describe_tensor, parse_bytes, parse_share
from tenure._torch.sharding import is_dtensor

from ._division import Budget, UnitSize
from ._entry import Method, PagedDict
from ._pager import check_capture


def checked_budget(budget: int | str | None, device: torch.device) -> Budget | None:
    """Return the bytes of a budget; ``"80%"`` is that share of what is free on the device now.

    Raises:
        PagingError: the share can't be read.
        ByteSizeError: the number of bytes can't be read.
    """
    if budget is None:
        return None
    share = parse_share(budget)
    if share is None:
        return Budget(parse_bytes(budget))
    if not share:
        raise PagingError(f"budget={budget!r}: a share goes from above 0% to 100%.")
    free_bytes = _free_bytes(device)
    return Budget(int(available_bytes(device, free_bytes) * share), free_bytes)


def checked_kept(model: nn.Module, keep: Iterable[str]) -> list[nn.Module]:
    """Return the modules of these names.

    Raises:
        PagingError: a name is no module's.
    """
    if isinstance(keep, str):
        raise PagingError(f"keep= takes names of modules, such as keep=({keep!r},).")
    if not isinstance(keep, Iterable):
        raise PagingError(f"keep={keep!r}: write names of modules, such as keep=('head',).")
    modules = dict(model.named_modules(remove_duplicate=False))
    kept = []
    for name in keep:
        if name not in modules:
            raise PagingError(
                f"keep= names {name!r}, which is no module of {type(model).__name__}. "
                "Take names from model.named_modules()."
            )
        kept.append(modules[name])
    return kept


def checked_methods(model: nn.Module, methods: Iterable[str]) -> list[Method]:
    """Return the methods of these names, each once; submodules' with their path.

    Raises:
        PagingError: a name is no method's, or the method goes on after it has returned.
    """
    if isinstance(methods, str):
        raise PagingError(f"methods= takes names of methods, such as methods=({methods!r},).")
    if not isinstance(methods, Iterable):
        raise PagingError(f"methods={methods!r}: write names of methods, such as ('encode',).")
    return [_checked_method(model, name) for name in dict.fromkeys(methods)]


def _checked_method(model: nn.Module, name: object) -> Method:
    path, _, own = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    module = dict(model.named_modules(remove_duplicate=False)).get(path)
    function = None if module is None or not own else getattr(module, own, None)
    if module is None or not callable(function) or isinstance(function, nn.Module):
        where = model if module is None else module
        has = ", ".join(_methods_of(where)) or "none beside forward"
        raise PagingError(
            f"methods= names {name!r}, which is no method of {type(model).__name__} or of a module "
            f"in it. {type(where).__name__} has: {has}."
        )
    plain = inspect.unwrap(function)
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(plain) for is_kind in kinds):
        raise PagingError(
            f"methods= names {name!r}, which goes on after it has returned: its weights would be "
            "on the host again. Name the methods that it calls."
        )
    return Method(module, own)


def _methods_of(module: nn.Module) -> list[str]:
    """Return the public methods that a module's class adds to those of every module."""
    return [
        name
        for name in dir(type(module))
        if not name.startswith("_")
        and not hasattr(nn.Module, name)
        and inspect.isroutine(inspect.getattr_static(type(module), name))
    ]


def checked_layer_size(size: object) -> UnitSize | None:
    """Return a number of parameters, or of bytes given as text; None for -1 (the planner).

    Raises:
        PagingError: it is neither.
    """
    if isinstance(size, str):
        try:
            return UnitSize(parse_bytes(size))
        except ByteSizeError as error:
            raise PagingError(f"max_layer_size={size!r} is no number of bytes: {error}") from error
    # True is an int, and a mistake.
    if isinstance(size, int) and not isinstance(size, bool) and (size == -1 or size > 0):
        return UnitSize(n_parameters=size) if size > 0 else None
    raise PagingError(
        f"max_layer_size={size!r}: write a number of parameters, a number of bytes such as "
        '"64MiB", or -1 to leave it to the planner.'
    )


def checked_host(host: object, *, may_be_file: bool = False) -> str | Path:
    """``"pinned"``, ``"pageable"`` or a path.

    Args:
        host: the argument. Text that is no path, and names nothing, may be a typing error.
        may_be_file: whether the path of weights will do as well as a folder.

    Raises:
        PagingError: it is none of these.
    """
    if isinstance(host, str) and host in ("pinned", "pageable"):
        return host
    path = _path_of(host)
    if path is None:
        what = "a folder, or the path of the weights" if may_be_file else "the path of a folder"
        example = "model" if not isinstance(host, str) else host.strip() or "model"
        raise PagingError(
            f'host={host!r}: write host="pinned", host="pageable", or {what}, such as '
            f"host={'./' + example!r}."
        )
    return path


def checked_folder_of_converted(host: object) -> Path | None:
    """Return a folder for converted weights, or None.

    Raises:
        PagingError: it is neither.
    """
    path = None if host is None else _path_of(host)
    if host is not None and path is None:
        raise PagingError(
            f"host={host!r}: the weights stay in their own files. Name a folder, such as "
            "host='./converted', for those that have to be converted, or leave it out."
        )
    return path


def _path_of(host: object) -> Path | None:
    if isinstance(host, Path):
        return host
    if not isinstance(host, str) or not host.strip():
        return None
    path = Path(host)
    is_path = len(path.parts) > 1 or "/" in host or path.suffix == ".safetensors"
    return path if is_path or os.path.lexists(path) else None


def check_seconds_and_speed(link_bytes_per_s: object, compute_s: object) -> None:
    """Refuse what no plan can be made by; None stands for what is not known.

    Raises:
        PagingError: the speed is not above 0, or the time is below 0, or one is not finite.
    """
    if link_bytes_per_s is not None and not (_is_finite(link_bytes_per_s) and link_bytes_per_s > 0):
        raise PagingError(f"link_bytes_per_s={link_bytes_per_s!r}: write a number above 0.")
    if compute_s is not None and not (_is_finite(compute_s) and compute_s >= 0):
        raise PagingError(f"compute_s={compute_s!r}: write a number of seconds, at least 0.")


def checked_prefetch(prefetch: object) -> int | None:
    """Return the most units to fetch ahead; None for as many as fit.

    Raises:
        PagingError: it is neither ``"auto"`` nor a number.
    """
    if prefetch == "auto":
        return None
    if isinstance(prefetch, int) and not isinstance(prefetch, bool) and prefetch >= 0:
        return prefetch
    raise PagingError(
        f'prefetch={prefetch!r}: write prefetch="auto", or how many units to fetch ahead at most.'
    )


def check_training(training: object, device: str | torch.device, host: object) -> None:
    """Refuse training on the CPU, and of what lies on a disk.

    Raises:
        PagingError: training was asked for, and the device is the CPU or the host is a folder.
    """
    if training and str(device) == "cpu":
        raise PagingError(
            "training=True and 'cpu': a paged model trains on an accelerator alone, with its "
            "weights in host memory. Name an accelerator, such as 'cuda', and leave host= out; or "
            "train on the CPU without page(), where tenure.adaptive.step() lowers what the batch "
            "takes."
        )
    if training and isinstance(host, Path):
        raise PagingError(
            f"training=True and host={str(host)!r}: a backward pass has its gradients, and an "
            "optimizer its state, in host memory, and files are not written to. Leave host= out, "
            "or page it for inference."
        )


def check_activations(activations: object, *, training: bool) -> None:
    """Refuse what is no place for activations.

    Raises:
        PagingError: it is neither ``"host"`` nor None, or nothing is trained.
    """
    if activations not in (None, "host"):
        raise PagingError(
            f'activations={activations!r}: write activations="host", or None to leave them on the '
            "device."
        )
    if activations is not None and not training:
        raise PagingError(
            f"activations={activations!r} without training=True: only a backward pass needs them "
            "again, and without one they go as soon as the forward has used them. Leave it out."
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return free_host_bytes()
    told = free_memory(torch.get_device_module(device), device)
    if told is None:
        raise PagingError(
            f"torch.{device.type} can't tell how much of {str(device)!r} is free, of which a share "
            'was asked for. Write budget= as a number of bytes, such as "6GiB".'
        )
    return told[0]


def _is_finite(number: object) -> TypeGuard[float]:
    return isinstance(number, int | float) and math.isfinite(number)


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


CPU = ", or 'cpu'"
"""The advice of `checked_device` where the CPU will do as well."""


def instead_of_accelerator(host: object, *, training: bool) -> str:
    """If weights come from a folder, the CPU will do; else a folder would, but not to train."""
    if isinstance(host, Path):
        return CPU
    return "" if training else ", or 'cpu' with a folder: host=Path(...)"


def checked_device(
    device: str | torch.device,
    elsewhere: str = "",
    *,
    may_be_missing: bool = False,
) -> torch.device:
    """Return an accelerator that is there, with its index; the CPU where weights come from a disk.

    Args:
        device: what was asked for.
        elsewhere: what the user may name in its place, as advice; with ``CPU`` that will do.
        may_be_missing: whether it need not be here, as for a plan.

    Raises:
        PagingError: it is none, or a graph is being captured.
    """
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PagingError(f"{device!r} is not a device.") from error
    if chosen.type == "cpu" and elsewhere == CPU:
        return torch.device("cpu")
    if chosen.type in NO_ACCELERATOR:
        raise PagingError(
            f"A model in host memory can't be paged to {chosen.type!r}: there is nothing to gain. "
            f"Name an accelerator, such as 'cuda'{elsewhere}."
        )
    module = getattr(torch, chosen.type, None)
    if module is None or not module.is_available():
        if may_be_missing and module is not None:
            return chosen
        raise PagingError(
            f"There is no {chosen.type!r} device here that a model could be paged to. Name one "
            f"that is there{elsewhere}."
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
            "of its handle first; without the handle, page a copy: copy.deepcopy(model)."
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
