"""While it is paged a model is what it was: who reads, writes, saves, copies or hooks it."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

from tenure import NewDisposeScope
from tenure.paging import PagingError, PagingWarning, page
from tenure.testing import for_each_allocation

from .models import WIDTH, build, linears, mlp
from .support import assert_equal, home, paged, weight_bytes, whole_output

pytestmark = pytest.mark.usefixtures("without_gradients")


def test_the_model_its_modules_and_its_parameters_stay_the_same_objects(sim):
    model, args, _ = build("strided")
    model[0].weight.quantizer = "none"
    before = [model, *model.modules(), *model.parameters()]
    names, strides = zip(*[(name, p.stride()) for name, p in model.named_parameters()], strict=True)
    dictionaries, seen = [vars(layer)["_parameters"] for layer in model], []

    def same_objects():
        now = [model, *model.modules(), *model.parameters()]
        return all(a is b for a, b in zip(before, now, strict=True))

    def look(module, *_):
        weight, first = module.weight, next(module.parameters())
        seen.append((weight.device, first.device, type(weight), weight.stride(), weight.quantizer))

    model[0].register_forward_hook(look)
    with paged(sim, model) as handle:
        assert handle.model is model
        model(*args)
        assert seen == [(sim.device, sim.device, nn.Parameter, (1, WIDTH), "none")]
        assert same_objects()
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert tuple(name for name, _ in model.named_parameters()) == names
        assert type(model[0]) is nn.Linear
    assert same_objects()
    assert tuple(p.stride() for p in model.parameters()) == strides
    assert all(
        vars(layer)["_parameters"] is d for layer, d in zip(model, dictionaries, strict=True)
    )
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert sim.allocated_bytes == 0
    assert repr(handle) == "<PagedModel Sequential on sim:0, unpaged>"


class Saving(nn.Module):
    """Takes state dicts in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.rest, self.states, self.sums = linears(4), [], []

    def forward(self, x):
        self.seen += 1
        x = self.first(x)
        copied = copy.deepcopy(self)
        self.states = [self.state_dict(), self.state_dict(keep_vars=True), copied.state_dict()]
        self.seen += 1
        self.sums.append(self.state_dict()["seen"].sum().item())  # on the host, at once
        return self.rest(x)


def test_a_state_dict_in_the_middle_of_a_forward_is_the_hosts(sim, x):
    model = Saving().train()
    plain = copy.deepcopy(model).to(sim.device)
    with paged(sim, model, 60):
        outside = dict(model.state_dict(keep_vars=True))
        for _ in range(2):
            expected = plain(x.to(sim.device))
            assert torch.equal(model(x), expected)
            state, kept, copied = model.states
            assert all(kept[name] is each for name, each in outside.items())
            assert all(each.data_ptr() == outside[name].data_ptr() for name, each in state.items())
            assert_equal(copied, home(plain.states[2]))
            assert model.seen.eq(plain.seen.cpu()).all()
        assert model.sums == plain.sums == [2 * WIDTH, 4 * WIDTH]


def test_a_state_dict_whose_tensors_are_to_be_assigned_is_refused(sim, model, x):
    expected, other = whole_output(sim.device, model, x), mlp().state_dict()
    before = [*model.parameters()]
    with paged(sim, model):
        with pytest.raises(PagingError, match=r"^load_state_dict\(assign=True\) was called of a"):
            model.load_state_dict(other, assign=True)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert model(x).cpu().equal(expected)
        model.load_state_dict(other)
        assert model(x).cpu().equal(whole_output(sim.device, model, x))
    model.load_state_dict(other, assign=True)


