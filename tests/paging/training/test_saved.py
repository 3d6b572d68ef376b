"""What graphs keep of a paged model: weights by their place, and what was written since raises."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tenure.paging import PagingError, page

from .blocks import LARGE, WIDTH, inputs
from .conftest import either_way


def test_a_weight_that_is_stepped_between_forward_and_backward_raises_torchs_words(sim, halved):
    optimizer = torch.optim.SGD(halved.host.parameters(), 0.1)
    x = inputs(sim)[0]
    halved.host(x).sum().backward()
    loss = halved.host(x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"^one of the variables needed for gradient .* at vers"):
        loss.backward()
    halved.host.zero_grad()
    halved.there.load_state_dict(halved.host.state_dict())
    halved.run(lambda model: model(x).sum().backward())
    assert halved.gradients_differ() == []


@either_way
def test_an_activation_that_is_written_in_place_raises_torchs_words(sim, halved):
    x = inputs(sim, 1, LARGE)[0].requires_grad_()

    def run(model):
        hidden = model[0](x)
        loss = model[1](hidden).sum()
        # a copy to the host may still read it
        sim.module.synchronize()
        with torch.no_grad():
            hidden.add_(1)
        with pytest.raises(RuntimeError, match=r"^one of the variables needed for gradient comp"):
            loss.backward()

    halved.run(run)


def selective():
    return create_selective_checkpoint_contexts([torch.ops.aten.gelu.default])


class Writing(nn.Module):
    """Writes its weight in the forward, before it is used or after."""

    def __init__(self, how):
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.how = how

    def forward(self, x):
        weight = self.linears[1].weight
        for linear in self.linears:
            if self.how == "before":
                with torch.no_grad():
                    linear.weight.mul_(0.5)
            x = linear(x)
        if self.how == "after":
            with torch.no_grad():
                weight.mul_(0.5)
        if self.how == "as a leaf":
            weight.mul_(0.5)
        return x


def test_a_weight_may_be_written_in_the_forward_before_it_is_used(sim, pair):
    both = pair(Writing("before"))
    x = inputs(sim)[0].requires_grad_()
    with both.page(0.8):
        for _ in range(2):
            both.run(lambda model: model(x).sum().backward())
            assert both.gradients_differ() == []
    assert both.values_differ() == []


def test_a_weight_that_the_forward_writes_after_its_use_raises_torchs_words(sim, pair):
    both = pair(Writing("after"))
    x = inputs(sim)[0].requires_grad_()

    def run(model):
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match=r"^one of the variables needed for gradient comp"):
            loss.backward()

    with both.page(0.8):
        both.run(run)
    assert both.values_differ() == []


def test_a_weight_that_is_written_as_part_of_the_graph_is_refused(sim, pair):
    both = pair(Writing("as a leaf"))
    x = inputs(sim)[0]
    text = r"'linears.1.weight' was written in place with grad"
    with both.page(0.8), pytest.raises(PagingError, match=text):
        both.host(x)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        both.there(x)


def test_a_weight_inside_is_a_parameter_and_one_object(sim, pair):
    class Looking(nn.Linear):
        def forward(self, x):
            assert isinstance(self.weight, nn.Parameter)
            assert self.weight is self.weight
            assert self.weight.requires_grad
            assert next(self.parameters()).device == x.device
            # read without gradients and used with them
            with torch.no_grad():
                weight = self.weight
            return F.linear(x, weight, self.bias)

    both = pair(nn.Sequential(*[Looking(WIDTH, WIDTH) for _ in range(4)]))
    with both.page():
        both.run(lambda model: model(inputs(sim)[0]).sum().backward())
        assert both.gradients_differ() == []


def sorted_values(tensor):
    return tensor.detach().cpu().flatten().sort().values


def test_hooks_around_get_all_but_weights(sim, pair):
    both = pair()
    weights = [sorted_values(weight) for weight in both.there.parameters()]
    packed = []

    def pack(tensor):
        # in whatever order: a weight is saved transposed as well
        values = sorted_values(tensor)
        packed.append(any(values.equal(w) for w in weights if w.dtype is values.dtype))
        return tensor.cpu()

    def run(model):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(sim.device)):
            loss = model(inputs(sim)[0]).sum()
        loss.backward()

    both.host.eval()
    both.there.eval()
    with both.page():
        run(both.host)
        assert set(packed) == {False}
        run(both.there)
        assert True in packed
        assert both.gradients_differ() == []


@either_way
def test_a_checkpoint_of_the_whole_model(sim, halved):
    x = inputs(sim, 1, LARGE)[0]

    def run(model):
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        y.sum().backward()

    halved.run(run)
    assert halved.gradients_differ() == []


@pytest.mark.parametrize(
    ("n_in_one", "early_stop", "context_fn"),
    [(1, True, None), (2, False, None), (4, True, selective)],
)
def test_checkpoints_need_no_more_than_the_least_budget(
    sim, pair, n_in_one, early_stop, context_fn
):
    # without a bias, the node asks for the weight before the input, which is recomputed
    def block():
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))

    options = {"use_reentrant": False, "early_stop": early_stop}
    if context_fn is not None:
        options["context_fn"] = context_fn

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*[block() for _ in range(4)]).double()

        def forward(self, x):
            for i in range(0, 4, n_in_one):
                x = checkpoint(self.blocks[i : i + n_in_one], x, **options)
            return x

    both = pair(Checkpointed())
    x = inputs(sim)[0].double().requires_grad_()
    with pytest.raises(PagingError, match=r"the least is") as caught:
        both.page(0, max_layer_size=1)
    with page(both.host, sim.device, 1, budget=caught.value.minimum_bytes, training=True):
        for _ in range(2):
            both.run(lambda model: model(x).square().sum().backward())
            assert both.gradients_differ() == []
