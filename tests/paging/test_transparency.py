"""While it is paged a model is what it was: who reads, writes, saves, copies or hooks it."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

from tenure import NewDisposeScope
from tenure.paging import PagingError, PagingWarning, page, plan_paging
from tenure.testing import for_each_allocation

from .models import Recurrent, TiedLanguageModel, build, mlp

pytestmark = pytest.mark.usefixtures("without_gradients")

WIDTH = 32


def paged(sim, model, percent=40, **options):
    budget_bytes = plan_paging(model, sim.device).weight_bytes * percent // 100
    return page(model, sim.device, budget=budget_bytes, **options)


def on_device_whole(sim, model, *args):
    return copy.deepcopy(model).to(sim.device)(*(arg.to(sim.device) for arg in args)).cpu()


def whole_on(sim, model):
    return copy.deepcopy(model).to(sim.device)


def test_the_model_its_modules_and_its_parameters_stay_the_same_objects(sim, model, x):
    before = [model, *model.modules(), *model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    with paged(sim, model) as handle:
        assert handle.model is model
        model(x)
        while_paged = [model, *model.modules(), *model.parameters()]
        assert all(a is b for a, b in zip(before, while_paged, strict=True))
        assert [name for name, _ in model.named_parameters()] == names
        assert type(model[0]) is nn.Linear
    after = [model, *model.modules(), *model.parameters()]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_unpaging_gives_back_the_very_dictionaries_and_no_hook_stays(sim, model, x):
    dictionaries = [vars(layer)["_parameters"] for layer in model]
    handle = paged(sim, model)
    model(x)
    handle.unpage()
    handle.unpage()
    assert all(
        vars(layer)["_parameters"] is each for layer, each in zip(model, dictionaries, strict=True)
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert sim.allocated_bytes == 0
    assert repr(handle) == "<PagedModel Sequential on sim:0, unpaged>"


def test_inside_the_forward_weights_are_on_the_device_and_outside_on_the_host(sim, model, x):
    seen = []
    model[2].register_forward_hook(
        lambda module, args, output: seen.append(
            (module.weight.device, next(module.parameters()).device, type(module.weight))
        )
    )
    with paged(sim, model):
        model(x)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert model[2].weight.device.type == "cpu"
    assert seen == [(sim.device, sim.device, nn.Parameter)]


def test_dtypes_strides_and_attributes_are_those_of_the_host(sim, x):
    model, args, _ = build("strided")
    model[0].weight.quantizer = "none"
    strides = [p.stride() for p in model.parameters()]
    seen = []
    model[0].register_forward_hook(
        lambda module, *_: seen.append((module.weight.stride(), module.weight.quantizer))
    )
    with paged(sim, model):
        model(*args)
        assert [p.stride() for p in model.parameters()] == strides
    assert seen == [((1, WIDTH), "none")]
    assert [p.stride() for p in model.parameters()] == strides


def test_ties_stay_tied_and_are_on_the_device_once(sim):
    torch.manual_seed(0)
    model, tokens = TiedLanguageModel().eval(), torch.randint(50, (2, 9))
    expected = on_device_whole(sim, model, tokens)
    plan = plan_paging(model, sim.device)
    assert plan.weight_bytes < sum(p.nbytes for p in model.parameters()) + 512 * len(plan.units)
    with paged(sim, model, percent=60):
        assert torch.equal(model(tokens).cpu(), expected)
        assert model.head.weight is model.embed.weight
        model.embed.weight.data.zero_()
        assert model(tokens).eq(0).all()
    assert model.head.weight is model.embed.weight


def test_hooks_run_in_their_order_and_see_what_they_saw_before(sim, model, x):
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    removable = model[0].register_forward_hook(lambda *_: calls.append("inner"))
    model.register_forward_hook(lambda module, args, output: output * 0)
    with paged(sim, model):
        assert model(x).eq(0).all()
        assert calls == ["pre", "inner"]
        removable.remove()
        model(x)
        assert calls == ["pre", "inner", "pre"]


def test_a_state_dict_has_the_values_and_saves_each_tensor_alone(sim, model, x):
    expected = copy.deepcopy(model.state_dict())
    with paged(sim, model):
        model(x)
        state = model.state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        file = io.BytesIO()
        torch.save(model[0].bias, file)
        assert len(file.getvalue()) < 3000


class Saving(nn.Module):
    """Takes a state dict in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.rest = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.states = []

    def forward(self, x):
        self.seen += 1
        x = self.first(x)
        copied = copy.deepcopy(self)
        self.states = [self.state_dict(), self.state_dict(keep_vars=True), copied]
        self.seen += 1
        return self.rest(x)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_state_dict_in_the_middle_of_a_forward_is_the_hosts(sim, x, is_training):
    torch.manual_seed(0)
    model = Saving().train(is_training)
    plain = whole_on(sim, model)
    with paged(sim, model, 60):
        outside = dict(model.state_dict(keep_vars=True))
        for _ in range(2):
            expected = plain(x.to(sim.device))
            in_time = plain.states[2].state_dict()
            assert torch.equal(model(x), expected)
            state, kept, copied = model.states
            assert all(kept[name] is each for name, each in outside.items())
            assert all(each.data_ptr() == outside[name].data_ptr() for name, each in state.items())
            for name, each in copied.state_dict().items():
                torch.testing.assert_close(each, in_time[name].cpu(), rtol=0, atol=0)
            assert model.seen.eq(plain.seen.cpu()).all()