# a layer a unit; or all share one, whose tensors are looked at together where a pass first uses it
@pytest.mark.parametrize(("unit", "percent"), [("1B", 40), ("1B", 100), ("1MiB", 110)])
@pytest.mark.parametrize("write", ["by its version", "by other data"])
def test_a_write_in_the_middle_of_a_pass_is_seen_by_the_layers_to_come(
    sim, x, unit, percent, write
):
    model = nn.Sequential(linears(3))
    weight = model[0][2].weight

    def change(*_):
        sim.module.synchronize()
        if write == "by its version":
            weight.mul_(2)
        else:
            weight.data = weight.detach() * 2

    with page(model, sim.device, unit, budget=weight_bytes(model) * percent // 100):
        model(x)
        handle = model[0][0].register_forward_hook(change)
        found = model(x).cpu()
        handle.remove()
        assert torch.equal(found, whole_output(sim.device, model, x))


def test_a_model_that_changed_its_type_is_refused_until_it_is_unpaged(sim, model, x):
    handle = paged(sim, model)
    model(x)
    model.half()
    with pytest.raises(PagingError, match=r"^'0.weight' was given other memory while it is paged"):
        model(x)
    handle.unpage()
    assert model(x.half()).dtype is torch.float16


def test_buffers_that_change_in_inference_mode_and_after_it_are_those_of_the_whole_model(sim):
    model = nn.Sequential(*[nn.BatchNorm1d(WIDTH) for _ in range(5)], nn.Linear(WIDTH, WIDTH))
    whole, batch = copy.deepcopy(model).to(sim.device), torch.randn(16, WIDTH, device=sim.device)
    with paged(sim, model, 60):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert torch.equal(model(batch), whole(batch))
        assert_equal(model.state_dict(), home(whole.state_dict()))


def test_autocast_keeps_no_copies_of_weights(sim, model, x):
    there = x.to(sim.device)
    with torch.autocast("sim", dtype=torch.bfloat16):
        expected = copy.deepcopy(model).to(sim.device)(there).cpu()
    with paged(sim, model), torch.autocast("sim", dtype=torch.bfloat16):
        resting_bytes = sim.allocated_bytes
        for _ in range(2):
            assert torch.equal(model(there).cpu(), expected)
        assert sim.allocated_bytes == resting_bytes


def test_copies_pickles_and_what_is_saved_are_plain_and_of_their_own(sim, model, x):
    expected, state, file = model(x), copy.deepcopy(model.state_dict()), io.BytesIO()
    with paged(sim, model):
        with torch.inference_mode():
            model(x)
        assert list(model.state_dict()) == list(state)
        assert_equal(model.state_dict(), state)
        torch.save(model[0].bias, file)
        assert len(file.getvalue()) < 3000  # and nothing else of its unit
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        uncalled = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for twin in twins:
            assert torch.equal(twin(x), expected)
            assert type(vars(twin[0])["_parameters"]) is dict
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
            twin[0].weight.zero_()
            assert not model[0].weight.eq(0).any()
    # and paged in each of their calls, the first one too
    for twin in uncalled:
        with paged(sim, twin):
            for _ in range(2):
                assert twin(x).device == sim.device
        assert twin(x).device == x.device


def test_functional_call_uses_what_it_is_given_and_a_submodule_can_be_called_alone(sim, model, x):
    zeros = {name: torch.zeros_like(p, device=sim.device) for name, p in model.named_parameters()}
    expected, inner = whole_output(sim.device, model, x), whole_output(sim.device, model[2], x)
    with paged(sim, model):
        assert torch.func.functional_call(model, zeros, (x,)).eq(0).all()
        assert torch.equal(model(x).cpu(), expected)
        assert torch.equal(model[2](x).cpu(), inner)
        assert model[2].weight.device.type == "cpu"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_the_model_works_again_and_leaving_by_one_unpages(sim, model, x, error):
    expected = whole_output(sim.device, model, x)

    def fail(*_):
        raise error("mine")

    with paged(sim, model):
        model(x)
        hook = model[4].register_forward_hook(fail)
        with pytest.raises(error):
            model(x)
        assert model[0].weight.device.type == "cpu"
        hook.remove()
        assert torch.equal(model(x).cpu(), expected)
    with pytest.raises(error, match=r"^mine$"), paged(sim, model) as handle:
        fail()
    assert handle.closed
    gc.collect()
    assert sim.allocated_bytes == 0


def test_a_failing_allocation_at_every_index_leaves_the_model_usable(sim, model, x):
    expected = whole_output(sim.device, model, x)
    weights = list(model.parameters())

    def run():
        with paged(sim, model):
            return [model(x).cpu()]

    def check(failure):
        del failure
        gc.collect()
        assert sim.allocated_bytes == 0
        assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
        assert not any(m._forward_hooks for m in model.modules())

    assert for_each_allocation(run, check) > 10
    assert all(torch.equal(output, expected) for output in run())


def test_the_scopes_of_the_user_never_dispose_a_page(sim, model, x):
    expected = whole_output(sim.device, model, x)
    with NewDisposeScope():
        handle = paged(sim, model)
    for _ in range(3):
        with NewDisposeScope():
            assert torch.equal(model(x).cpu(), expected)
    handle.unpage()


def test_in_the_steady_state_nothing_is_fetched_late_nor_allocated_and_the_host_never_waits(sim):
    model, x = linears(6, 1024), torch.randn(1, 1024, device=sim.device)
    with paged(sim, model) as handle:
        model(x)
        model(x)
        resting_bytes, waits = sim.allocated_bytes, sim.host_waits
        allocations = sim.n_allocations
        model(x)
        assert sim.host_waits == waits
        assert sim.allocated_bytes == resting_bytes
        assert sim.n_allocations - allocations == len(model)  # the activations
        report = handle.report()
    assert report.faults == 0
    passing = [unit.n_bytes for unit in handle.plan.units if not unit.resident]
    assert report.bytes_per_pass == sum(passing)


def test_when_model_and_handle_are_gone_the_device_is_empty(sim, x, uncollected):
    model = mlp().eval()
    handle = paged(sim, model)
    model(x)
    del model, handle
    assert sim.allocated_bytes == 0


def test_a_parameter_that_will_get_no_gradient_is_warned_of_once_and_refused_in_training_mode(
    sim, model, x
):
    """As of a backbone in evaluation mode, under a head that is trained."""
    head = nn.Linear(WIDTH, 2, device=sim.device)
    told = (
        r"^Sequential is paged for inference and was called with gradients on, and 12 of its "
        r"parameters ask for them, '0\.weight' for one: they get none\. Call it under torch\.no_gr"
    )
    with paged(sim, model), torch.enable_grad():
        with pytest.warns(PagingWarning, match=told) as caught:
            head(model(x)).sum().backward()
        assert [warning.filename for warning in caught] == [__file__]
        assert all(p.grad is None for p in model.parameters())
        head(model(x))  # and warns no more
    with paged(sim, model.requires_grad_(False)), torch.enable_grad():
        model(x)
        model[2].train()
        model[2].weight.requires_grad_()
        with pytest.warns(PagingWarning, match=r"and a parameter asks for them, '2\.weight' for"):
            model(x)
        model.train()
        told = r"^Sequential was called in training mode with.* they would get no gradients"
        with pytest.raises(PagingError, match=told):
            model(x)
        model.requires_grad_(False)
        assert not model(x).requires_grad


def test_a_graph_that_holds_weights_is_an_error_and_never_a_wrong_gradient(sim, model, x):
    with paged(sim, model), torch.enable_grad():
        asking = x.clone().requires_grad_()
        model.requires_grad_(False)
        with pytest.raises(PagingError, match=r"has no room on sim:0: .* A graph of autograd"):
            model(asking)
