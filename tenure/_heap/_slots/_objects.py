"""The slots of instances, classes, tensors and thread-local objects, named as attributes."""

import gc
import threading
import types
from collections.abc import Iterator

import torch

from tenure._torch.quiet import TENSOR_BASE

from .._static import class_attributes, instance_attributes, is_kind, mro_of, type_name
from .._words import Slot, Step, Wanted, attribute, module_attribute, nothing


def instance_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    """Attributes in the instance dictionary and in ``__slots__``."""
    is_module = is_kind(type(holder), torch.nn.Module)
    module = type_name(type(holder)) if is_module else ""
    namer = module_attribute if is_module else attribute
    attributes = instance_attributes(holder)
    yield attributes, Step("", "attribute", namer=namer, module=module)
    for name, value in list(attributes.items()):
        if id(value) in wanted:
            text, following = namer(name)
            yield value, Step(text, "attribute", namer=following, module=module)
    yield from _members(holder, wanted)


def class_slots(holder: type, wanted: Wanted) -> Iterator[Slot]:
    """The dictionary of a class, which only the collector shows."""
    return ((d, Step("", "attribute", namer=attribute)) for d in _dicts_of(holder, wanted))


def thread_local_slots(holder: threading.local, wanted: Wanted) -> Iterator[Slot]:
    """The dictionaries of a `threading.local`: one by thread, and the one that lists them."""
    return ((d, Step("", "thread", namer=nothing)) for d in _dicts_of(holder, wanted))


def tensor_slots(holder: torch.Tensor, wanted: Wanted) -> Iterator[Slot]:
    """What a tensor holds through Python besides its attributes: hooks and its graph node."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "grad_fn"):
        yield getattr(TENSOR_BASE, name).__get__(holder), Step(f".{name}", "attribute")


def _members(holder: object, wanted: Wanted) -> Iterator[Slot]:
    for cls in mro_of(type(holder)):
        for name, descriptor in class_attributes(cls).items():
            if type(descriptor) is types.MemberDescriptorType:
                try:
                    value = descriptor.__get__(holder)
                except AttributeError:  # a slot that was never set
                    continue
                if id(value) in wanted:
                    yield value, Step(f".{name}", "attribute")


def _dicts_of(holder: object, wanted: Wanted) -> list[dict[str, object]]:
    return [r for r in gc.get_referents(holder) if type(r) is dict and id(r) in wanted]