def test_a_state_dict_whose_tensors_are_to_be_assigned_is_refused(sim, model, x):
    expected, other = on_device_whole(sim, model, x), mlp().state_dict()
    before = [*model.parameters()]
    with paged(sim, model):
        with pytest.raises(PagingError, match=r"^load_state_dict\(assign=True\) was called of a"):
            model.load_state_dict(other, assign=True)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert model(x).cpu().equal(expected)
        model.load_state_dict(other)
        assert model(x).cpu().equal(on_device_whole(sim, model, x))
    model.load_state_dict(other, assign=True)


def test_a_state_dict_is_assigned_to_what_is_not_paged(sim, model, x):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(2, 2), model

    whole, head = Pair(), nn.Linear(2, 2)
    other = mlp().state_dict()
    with paged(sim, model):
        given = {f"head.{name}": value for name, value in head.state_dict().items()}
        whole.load_state_dict(given, strict=False, assign=True)
        assert whole.head.weight.equal(head.weight)
        # torch keeps in a state dict that it was assigned once
        mlp().load_state_dict(other, assign=True)
        model.load_state_dict(other)
        assert model(x).cpu().equal(on_device_whole(sim, model, x))


@pytest.mark.parametrize("percent", [40, 100])
def test_a_write_through_a_reference_from_before_is_seen_by_its_version(sim, model, x, percent):
    weight = model[4].weight
    with paged(sim, model, percent):
        model(x)
        sim.module.synchronize()  # as for any pinned memory that the device may be reading
        weight.mul_(2)
        expected = on_device_whole(sim, model, x)
        torch.testing.assert_close(model(x).cpu(), expected)


@pytest.mark.parametrize("percent", [40, 100])
@pytest.mark.parametrize("write", ["by its version", "by other data"])
def test_a_write_in_the_middle_of_a_pass_is_seen_by_the_layers_to_come(sim, x, percent, write):
    # all layers share a unit, whose tensors are looked at together where the pass first uses it
    model = nn.Sequential(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])).eval()
    weight = model[0][2].weight

    def change(*_):
        sim.module.synchronize()
        if write == "by its version":
            weight.mul_(2)
        else:
            weight.data = weight.detach() * 2

    with paged(sim, model, percent):
        model(x)
        handle = model[0][0].register_forward_hook(change)
        found = model(x).cpu()
        handle.remove()
        expected = on_device_whole(sim, model, x)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("percent", [40, 100])
def test_data_that_is_replaced_is_what_the_next_pass_uses(sim, model, x, percent):
    held = model[0].weight
    with paged(sim, model, percent):
        model(x)
        model[2].weight.data = model[2].weight.data.t() + 1
        held.data = held.data * 2
        expected = on_device_whole(sim, model, x)
        assert torch.equal(model(x).cpu(), expected)
        assert model[2].weight.is_pinned()
    assert torch.equal(on_device_whole(sim, model, x), expected)


