"""What programs do with graphs and gradients is the same where the weights are paged."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tenure.paging import PagingError, page

from ..models import build, linears
from ..support import about_values, on_device
from .blocks import LARGE, WIDTH, Checkpointed, inputs, mlp

pytestmark = about_values
STALE = r"^one of the variables needed for gradient .* at vers"


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("decoder", None),
        ("functional", "host"),
        ("lstm", "host"),
        ("resnet", "host"),
        ("shared", "host"),
        ("tied", None),
    ],
)
def test_models_of_every_kind_get_the_gradients_of_a_plain_one(
    sim, pair, monkeypatch, name, activations
):
    monkeypatch.setattr("tenure.paging._activations.SMALL_BYTES", 1)
    model, args, kwargs = build(name)
    both = pair(model.train())
    args, kwargs = on_device((args, kwargs), sim.device)

    def total(outputs):
        leaves = torch.utils._pytree.tree_leaves(outputs)
        return sum(each.square().sum() for each in leaves)

    with both.page(1.3 if name == "lstm" else 0.75, activations=activations):
        for _ in range(2):
            both.run(lambda model: total(model(*args, **kwargs)).backward())
            # what is fetched several times in a forward is added up in another order
            assert both.gradients_differ() == [] or name == "shared"
            for p, q in zip(both.host.parameters(), both.there.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad.cpu())
    assert both.values_differ() == []


@pytest.mark.parametrize("halved", [None, "host"], indirect=True)
@pytest.mark.usefixtures("uncollected")
def test_a_graph_that_is_kept_gives_the_same_again_and_leaks_nothing(sim, halved):
    x = inputs(sim, 1, LARGE)[0]

    def twice(model):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="through the graph a second time"):
            loss.backward()

    halved.run(twice)
    assert halved.gradients_differ() == []
    halved.host.zero_grad()
    gc.collect()
    before_bytes = sim.allocated_bytes
    for keeps in (True, False, None):
        loss = halved.host(x).square().exp().sum()
        if keeps is not None:
            loss.backward(retain_graph=keeps)
        del loss
        assert sim.allocated_bytes == before_bytes


def gradients_of_parameters_and_of_inputs(model, x, *_):
    x = x.detach().requires_grad_()
    loss = model(x).square().sum()
    return torch.autograd.grad(loss, [x, *model.parameters()])


def a_penalty_of_gradients(model, x, *_):
    x = x.detach().requires_grad_()
    loss = model(x).square().mean()
    own = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
    (loss + sum(each.square().sum().to(loss.device) for each in own)).backward()


def two_forwards_before_their_backward_passes(model, x, y, _):
    one, other = model(x).sum(), model(y).square().sum()
    one.backward()
    other.backward()


def forwards_of_one_loss(model, x, y, z):
    (model(x).mean() + model(model(y)).square().mean() * model(z).mean()).backward()


def autocast_and_a_checkpoint_of_the_whole_model(model, x, *_):
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    checkpoint(model, x, use_reentrant=False).sum().backward()


def passes_without_gradients_in_between(model, x, y, _):
    model.eval()
    with torch.no_grad():
        before = model(y)
    model.train()
    model(x).sum().backward()
    with torch.inference_mode():
        return before, model.eval()(y)


@pytest.mark.parametrize("activations", [None, "host"])
@pytest.mark.parametrize(
    ("program", "is_exact"),
    [
        (gradients_of_parameters_and_of_inputs, True),
        (a_penalty_of_gradients, False),
        (two_forwards_before_their_backward_passes, True),
        (forwards_of_one_loss, False),
        (autocast_and_a_checkpoint_of_the_whole_model, True),
        (passes_without_gradients_in_between, True),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_program_gives_what_it_gives_of_a_plain_model(sim, pair, program, is_exact, activations):
    both, xs, share = pair(), inputs(sim, 3, LARGE), 0.5
    if program is a_penalty_of_gradients:
        # its graph holds weights, if activations don't wait on the host
        share = 2 if activations is None else 0.7
    with both.page(share, activations=activations):
        for _ in range(2):
            if is_exact:
                both.agree(lambda model: program(model, *xs))
            else:
                both.run(lambda model: program(model, *xs))
                assert both.gradients_are_close()
            both.run(nn.Module.zero_grad)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_hooks_of_tensors_and_of_their_accumulation_see_gradients_on_the_host(sim, halved):
    seen = {halved.host: [], halved.there: []}
    for model, told in seen.items():
        for p in model.parameters():
            p.register_hook(lambda g, told=told: told.append(g.cpu().clone()) or g * 2)
            p.register_post_accumulate_grad_hook(lambda p, told=told: told.append(p.grad.cpu()))
    halved.train(*inputs(sim, 1))
    assert len(seen[halved.host]) == 2 * len(list(halved.host.parameters()))
    ours, theirs = ({tuple(t.flatten().tolist()) for t in told} for told in seen.values())
    assert ours == theirs


@pytest.mark.parametrize(
    ("n_in_one", "early_stop", "context_fn"),
    [
        (1, True, None),
        (2, False, None),
        (4, True, partial(create_selective_checkpoint_contexts, [torch.ops.aten.gelu.default])),
    ],
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
    parts = [nn.Sequential(*[block() for _ in range(n_in_one)]) for _ in range(4 // n_in_one)]
    both = pair(Checkpointed(nn.Sequential(*parts).double(), **options))
    x = inputs(sim)[0].double().requires_grad_()
    with pytest.raises(PagingError, match=r"the least is") as caught:
        both.page(0, max_layer_size=1)
    with page(both.host, sim.device, 1, budget=caught.value.minimum_bytes, training=True):
        both.train(x, x)


def test_a_graph_keeps_no_weight_and_no_model(sim, pair):
    both = pair()
    with both.page():
        # a graph that held weights would leave no room for those of the next
        losses = [both.host(inputs(sim)[0]).sum() for _ in range(3)]
        losses.clear()
    model = mlp()
    gone = weakref.ref(model)
    x = inputs(sim)[0]
    handle = page(model, sim.device, budget="12KiB", training=True)
    model(x).sum().backward()
    handle.unpage()
    del model, handle
    gc.collect()
    assert gone() is None


def sorted_values(tensor):
    return tensor.detach().cpu().flatten().sort().values


@pytest.mark.parametrize("activations", [None, "host"])
def test_hooks_of_the_users_own_come_first_and_get_all_but_weights(sim, pair, activations):
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
            loss = model(inputs(sim, 1, LARGE)[0]).sum()
        loss.backward()

    with both.page(activations=activations):
        copied_bytes = sim.copied_bytes("d2h")
        run(both.host)
        assert set(packed) == {False}
        ours_bytes = sim.copied_bytes("d2h") - copied_bytes
        run(both.there)
        assert True in packed
        assert both.gradients_differ() == []
        # the pager has copied no activation once more
        assert ours_bytes <= sim.copied_bytes("d2h") - copied_bytes


@pytest.mark.parametrize("activations", [None, "host"])
def test_an_activation_that_is_written_in_place_raises_torchs_words(sim, pair, activations):
    both = pair()
    x = inputs(sim, 1, LARGE)[0].requires_grad_()

    def run(model):
        hidden = model[:2](x)
        loss = model[2](hidden).sum()
        # a copy to the host may still read it
        sim.module.synchronize()
        with torch.no_grad():
            hidden.add_(1)
        with pytest.raises(RuntimeError, match=STALE):
            loss.backward()

    with both.page(activations=activations):
        both.run(run)


class Writing(nn.Module):
    """Writes its weight in the forward, before it is used or after."""

    def __init__(self, how):
        super().__init__()
        self.linears = linears(4)
        self.how = how

    def forward(self, x):
        weight = self.linears[1].weight
        for linear in self.linears:
            if self.how == "before":
                with torch.no_grad():
                    linear.weight.mul_(0.5)
            x = linear(x)
        with torch.set_grad_enabled(self.how == "as a leaf"):
            if self.how != "before":
                weight.mul_(0.5)
        return x


def test_a_weight_may_be_written_in_the_forward_before_its_use_and_raises_after_it(sim, pair):
    x = inputs(sim)[0].requires_grad_()
    before, after, leaf = (pair(Writing(how)) for how in ("before", "after", "as a leaf"))
    with before.page(0.8):
        before.train(x, x)
    assert before.values_differ() == []

    def run(model):
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match=STALE):
            loss.backward()

    with after.page(0.8):
        after.run(run)
    assert after.values_differ() == []
    text = r"'linears.1.weight' was written in place with grad"
    with leaf.page(0.8), pytest.raises(PagingError, match=text):
        leaf.host(x)


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
        both.train(*inputs(sim, 1))
