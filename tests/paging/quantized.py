"""A quantized weight, as libraries make them: a tensor of its own class around plain ones."""

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten
# what can be done to the numbers alone
_EACH = {aten.detach.default, aten.clone.default, aten.alias.default, aten._to_copy.default}


class Quantized(Tensor):
    """Bytes and a scale for each row.

    Args:
        numbers: int8[n, m].
        scale: floating[n, 1].
        zero: an empty tensor, as some have for what they do not use.
    """

    @staticmethod
    def __new__(cls, numbers, scale, zero):
        return Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), dtype=scale.dtype, device=numbers.device
        )

    def __init__(self, numbers, scale, zero):
        self.numbers, self.scale, self.zero = numbers, scale, zero

    @classmethod
    def of(cls, weight):
        """A weight as such a one; what asks for no gradients."""
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        numbers = (weight.detach() / scale).round().to(torch.int8)
        zero = torch.empty(0, dtype=weight.dtype)
        return nn.Parameter(cls(numbers, scale, zero), requires_grad=False)

    def __tensor_flatten__(self):
        return ["numbers", "scale", "zero"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Quantized(inner["numbers"], inner["scale"], inner["zero"])

    def plain(self):
        return self.numbers.to(self.scale.dtype) * self.scale

    def _each(self, function):
        return type(self)(*(function(t) for t in (self.numbers, self.scale, self.zero)))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _EACH:
            kwargs.pop("dtype", None)
            return args[0]._each(lambda t: func(t, *args[1:], **kwargs))
        if func is aten.copy_.default:
            for name in ("numbers", "scale", "zero"):
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        if func is aten.t.default:
            return Transposed(args[0].numbers.t(), args[0].scale.t(), args[0].zero)
        args, kwargs = pytree.tree_map_only(Quantized, lambda t: t.plain(), (args, kwargs))
        return func(*args, **kwargs)


class Transposed(Quantized):
    """What a matrix product is given."""

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Transposed(inner["numbers"], inner["scale"], inner["zero"])


def quantized(model):
    """The same model with the weights of its linear layers quantized."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = Quantized.of(module.weight)
    return model
