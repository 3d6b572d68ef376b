"""Arguments on the CPU that share memory, or become others than they were."""

import pytest
import torch

from tenure.adaptive import AdaptiveUsageError
from tenure.adaptive._attempt._cpu_fallback import on_cpu


@pytest.fixture
def x(sim):
    return torch.ones(4).to(sim.device)


def values(tensor):
    return tensor.cpu().tolist()


# --- shared memory


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("written", [0, 1])
def test_a_write_into_arguments_that_share_memory_is_refused(sim, x, is_inference, written):
    made = []

    def f(*tensors):
        tensors[written].fill_(1)
        tensors[2].append(tensors[0] + 1)

    with torch.inference_mode(is_inference):
        x = x * torch.nan
        match = r"writes into .*, float32\[\d\] on sim:0, \d+ B, whose memory another argument"
        with pytest.raises(AdaptiveUsageError, match=match):
            on_cpu(f, x, x[:2], made)
    assert x.isnan().all()
    assert not is_inference or x.is_inference()


@pytest.mark.parametrize("is_inference", [False, True])
def test_arguments_at_other_places_of_one_memory_are_written_and_those_that_share_read(
    sim, is_inference
):
    with torch.inference_mode(is_inference):
        base = torch.tensor([0, 1, 2, 3, 4, torch.nan, 6, 7]).to(sim.device)

        def f(first, second, inputs, targets):
            first.add_(1)
            second.mul_(2)
            return inputs + targets

        made = on_cpu(f, base[:2], base[2:4], base[4:7], base[5:8])
    assert values(made.isnan()) == [True, True, False]
    assert values(base)[:5] == [1.0, 2.0, 4.0, 6.0, 4.0]
    assert values(base)[6:] == [6.0, 7.0]


def test_what_shares_memory_and_is_only_read_is_not_written(x):
    version = x._version
    on_cpu(lambda a, b: a.sum() + b.sum(), x, x[:2])
    assert x._version == version


def test_gradients_flow_to_arguments_that_share_memory(sim, x):
    weight = x.clone().requires_grad_()
    on_cpu(lambda a, b: a.sum() + 2 * b.sum(), weight, weight[:2]).backward()
    assert values(weight.grad) == [3.0, 3.0, 1.0, 1.0]


def test_arguments_under_functions_of_torch_func_are_moved_as_they_are(x):
    def f(a, b):
        return (a * a).sum() + b.sum()

    grad = torch.func.grad(lambda a: on_cpu(f, a, a[:2]))(x)
    assert values(grad) == [3.0, 3.0, 2.0, 2.0]
    rows = torch.vmap(lambda a: on_cpu(f, a.mul_(2), a[:1]))(x.view(2, 2))
    assert values(rows) == [10.0, 10.0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_arguments_in_other_layouts_and_with_pending_conjugation_are_moved(sim, mode):
    turned = torch.tensor([1j, 2j]).to(sim.device).conj()

    def f(a, b, none):
        a.add_(1)
        return b + 1

    with mode():
        result = on_cpu(f, turned, turned[:1].clone(), turned[:0])
    assert values(turned) == [1 - 1j, 1 - 2j]
    assert result.device == sim.device


# --- arguments that become others


def resized(a):
    a.add_(1)
    a.resize_(6)
    a[4:] = 5


def smaller(a):
    a.add_(1)
    a.resize_(2)


def with_other_data(a):
    a.add_(1)
    a.data = a.data[1:3].double()


def transposed(a):
    a.add_(torch.arange(4.0))
    a.unsqueeze_(0)
    a.t_()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("change", [resized, smaller, with_other_data, transposed])
def test_an_argument_that_became_another_inside_is_that_on_the_device(sim, x, mode, change):
    with mode():
        x = x.clone()
        view, expected = x[:], torch.ones(4)
        expected_view = expected[:]
        change(expected)
        on_cpu(change, x)
    assert x.device == view.device == sim.device
    assert (x.dtype, x.shape, values(x)) == (expected.dtype, expected.shape, expected.tolist())
    assert values(view) == expected_view.tolist()


def test_an_output_argument_without_elements_is_filled(sim, x):
    out = torch.empty(0).to(sim.device)
    on_cpu(lambda a, out: torch.add(a, 1, out=out), x, out)
    assert values(out) == [2.0] * 4