def test_a_model_that_changed_its_type_is_refused_until_it_is_unpaged(sim, model, x):
    handle = paged(sim, model)
    model(x)
    model.half()
    with pytest.raises(PagingError, match=r"^'0.weight' was given other memory while it is paged"):
        model(x)
    handle.unpage()
    assert model(x.half()).dtype is torch.float16


def test_inference_mode_works_with_buffers_that_change(sim):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.BatchNorm1d(WIDTH) for _ in range(5)], nn.Linear(WIDTH, WIDTH))
    plain, batch = copy.deepcopy(model), torch.randn(16, WIDTH)
    expected = plain(batch)
    with paged(sim, model, 60), torch.inference_mode():
        torch.testing.assert_close(model(batch).cpu(), expected)
    with paged(sim, model, 60):
        model(batch)
    plain(batch)
    torch.testing.assert_close(model[0].running_mean, plain[0].running_mean)


def test_autocast_keeps_no_copies_of_weights(sim, model, x):
    there = x.to(sim.device)
    with torch.autocast("sim", dtype=torch.bfloat16):
        expected = copy.deepcopy(model).to(sim.device)(there).cpu()
    with paged(sim, model), torch.autocast("sim", dtype=torch.bfloat16):
        resting_bytes = sim.allocated_bytes
        for _ in range(2):
            assert torch.equal(model(there).cpu(), expected)
        assert sim.allocated_bytes == resting_bytes


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(0))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        self.calls = self.calls + 1
        self.seen = torch.cat([self.seen, x[:, 0]])
        for layer in self.layers:
            x = layer(x)
        return x


def test_buffers_that_the_forward_assigns_are_kept(sim, x):
    model = Counting().eval()
    with paged(sim, model, 60):
        model(x)
        model(x)
        assert model.calls.tolist() == [2, 2, 2]
        assert model.calls.device.type == "cpu"
    assert model.seen.tolist() == [*x[:, 0].tolist(), *x[:, 0].tolist()]
    assert model.seen.device.type == "cpu"


def test_recurrent_layers_keep_their_lists_of_weights(sim):
    torch.manual_seed(0)
    model, x = Recurrent(nn.LSTM).eval(), torch.randn(2, 3, WIDTH)
    expected = on_device_whole(sim, model, x)
    weights = list(model.rnn._flat_weights)
    with paged(sim, model, 100):
        assert torch.equal(model(x).cpu(), expected)
        assert all(a is b for a, b in zip(model.rnn._flat_weights, weights, strict=True))
        assert all(w.device.type == "cpu" for w in model.rnn._flat_weights)


def test_a_deep_copy_is_a_plain_model_of_its_own(sim, model, x):
    expected = model(x)
    with paged(sim, model):
        model(x)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), expected)
        assert type(vars(twin[0])["_parameters"]) is dict
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
        twin[0].weight.zero_()
        assert not model[0].weight.eq(0).any()


def test_a_pickle_is_a_plain_model(sim, model, x):
    expected = model(x)
    with paged(sim, model):
        model(x)
        twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(x), expected)
    assert type(vars(twin[0])["_parameters"]) is dict


def test_functional_call_uses_what_it_is_given(sim, model, x):
    zeros = {name: torch.zeros_like(p, device=sim.device) for name, p in model.named_parameters()}
    expected = on_device_whole(sim, model, x)
    with paged(sim, model):
        assert torch.func.functional_call(model, zeros, (x,)).eq(0).all()
        assert torch.equal(model(x).cpu(), expected)


def test_a_submodule_can_be_called_alone(sim, model, x):
    expected = on_device_whole(sim, model[2], x)
    with paged(sim, model):
        assert torch.equal(model[2](x).cpu(), expected)
        assert model[2].weight.device.type == "cpu"


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_after_an_exception_the_model_is_on_the_host_and_works_again(sim, model, x, error):
    expected = on_device_whole(sim, model, x)
    model.insert(5, Failing(None))
    with paged(sim, model):
        model(x)
        model[5].error = error
        with pytest.raises(type(error)):
            model(x)
        model[5].error = None
        assert torch.equal(model(x).cpu(), expected)
        assert model[0].weight.device.type == "cpu"
        model[5].error = error
        with pytest.raises(type(error)):
            model(x)
    assert model[0].weight.device.type == "cpu"
    error.__traceback__ = None  # its frames hold activations
    assert sim.allocated_bytes == 0


