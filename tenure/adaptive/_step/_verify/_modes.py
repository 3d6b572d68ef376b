"""The mode below which a step is verified: constant random numbers, and worse rounding.

Random numbers are the same for every sample, so that two runs can be compared; weights of layers
keep theirs. What torch knows of its operations decides: those that its tag calls seeded. Dispatch
modes see them below autograd, in checkpoints and in backward passes; a verification compiles
nothing. Invariant: an operation draws as many numbers whatever the shape that it fills, so a run of
fewer samples from the same random state gets the same numbers.

Rounding is a little worse than the hardware's, to see how far it carries. Source: Monte Carlo
arithmetic, Parker 1997, https://www.cs.cmu.edu/~rutenbar/pdf/. Two kernels for two sizes of a batch
add in another order; how far their results are apart after a whole network can't be told from the
type alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tenure._containers import passed_tensors
from tenure._torch.modes import EagerMode, schema_of

_Args = dict[str, Any]
_MOST_AT_ONCE = 1 << 14
_MOST_NUMBERS = 100_000
"""Then a loop waits for a number that it does not get."""
_aten = torch.ops.aten
_EXACT = frozenset(
    {
        _aten.clone, _aten._to_copy, _aten.copy, _aten.cat, _aten.stack, _aten.index,
        _aten.index_select, _aten.gather, _aten.embedding, _aten.zeros_like, _aten.ones_like,
        _aten.full_like, _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_full,
        _aten.new_empty, _aten.relu, _aten.neg, _aten.abs, _aten.sign, _aten.where, _aten.max,
        _aten.min, _aten.sort, _aten.topk, _aten.masked_fill, _aten.constant_pad_nd,
        _aten._local_scalar_dense, _aten.flip, _aten.roll, _aten.repeat, _aten.eq, _aten.ne,
        _aten.threshold_backward, _aten.maximum, _aten.minimum, _aten.clamp, _aten.round,
        _aten.floor, _aten.native_dropout,
    }
)  # fmt: skip
"""Operations that round nothing."""


class ConstantNumbers(EagerMode):
    """Fills what torch would fill with random numbers with one of them; dropout keeps everything.

    A permutation reverses the order, so that work that shuffles its samples mixes them still.

    Args:
        types: gets the types of floating point that operations round to, which no result may show.
        n_roundings: by up to how many roundings each operation that rounds is off, at random. Whole
            numbers stay: positions that are counted in floats are exact, and one a little less
            would be another index. What is finite stays finite, such as the largest number as a
            mask.
        seed: which numbers these are; the same ones are as much larger with more roundings.

    Attributes:
        has_drawn: whether an operation, or a module that is off, would have drawn numbers.
        has_unknown: whether one may have drawn numbers that are not constant.
    """

    supports_higher_order_operators = True

    def __init__(
        self, types: set[torch.dtype] | None = None, n_roundings: int = 0, seed: int = 0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self.has_drawn = False
        self.has_unknown = False
        self._types = types
        self._n_roundings = n_roundings
        self._numbers = torch.Generator().manual_seed(seed) if n_roundings else None
        self._n_numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, a random one with a constant."""
        # a higher-order operator has no tags
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        is_random |= getattr(func, "overloadpacket", None) is _aten.random_
        # a function may keep a layer that it makes; its shape does not depend on the samples
        if is_random and not (args and isinstance(args[0], nn.Parameter)):
            result = self._without_numbers(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        if (self._types is not None or self._n_roundings) and _may_round(func):
            for arg in args:
                if isinstance(arg, Tensor) and arg.is_floating_point():
                    made = [result] if isinstance(result, Tensor) else passed_tensors(result)
                    for each in made:
                        if each.is_floating_point() and self._types is not None:
                            self._types.add(each.dtype)
                        if each.is_floating_point() and self._n_roundings:
                            self._round(each, self._n_roundings * _eps(func, each))
                    break
        return result

    def _round(self, made: Tensor, eps: float) -> None:
        # an expanded tensor can't be written to
        is_expanded = made.dim() and 0 in made.stride() and made.numel() > 1
        if made.layout is torch.strided and not is_expanded:
            # some at a time: the step may need all memory that there is
            for part in made.view(-1).split(_MOST_AT_ONCE) if made.is_contiguous() else [made]:
                self._round_part(part, eps)

    def _round_part(self, made: Tensor, eps: float) -> None:
        # half precision could not hold a factor so near to 1
        wide = made.dtype if made.dtype is torch.float64 else torch.float32
        # of the CPU: not every device lets a program make a generator
        noise = torch.rand(made.shape, dtype=wide, device="cpu", generator=self._numbers)
        exact = made.to(wide)
        rough = exact * noise.mul_(2).sub_(1).mul_(eps).add_(1).to(made.device)
        rough = rough.to(made.dtype).to(wide)
        # all numbers of the type that are larger than this are whole
        is_inexact = (exact != exact.round()) | (exact.abs() >= 1 / torch.finfo(made.dtype).eps)
        made.copy_(rough.where(is_inexact & rough.isfinite(), exact))

    def _without_numbers(self, func: Any, args: Any, kwargs: _Args) -> Any:
        named = [argument.name for argument in schema_of(func).arguments]
        given: _Args = dict(zip(named, args, strict=False)) | kwargs
        # fused attention and cuDNN's RNNs draw inside; without a rate they draw nothing
        rates = [name for name in named if name in ("dropout_p", "dropout")]
        if rates:
            self.has_drawn |= any(given.get(name) for name in rates)
            return _call(func, given | dict.fromkeys(rates, 0.0))
        packet = func.overloadpacket
        rule = _RULES.get(packet)
        is_known = "size" in given or rule is not None or packet in _FILLING
        # it may be right all the same: samples are exchanged to find out
        if not is_known or "out" in given or self._n_numbers >= _MOST_NUMBERS:
            self.has_unknown = True
            return func(*args, **kwargs)
        self.has_drawn = True
        self._n_numbers += 1
        with torch.no_grad():
            # the one number that it draws for a single element
            if "size" in given:
                one: Tensor = _call(func, given | {"size": [1]})
                return one.reshape(()).expand(given["size"]).contiguous()
            if rule is not None:
                result: Any = rule(given)
                return result
            like: Tensor = given["self"]
            one = _call(func, given | {"self": like.new_empty(1)})
            is_in_place = packet.__name__.endswith("_")
            return (like if is_in_place else torch.empty_like(like, dtype=one.dtype)).copy_(one)


def _call(func: Any, given: _Args) -> Any:
    known = [each for each in schema_of(func).arguments if each.name in given]
    args = [given[each.name] for each in known if not each.kwarg_only]
    return func(*args, **{each.name: given[each.name] for each in known if each.kwarg_only})


# --- what operations give that read numbers of each sample, of their arguments by name


def _number(draw: Callable[..., Tensor] = torch.rand) -> float:
    # of the CPU, so that devices agree
    return float(draw((), dtype=torch.float64, device="cpu"))


def _bernoulli(given: _Args) -> Tensor:
    # kept by dropout, which divides by the same; of a mask of whole numbers all are kept
    filled, p = given["self"], given.get("p")
    if isinstance(p, float):
        return torch.full_like(filled, p if filled.is_floating_point() else 1)
    made: Tensor = ((filled if p is None else p) > _number()).to(filled.dtype)
    return made


def _dropout(given: _Args) -> tuple[Tensor, Tensor]:
    values: Tensor = given["self"] if "self" in given else given["input"]
    return values.clone(), torch.ones_like(values, dtype=torch.bool)


def _multinomial(given: _Args) -> Tensor:
    # the likeliest ones: what is drawn depends on the row alone, and not on its place
    weights, n = given["self"], given["num_samples"]
    made: Tensor = weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], n)
    return made.contiguous() if given.get("replacement") else weights.topk(n, dim=-1).indices


