"""Functions that compute each time in the same memory get the gradients of the plain run."""

import numpy
import pytest
import torch
from torch.nn import functional as F

from tenure.adaptive import AdaptiveUsageError, step

from .step_cases import gradients, samples, small_net, worst_error

pytestmark = pytest.mark.parametrize("verify", [True, False])
_EXACT = 1e-10


def compare(net, fn, x, verify, loss=None, **options):
    """Run a step whole and in micro-batches; the result of the latter."""
    whole = loss(fn(x)) if loss else fn(x)
    whole.backward()
    wanted, value = gradients(net), whole.detach().clone()
    net.zero_grad()
    if loss:
        options["loss"] = loss
    result = step(fn, x, maximum=4, verify=verify, **options)
    assert worst_error(gradients(net), wanted) < _EXACT
    torch.testing.assert_close(result.loss, value)


def in_a_tensor():
    held = torch.zeros((), dtype=torch.float64)
    return lambda number: held.copy_(number)


def in_an_array():
    held = numpy.zeros(1)

    def fill(number):
        held[0] = float(number)
        return held

    return fill


@pytest.mark.parametrize("in_memory", [in_a_tensor, in_an_array])
def test_weights_in_one_memory_are_those_of_each_micro_batch(in_memory, verify):
    net, fill = small_net(), in_memory()
    batch = {"x": samples(16), "mask": (torch.arange(16) % 5 == 0).double()}
    batch["mask"][:4] = 1

    def fn(b):
        return (net(b["x"]).square().sum(1) * b["mask"]).sum() / b["mask"].sum()

    compare(net, fn, batch, verify, weight=lambda b: fill(b["mask"].sum()))


def test_counts_in_one_memory_are_those_of_each_micro_batch(verify):
    net, x, count = small_net(), samples(9), torch.zeros(())

    def fn(b):
        out = net(b)
        return {
            "a": (out.square().sum(), count.fill_(out.numel())),
            "b": (out.exp().sum(), len(out)),
        }

    loss = net(x).square().mean() + net(x).exp().sum() / 9
    loss.backward()
    wanted = gradients(net)
    net.zero_grad()
    torch.testing.assert_close(step(fn, x, maximum=5, verify=verify).loss, loss.detach())
    assert worst_error(gradients(net), wanted) <= _EXACT


def test_outputs_in_one_memory_are_those_of_each_micro_batch(verify):
    net, held = small_net(), torch.zeros(16, 3, dtype=torch.float64)

    def fn(b):
        return net(b), held[: len(b)].copy_(b[:, :3])

    compare(net, fn, samples(16), verify, lambda outputs: F.mse_loss(*outputs).sqrt())


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

    def then(mean):
        return held.detach_().copy_(mean.sqrt())

    results = [step(loss_of, batch, then=then, maximum=4).loss for batch in batches]
    torch.testing.assert_close(results, [each.detach().sqrt() for each in wanted])


def test_a_loss_that_writes_the_outputs_in_place_can_be_split(verify):
    net, x = small_net(), samples(16)
    compare(net, net, x, verify, lambda o: o.mul_(2).relu_().square().mean().sqrt())

    def outputs(b):
        # of one memory, without a common element
        out = net(b).T.contiguous()
        return out[0], out[1]

    net.zero_grad()
    compare(net, outputs, x, verify, lambda o: (o[0].mul_(2) * o[1]).square().mean().sqrt())


@pytest.mark.parametrize("view", [lambda out: out, torch.ravel])
def test_a_loss_that_writes_into_one_of_two_outputs_in_one_memory_is_refused(view, verify):
    net = small_net()

    def outputs(b):
        out = net(b)
        return {"out": out, "view": view(out).reshape(len(b), -1)}

    def loss(outputs):
        outputs["out"].add_(1)
        return (outputs["view"].square().mean()).sqrt()

    with pytest.raises(AdaptiveUsageError, match=r"written in place into .*out.*clone\(\)"):
        step(outputs, samples(16), loss=loss, maximum=4, verify=verify)
    assert all(each.grad is None for each in net.parameters())


def in_an_output(held, predicted):
    return {"predicted": torch.mul(predicted, 1, out=held[: len(predicted)])}


def in_rows_of_an_array(held, predicted):
    rows = held.numpy()[: len(predicted)]
    rows[:] = predicted.numpy()
    return {"predicted": rows}


@pytest.mark.parametrize("fill", [in_an_output, in_rows_of_an_array])
def test_what_is_returned_beside_the_loss_in_one_memory_is_that_of_each_micro_batch(fill, verify):
    net, held, x = small_net(), torch.zeros(16, 3, dtype=torch.float64), samples(16)

    def fn(b):
        out = net(b)
        return out.square().mean(), fill(held, out.detach())

    aux = step(fn, x, maximum=6, has_aux=True, verify=verify).aux
    found = torch.cat([torch.as_tensor(each["predicted"]) for each in aux])
    torch.testing.assert_close(found, net(x).detach())
