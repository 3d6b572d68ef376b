"""Functions that compute each time in the same memory get the gradients of the plain run."""

import numpy
import pytest
import torch
from torch.nn import functional as F

from tenure.adaptive import AdaptiveUsageError, step

from .step_cases import gradients, samples, small_net, worst_error

_EXACT = 1e-10


def in_a_tensor():
    held = torch.zeros((), dtype=torch.float64)
    return lambda number: held.copy_(number)


def in_an_array():
    held = numpy.zeros(1)

    def fill(number):
        held[0] = float(number)
        return held

    return fill


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("in_memory", [in_a_tensor, in_an_array])
def test_weights_in_one_memory_are_those_of_each_micro_batch(in_memory, verify):
    net, fill = small_net(), in_memory()
    batch = {"x": samples(16), "mask": (torch.arange(16) % 5 == 0).double()}
    batch["mask"][:4] = 1

    def fn(b):
        return (net(b["x"]).square().sum(1) * b["mask"]).sum() / b["mask"].sum()

    def weight(b):
        return fill(b["mask"].sum())

    loss = fn(batch)
    loss.backward()
    whole = gradients(net)
    net.zero_grad()
    result = step(fn, batch, weight=weight, maximum=4, verify=verify)
    assert worst_error(gradients(net), whole) < _EXACT
    torch.testing.assert_close(result.loss, loss.detach())


@pytest.mark.parametrize("verify", [True, False])
def test_outputs_in_one_memory_are_those_of_each_micro_batch(verify):
    net, held = small_net(), torch.zeros(16, 3, dtype=torch.float64)

    def fn(b):
        goal = held[: len(b)].copy_(b[:, :3])
        return net(b), goal

    def loss(outputs):
        return F.mse_loss(*outputs).sqrt()

    x = samples(16)
    loss(fn(x)).backward()
    whole = gradients(net)
    net.zero_grad()
    step(fn, x, loss=loss, maximum=4, verify=verify)
    assert worst_error(gradients(net), whole) < _EXACT


@pytest.mark.parametrize("verify", [True, False])
def test_losses_in_one_memory_are_compared_and_returned_as_they_were(verify):
    net, held = small_net(), torch.zeros((), dtype=torch.float64)

    def loss_of(b):
        return net(b).square().mean()

    def fn(b):
        return held.detach_().copy_(loss_of(b))

    batches = [samples(16), 2 * samples(16), samples(4)]
    results = [step(fn, batch, maximum=4, verify=verify).loss for batch in batches]
    split = gradients(net)
    net.zero_grad()
    wanted = [loss_of(batch) for batch in batches]
    sum(wanted).backward()
    assert worst_error(split, gradients(net)) < _EXACT
    torch.testing.assert_close(results, [each.detach() for each in wanted])


def test_a_function_of_the_mean_in_one_memory_is_returned_as_it_was():
    net, held = small_net(), torch.zeros((), dtype=torch.float64)

    def loss_of(b):
        return net(b).square().mean()

    def then(mean):
        return held.detach_().copy_(mean.sqrt())

    batches = [samples(16), 2 * samples(16)]
    results = [step(loss_of, batch, then=then, maximum=4).loss for batch in batches]
    wanted = [loss_of(batch).sqrt().detach() for batch in batches]
    torch.testing.assert_close(results, wanted)


@pytest.mark.parametrize("verify", [True, False])
def test_a_loss_that_writes_the_outputs_in_place_can_be_split(verify):
    net, x = small_net(), samples(16)

    def loss(outputs):
        return outputs.mul_(2).relu_().square().mean().sqrt()

    loss(net(x)).backward()
    whole = gradients(net)
    net.zero_grad()
    step(lambda b: net(b), x, loss=loss, maximum=4, verify=verify)
    assert worst_error(gradients(net), whole) < _EXACT


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("view", [lambda out: out, torch.ravel])
def test_a_loss_that_writes_into_one_of_two_outputs_in_one_memory_is_refused(view, verify):
    net, x = small_net(), samples(16)

    def outputs(b):
        out = net(b)
        return {"out": out, "view": view(out).reshape(len(b), -1)}

    def loss(outputs):
        outputs["out"].add_(1)
        return (outputs["view"].square().mean()).sqrt()

    with pytest.raises(AdaptiveUsageError, match=r"written in place into .*out.*clone\(\)"):
        step(outputs, x, loss=loss, maximum=4, verify=verify)
    assert all(each.grad is None for each in net.parameters())


def test_outputs_that_share_memory_without_a_common_element_may_be_written():
    net, x = small_net(), samples(16)

    def outputs(b):
        out = net(b).T.contiguous()
        return out[0], out[1]

    def loss(outputs):
        return (outputs[0].mul_(2) * outputs[1]).square().mean().sqrt()

    loss(outputs(x)).backward()
    whole = gradients(net)
    net.zero_grad()
    step(outputs, x, loss=loss, maximum=4)
    assert worst_error(gradients(net), whole) < _EXACT


def test_a_cache_that_is_filled_while_a_comparison_fails_can_be_used():
    net, held = small_net(), {}

    def fn(b):
        goal = held.setdefault("goal", torch.zeros(4, 3, dtype=torch.float64))
        return F.mse_loss(net(b), goal.copy_(b[:, :3]))

    with pytest.warns(UserWarning, match="could not verify"):
        step(fn, samples(16), maximum=4)
    assert step(fn, samples(16), maximum=4, verify=False).sizes == (4, 4, 4, 4)


def in_an_output(held, predicted):
    return {"predicted": torch.mul(predicted, 1, out=held[: len(predicted)])}


def in_rows_of_an_array(held, predicted):
    rows = held.numpy()[: len(predicted)]
    rows[:] = predicted.numpy()
    return {"predicted": rows}


def in_a_list(held, predicted, known=[]):  # noqa: B006  # the same in each call
    known[:] = [held[: len(predicted)].copy_(predicted)]
    return known


@pytest.mark.parametrize("fill", [in_an_output, in_rows_of_an_array, in_a_list])
def test_what_is_returned_beside_the_loss_in_one_memory_is_that_of_each_micro_batch(fill):
    net, held, x = small_net(), torch.zeros(16, 3, dtype=torch.float64), samples(16)

    def fn(b):
        out = net(b)
        return out.square().mean(), fill(held, out.detach())

    aux = step(fn, x, maximum=6, has_aux=True).aux
    found = [torch.as_tensor(a[0] if isinstance(a, list) else a["predicted"]) for a in aux]
    torch.testing.assert_close(torch.cat(found), net(x).detach())
