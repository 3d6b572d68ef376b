"""What an error in the function of a step is told: that it ran on a part, or what it gets."""

import pytest
import torch
from torch import nn

from tenure import DisposedTensorError
from tenure.adaptive import AdaptiveUsageError, step

from ..attempt.failures import out_of_memory_above
from .step_cases import samples, small_net

pytestmark = pytest.mark.usefixtures("forgetful")


def test_an_error_in_a_part_names_what_was_not_split():
    net, x = small_net(), samples()
    y = torch.zeros(len(x), dtype=torch.long)
    with pytest.raises(ValueError, match="to match target batch_size") as caught:
        step(lambda b: nn.functional.cross_entropy(net(b), y), x, maximum=4)
    (note,) = caught.value.__notes__
    assert note.startswith(f"step() ran the function on 4 of {len(x)} samples. Tensors that it")
    assert f"were not split: y (int64[{len(x)}] on cpu, " in note
    assert note.endswith("Pass them in the batch, as in step(fn, (x, y)).")


def test_an_error_in_the_whole_batch_is_told_nothing_of_parts():
    def fn(b):
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="of the function") as caught:
        step(fn, samples())
    assert not hasattr(caught.value, "__notes__")


def test_more_than_one_value_beside_the_function_is_refused():
    with pytest.raises(AdaptiveUsageError, match=r"got 2 values .* Pass step\(fn, \(x, y\)\), and"):
        step(lambda x, y: x.mean(), samples(), samples())


@pytest.mark.parametrize("fn", [lambda x, y: x.mean(), nn.Bilinear(1, 1, 1)])
def test_a_function_of_two_arguments_is_told_that_it_gets_one(fn):
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        step(fn, (samples(), samples()))
    assert caught.value.__notes__[0].startswith("The function of step() gets one argument, the")


def test_a_type_error_inside_the_function_is_told_nothing_of_arguments():
    def fn(b):
        raise TypeError("of the function")

    with pytest.raises(TypeError) as caught:
        step(fn, samples())
    assert not hasattr(caught.value, "__notes__")


def test_a_tensor_of_an_attempt_that_was_kept_outside_says_how_to_return_it():
    kept, net, x = [], small_net(), samples()

    def fn(b):
        kept.append(net(b))
        out_of_memory_above(4)(len(b))
        return kept[-1].mean()

    step(fn, x)
    with pytest.raises(DisposedTensorError, match="The attempt that made it was taken") as caught:
        kept[0].sum()
    assert "has_aux=True of step()" in str(caught.value)
    assert "detach_from_scope" not in str(caught.value)


def test_a_failed_attempt_leaves_a_batch_that_requires_no_grad():
    net, x = small_net(), samples(20)

    def fn(b):
        b.requires_grad_()
        if len(b) > 10:
            net(b).sum().backward()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        (slope,) = torch.autograd.grad(net(b).sum(), b, create_graph=True)
        return slope.square().mean()

    assert step(fn, x).sizes == (10, 10)
    assert not x.requires_grad
    assert x.grad is None


def test_a_list_of_more_tensors_than_rows_is_asked_about_before_it_is_split():
    net, rows = small_net(), [torch.randn(4, dtype=torch.float64) for _ in range(12)]

    def fn(b):
        return net(torch.stack(list(b))).square().mean()

    with pytest.raises(AdaptiveUsageError, match="is a list of 12 tensors, and each has 4 rows"):
        step(fn, rows, maximum=3)
    assert step(fn, rows).sizes == (4,)
    assert step(fn, rows, in_dims="items", maximum=5).sizes == (5, 5, 2)
    columns = [torch.randn(4, 4, dtype=torch.float64) for _ in range(12)]
    result = step(lambda b: sum(net(x).mean() for x in b), columns, in_dims=[0] * 12, maximum=3)
    assert result.sizes == (2, 2)
    pair = [torch.randn(2, 4, dtype=torch.float64) for _ in range(3)]
    assert step(lambda b: sum(net(x).mean() for x in b), pair, maximum=1).sizes == (1, 1)


def test_a_list_of_tensors_of_other_lengths_is_told_of_items():
    batch = {"x": samples(5), "boxes": [torch.ones(n, 4) for n in range(1, 6)]}
    with pytest.raises(AdaptiveUsageError) as caught:
        step(lambda b: b["x"].mean(), batch)
    assert str(caught.value).endswith(
        "If batch['boxes'] has one item a sample, give \"items\" at its place."
    )
