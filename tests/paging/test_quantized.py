"""Weights that are made of other tensors, as quantized ones are, pass through as plain ones do."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from tenure import NewDisposeScope
from tenure.paging import PagingError, page, plan_paging

from .models import WIDTH, mlp

aten = torch.ops.aten
# what can be done to the numbers alone
_EACH = {
    *(aten.detach.default, aten.clone.default, aten.alias.default),
    *(aten._to_copy.default, aten.t.default),
}


class Quantized(Tensor):
    """int8[n, m] and a scale for each row; and an empty tensor, as some have without using it."""

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
        args, kwargs = pytree.tree_map_only(Quantized, lambda t: t.plain(), (args, kwargs))
        return func(*args, **kwargs)


def quantized(model):
    """The same model with the weights of its linear layers quantized."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = Quantized.of(module.weight)
    return model


def as_plain(value):
    return value.plain() if isinstance(value, Quantized) else value


@pytest.fixture
def sides(sim):
    """The same model on the host and whole on the device, and an input."""
    host = quantized(mlp().eval())
    return host, copy.deepcopy(host).to(sim.device), torch.randn(4, WIDTH, device=sim.device)


@torch.no_grad()
@pytest.mark.parametrize("is_on_disk", [False, True])
def test_weights_pass_and_give_the_results_of_the_model_on_the_device(
    sim, sides, is_on_disk, tmp_path
):
    host, there, x = sides
    before, objects = copy.deepcopy(host).state_dict(), list(host.parameters())
    budget = plan_paging(host, sim.device).weight_bytes * 6 // 10
    with page(host, sim.device, budget=budget, host=tmp_path if is_on_disk else "pinned") as handle:
        assert handle.plan.ring_bytes
        weights = sum(p.numbers.nbytes + p.scale.nbytes for p in host.parameters() if p.dim() == 2)
        biases = sum(p.nbytes for p in host.parameters() if p.dim() == 1)
        # and what is lost where each begins at a whole place
        assert weights + biases <= handle.plan.weight_bytes < 1.3 * (weights + biases)
        for _ in range(3):
            with NewDisposeScope():
                assert torch.equal(host(x), there(x))
        report = handle.report()
        assert report.bytes_per_pass == sum(u.n_bytes for u in handle.plan.units if not u.resident)
        assert report.faults == 0
        assert all(a is b for a, b in zip(host.parameters(), objects, strict=True))
    assert torch.equal(host(x.cpu()), there(x).cpu())
    for name, value in host.state_dict().items():
        assert torch.equal(as_plain(value), as_plain(before[name])), name


@torch.no_grad()
def test_writes_on_either_side_arrive(sim, sides):
    host, there, x = sides
    other = Quantized.of(torch.randn(WIDTH, WIDTH))

    def write(module, args):
        module.weight.copy_(other.to(module.weight.device))

    with page(host, sim.device, budget=5 * 1024):
        host(x)
        for model in (host, there):
            model[0].weight.copy_(other.to(model[0].weight.device))
            # past all versions
            model[2].weight.scale.data.mul_(2)
        assert torch.equal(host(x), there(x))
        hooks = [model[6].register_forward_pre_hook(write) for model in (host, there)]
        assert torch.equal(host(x), there(x))
        for hook in hooks:
            hook.remove()
        assert torch.equal(host[6].weight.numbers, other.numbers)
        state = {name: as_plain(value) + 1 for name, value in host.state_dict().items()}
        for model in (host, there):
            model.load_state_dict(
                {n: Quantized.of(value) if "weight" in n else value for n, value in state.items()}
            )
        assert torch.equal(host(x), there(x))


class Adapted(nn.Module):
    """A linear layer that is frozen, and a small one beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_adapters_train_over_it_and_graphs_keep_no_weights(sim, pair, sides):
    def train(model):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    base, _, x = sides
    layers = base.requires_grad_(False)[::2]
    both = pair(nn.Sequential(*[Adapted(layer) for layer in layers]))
    with page(both.host, sim.device, budget=6 * 1024, training=True) as handle:
        assert handle.plan.ring_bytes < sum(u.n_bytes for u in handle.plan.units if not u.resident)
        for _ in range(2):
            both.agree(train)


class Params4bit(nn.Parameter):
    """As of bitsandbytes: bytes, and a state beside them that moves with its own `to()`."""

    def __new__(cls, data):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = None
        return made

    def to(self, *args, **kwargs):
        return super().to(*args, **kwargs)


class Property(Quantized):
    """Makes a part each time that it is asked for it."""

    @property
    def zero(self):
        return torch.empty(0)

    @zero.setter
    def zero(self, value):
        pass


def two(weight):
    # refuses parts that do not begin at the same place of their storages, as in a page
    return nn.Parameter(TwoTensor(weight.detach(), weight.detach() * 2), requires_grad=False)


NOT_MADE = r"^'10\.weight' \(.*\) can't be paged: it is sparse, or"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Property.of, NOT_MADE),
        (two, NOT_MADE),
        (torch.Tensor.to_sparse, NOT_MADE),
        (
            lambda weight: Params4bit(weight.to(torch.uint8)),
            r"^'10\.weight' is a Params4bit, which moves itself: .* Page the model before it is",
        ),
    ],
)
def test_one_that_can_not_be_made_anew_is_refused_and_the_model_is_as_before(sim, make, told):
    host = mlp().eval()
    weight = make(host[10].weight.detach())
    own = isinstance(weight, Params4bit)
    host[10].weight = weight if own else nn.Parameter(weight, requires_grad=False)
    with pytest.raises(PagingError, match=told):
        page(host, sim.device)
    assert host[10].weight.device.type == "cpu"
    assert sim.allocated_bytes == 0