def _permuted(given: _Args) -> Tensor:
    # a constant order would leave samples in place, and hide a loss that pairs them up
    made = torch.arange(given["n"] - 1, -1, -1, device=given.get("device"))
    return made if given.get("dtype") is None else made.to(given["dtype"])


_RULES: dict[Any, Callable[[_Args], Any]] = {
    _aten.bernoulli: _bernoulli,
    _aten.bernoulli_: lambda given: given["self"].copy_(_bernoulli({"p": 0.5, **given})),
    _aten.native_dropout: _dropout,
    _aten._fused_dropout: _dropout,
    _aten.normal: lambda given: (
        given.get("mean", 0.0) + given.get("std", 1.0) * _number(torch.randn)
    ),
    _aten.multinomial: _multinomial,
    _aten.randperm: _permuted,
    _aten.poisson: lambda given: given["self"].round(),
    _aten._standard_gamma: lambda given: given["self"] * (0.5 + _number()),
}
_FILLING = frozenset(
    {
        _aten.rand_like, _aten.randn_like, _aten.randint_like, _aten.normal_, _aten.log_normal_,
        _aten.uniform_, _aten.exponential_, _aten.cauchy_, _aten.geometric_, _aten.random_,
    }
)  # fmt: skip
"""Operations that draw, and read nothing of the tensor that they fill, or are to be like."""


@functools.cache
def _may_round(func: Any) -> bool:
    schema = schema_of(func)
    if schema is None or func.overloadpacket in _EXACT:
        return False
    # views round nothing, and what is written in place may be a buffer of the user's
    return all(returned.alias_info is None for returned in schema.returns)


def _eps(func: Any, made: Tensor) -> float:
    """Return one rounding of an operation; CUDA may compute float32 products in TF32."""
    if made.dtype is torch.float32 and made.device.type == "cuda":
        is_convolution = "convolution" in func.overloadpacket.__name__
        backends: Any = torch.backends
        backend = backends.cudnn.conv if is_convolution else backends.cuda.matmul
        if backend.fp32_precision == "tf32":
            return 2.0**-11
    return torch.finfo(made.dtype).eps