def test_leaving_the_block_by_an_exception_unpages_and_masks_nothing(sim, model):
    with pytest.raises(ValueError, match=r"^mine$"), paged(sim, model) as handle:
        raise ValueError("mine")
    assert handle.closed
    assert sim.allocated_bytes == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_failing_allocation_at_every_index_leaves_the_model_usable(sim, model, x):
    expected = on_device_whole(sim, model, x)
    weights = list(model.parameters())

    def run():
        with paged(sim, model):
            return [model(x).cpu() for _ in range(2)]

    def check(failure):
        del failure
        gc.collect()
        assert sim.allocated_bytes == 0
        assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
        assert not any(m._forward_hooks for m in model.modules())

    assert for_each_allocation(run, check) > 10
    assert all(torch.equal(output, expected) for output in run())


def test_a_failing_allocation_in_a_pass_leaves_the_paging_usable(sim, model, x):
    expected = on_device_whole(sim, model, x)
    with paged(sim, model):
        assert for_each_allocation(lambda: model(x).cpu()) > 5
        assert torch.equal(model(x).cpu(), expected)


def test_the_scopes_of_the_user_never_dispose_a_page(sim, model, x):
    expected = on_device_whole(sim, model, x)
    with NewDisposeScope():
        handle = paged(sim, model)
    for _ in range(3):
        with NewDisposeScope():
            found = model(x).cpu()
            assert torch.equal(found, expected)
            del found
    handle.unpage()


def test_in_the_steady_state_nothing_is_fetched_late_nor_allocated_and_the_host_never_waits(sim):
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).eval()
    x = torch.randn(1, 1024, device=sim.device)
    with paged(sim, model) as handle:
        model(x)
        model(x)
        resting_bytes, waits, allocations = (
            sim.allocated_bytes,
            sim.host_waits,
            sim.n_allocations,
        )
        model(x)
        assert sim.host_waits == waits
        assert sim.allocated_bytes == resting_bytes
        assert sim.n_allocations - allocations == len(model)  # the activations
        report = handle.report()
    assert report.faults == 0
    passing = [unit.n_bytes for unit in handle.plan.units if not unit.resident]
    assert report.bytes_per_pass == sum(passing)


def test_when_model_and_handle_are_gone_the_device_is_empty(sim, x):
    model = mlp().eval()
    handle = paged(sim, model)
    model(x)
    gc.disable()  # nothing waits for a collection
    try:
        del model, handle
        assert sim.allocated_bytes == 0
    finally:
        gc.enable()


def test_training_mode_with_gradients_is_refused_before_anything_runs(sim, model, x):
    model.train()
    with paged(sim, model), torch.enable_grad():
        with pytest.raises(PagingError, match=r"^Sequential was called in training mode with"):
            model(x)
        model.eval().requires_grad_(False)
        assert not model(x).requires_grad


def test_a_parameter_that_will_get_no_gradient_is_warned_of_once(sim, model, x):
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


def test_whether_parameters_ask_for_gradients_is_looked_at_when_the_model_is_called(sim, model, x):
    model.train().requires_grad_(False)
    with paged(sim, model), torch.enable_grad():
        assert not model(x).requires_grad
        model[2].weight.requires_grad_()
        with pytest.raises(PagingError, match=r"they would get no gradients"):
            model(x)
        model.requires_grad_(False)
        assert not model(x).requires_grad


def test_a_graph_that_holds_weights_is_an_error_and_never_a_wrong_gradient(sim, model, x):
    with paged(sim, model), torch.enable_grad():
        asking = x.clone().requires_grad_()
        model.requires_grad_(False)
        with pytest.raises(PagingError, match=r"has no room on sim:0: .* A graph of autograd"):
            model(asking)


def test_gradients_of_inputs_are_right_where_all_weights_stay(sim, model, x):
    asking = x.clone().requires_grad_()
    with torch.enable_grad():
        model(asking).sum().backward()
        expected, asking.grad = asking.grad, None
        model.requires_grad_(False)
        with paged(sim, model, 100):
            model(asking).sum().backward()
    torch.testing.assert_close(asking.grad, expected)
