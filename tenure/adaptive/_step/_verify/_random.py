"""Random numbers that are the same for every sample, so that two runs can be compared.

What torch knows of its operations decides: those that its tag calls seeded. Dispatch modes see them
below autograd, in checkpoints and in backward passes; compiled functions run eagerly below one.

Invariant: an operation draws one number of torch's default generator, whatever the shape that it
fills; so a run of fewer samples from the same random state gets the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from tenure._torch.modes import DispatchMode, schema_of

_Args = dict[str, Any]
_Rule = Callable[[_Args, float], Any]
_MOST_NUMBERS = 100_000
"""Then a loop waits for a number that it does not get."""


class ConstantNumbers(DispatchMode):
    """Fills what torch would fill with random numbers with one of them; dropout keeps everything.

    A permutation reverses the order, so that work that shuffles its samples mixes them still.

    Attributes:
        has_unknown: whether an operation drew numbers that are not constant.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self.has_unknown = False
        self._n_numbers = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, a random one with a constant."""
        kwargs = dict(kwargs or {})
        if not _is_random(func):
            return func(*args, **kwargs)
        named = [argument.name for argument in schema_of(func).arguments]
        given = dict(zip(named, args, strict=False)) | kwargs
        off = {name: 0.0 for name in ("dropout_p", "dropout") if name in given}
        if off:
            return _call(func, given | off)
        rule = _RULES.get(func.overloadpacket)
        if rule is None or self._n_numbers >= _MOST_NUMBERS:
            self.has_unknown = True
            return func(*args, **kwargs)
        self._n_numbers += 1
        with torch.no_grad():
            return rule(given, _one_number())


def _is_random(func: Any) -> bool:
    tags = getattr(func, "tags", ())  # a higher-order operator has none
    return (
        torch.Tag.nondeterministic_seeded in tags
        or getattr(func, "overloadpacket", None) is _aten.random_
    )


def _one_number() -> float:
    return 0.05 + 0.9 * float(torch.rand((), dtype=torch.float64, device="cpu"))


def _call(func: Any, given: _Args) -> Any:
    arguments = schema_of(func).arguments
    args = [given[a.name] for a in arguments if a.name in given and not a.kwarg_only]
    return func(
        *args, **{a.name: given[a.name] for a in arguments if a.name in given and a.kwarg_only}
    )


# --- what each operation gives, of its arguments by name and of one number between 0 and 1


def _gaussian(number: float, mean: float = 0.0, std: float = 1.0) -> float:
    return NormalDist().inv_cdf(number) * std + mean


def _whole(number: float, low: int, high: int) -> int:
    return low + int(number * (high - low))


def _full(given: _Args, value: float) -> Tensor:
    named = {key: given.get(key) for key in ("dtype", "layout", "device", "pin_memory")}
    dtype = named["dtype"]
    if dtype is None:
        named["dtype"] = torch.int64 if isinstance(value, int) else torch.get_default_dtype()
    return torch.full(given["size"], value, **{k: v for k, v in named.items() if v is not None})


def _like(given: _Args, value: float) -> Tensor:
    named = {key: given.get(key) for key in ("dtype", "layout", "device", "memory_format")}
    return torch.full_like(
        given["self"], value, **{k: v for k, v in named.items() if v is not None}
    )


def _normal(given: _Args, number: float) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if "size" in given:
        return _full(given, _gaussian(number, mean, std))
    made: Tensor = mean + std * _gaussian(number)
    return made


def _bernoulli(given: _Args, number: float) -> Tensor:
    probability = given["self"]
    if isinstance(given.get("p"), float):
        return torch.full_like(probability, given["p"])
    made: Tensor = (probability > number).to(probability.dtype)
    return made


def _bernoulli_in_place(given: _Args, number: float) -> Tensor:
    filled: Tensor = given["self"]
    p = given.get("p", 0.5)
    if isinstance(p, Tensor):
        return filled.copy_(p > number)
    # kept by dropout, which divides by the same; of a mask of whole numbers all are kept
    return filled.fill_(p if filled.is_floating_point() else 1)


def _dropout(given: _Args, number: float) -> tuple[Tensor, Tensor]:
    values = given.get("self", given.get("input"))
    assert isinstance(values, Tensor)
    return values.clone(), torch.ones_like(values, dtype=torch.bool)


def _drawn(given: _Args, number: float) -> Tensor:
    weights, n = given["self"], given["num_samples"]
    if given.get("replacement"):
        most: Tensor = weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], n)
        return most.contiguous()
    drawn: Tensor = weights.topk(n, dim=-1).indices
    return drawn


def _permuted(given: _Args, number: float) -> Tensor:
    made = torch.arange(given["n"] - 1, -1, -1, device=given.get("device"))
    return made if given.get("dtype") is None else made.to(given["dtype"])


def _any_in_place(given: _Args, number: float) -> Tensor:
    filled: Tensor = given["self"]
    low = given.get("from") or 0
    high = given.get("to")
    return filled.fill_(_whole(number, low, 1 << 10 if high is None else high))


_aten = torch.ops.aten
_RULES: dict[Any, _Rule] = {
    _aten.rand: lambda given, u: _full(given, u),
    _aten.randn: lambda given, u: _full(given, _gaussian(u)),
    _aten.randint: lambda given, u: _full(given, _whole(u, given.get("low", 0), given["high"])),
    _aten.rand_like: lambda given, u: _like(given, u),
    _aten.randn_like: lambda given, u: _like(given, _gaussian(u)),
    _aten.randint_like: lambda given, u: _like(
        given, _whole(u, given.get("low", 0), given["high"])
    ),
    _aten.normal: _normal,
    _aten.bernoulli: _bernoulli,
    _aten.native_dropout: _dropout,
    _aten._fused_dropout: _dropout,
    _aten.multinomial: _drawn,
    _aten.randperm: _permuted,
    _aten.poisson: lambda given, u: given["self"].round(),
    _aten._standard_gamma: lambda given, u: given["self"] * (0.5 + u),
    _aten.bernoulli_: _bernoulli_in_place,
    _aten.normal_: lambda given, u: given["self"].fill_(
        _gaussian(u, given.get("mean", 0.0), given.get("std", 1.0))
    ),
    _aten.log_normal_: lambda given, u: given["self"].fill_(
        math.exp(_gaussian(u, given.get("mean", 1.0), given.get("std", 2.0)))
    ),
    _aten.uniform_: lambda given, u: given["self"].fill_(
        given.get("from", 0.0) + u * (given.get("to", 1.0) - given.get("from", 0.0))
    ),
    _aten.exponential_: lambda given, u: given["self"].fill_(-math.log(u) / given.get("lambd", 1)),
    _aten.cauchy_: lambda given, u: given["self"].fill_(
        given.get("median", 0.0) + given.get("sigma", 1.0) * math.tan(math.pi * (u - 0.5))
    ),
    _aten.geometric_: lambda given, u: given["self"].fill_(1),
    _aten.random_: _any_in_place,
}


def works() -> bool:
    """Whether dropout and noise are constant below the mode, and permutations reversals."""
    ones = torch.ones(4)
    state = torch.get_rng_state()
    with ConstantNumbers():
        kept = torch.nn.functional.dropout(ones, 0.5)
        noise = torch.randn(3)
        order = torch.randperm(3)
    torch.set_rng_state(state)
    return bool(torch.equal(kept, ones) and noise.unique().numel() == 1 and order[0] == 2)
