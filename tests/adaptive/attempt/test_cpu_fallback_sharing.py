"""Arguments on the CPU that share memory, or become others than they were."""

import pytest
import torch

from tenure.adaptive._attempt._cpu_fallback import on_cpu


@pytest.fixture
def x(sim):
    return torch.ones(4).to(sim.device)


def values(tensor):
    return tensor.cpu().tolist()


# --- shared memory


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("flipped", [False, True])
def test_arguments_that_share_memory_share_it_on_the_cpu(sim, x, is_inference, flipped):
    def f(a, b):
        assert (a.device.type, b.device.type) == ("cpu", "cpu")
        b.add_(1)
        a.add_(10)

    with torch.inference_mode(is_inference):
        x = x * 0
        a, b = (x[:2], x) if flipped else (x, x[:2])
        on_cpu(f, a, b)
    assert values(x) == ([11.0, 11.0, 1.0, 1.0] if flipped else [11.0, 11.0, 10.0, 10.0])


def test_views_of_other_kinds_at_other_places_share_memory_too(sim):
    base = torch.arange(24, dtype=torch.int32).to(sim.device)
    expected = base.cpu()

    def f(columns, last, floats, apart):
        columns[:, 1] += 100
        last.mul_(2)
        assert floats.view(torch.int32).tolist() == columns[1:3, 0].tolist()
        floats.zero_()
        apart.sub_(1)

    def views(base):
        rows = base[7:19].view(3, 4)
        return rows[:, :2], base[15:18], base[11:16:4].view(3 - 1, 1).squeeze(1), base[:3]

    def split(base):
        columns, last, picked, apart = views(base)
        return columns, last, picked.view(torch.float32), apart

    on_cpu(f, *split(base))
    f(*split(expected))
    assert values(base) == expected.tolist()


def test_what_shares_memory_and_is_only_read_is_not_written(x):
    version = x._version
    on_cpu(lambda a, b: a.sum() + b.sum(), x, x[:2])
    assert x._version == version


def test_only_the_memory_between_the_arguments_is_copied(sim):
    base = torch.zeros(10_000).to(sim.device)
    seen = []

    def f(*tensors):
        seen.extend(each.untyped_storage().nbytes() for each in tensors)
        return tensors[0] + 1

    on_cpu(f, base[:4], base[5_000:5_004], base[5_002:5_008])
    assert seen == [16, 32, 32]


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
        result = on_cpu(f, turned, turned[:1], turned[:0])
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
