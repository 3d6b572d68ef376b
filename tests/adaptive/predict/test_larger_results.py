"""Results of kernels without data are laid out as real ones are: what differs is copied on."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tenure.adaptive import predict_peak
from tests.true_peak import step_of, true_peak_bytes

from .scratch_truth import without_data

aten = torch.ops.aten
LAYOUTS = {
    "contiguous": lambda: torch.ones(8, 16, 4),
    "transposed": lambda: torch.ones(8, 4, 16).transpose(1, 2),
    "a slice": lambda: torch.ones(8, 16, 6)[..., :4],
    "expanded": lambda: torch.ones(1, 16, 4).expand(8, 16, 4),
    "two dimensions, transposed": lambda: torch.ones(16, 8).t(),
    "features last": lambda: torch.ones(2, 8, 5, 6).to(memory_format=torch.channels_last),
    "features last, a slice": lambda: torch.ones(2, 5, 6, 9).permute(0, 3, 1, 2)[:, :8],
    "batch last": lambda: torch.ones(5, 4, 8, 6).permute(1, 2, 0, 3),
    "features last, 3d": lambda: torch.ones(2, 8, 3, 5, 6).to(memory_format=torch.channels_last_3d),
}
GRADIENTS = {
    "alike": lambda make: make(),
    "contiguous": lambda make: make().contiguous(),
    "of a sum": lambda make: torch.ones(()).expand(make().shape),
}


def norm(call, x, grad, training):
    weight = torch.ones(x.shape[1])
    forward, backward = aten.native_batch_norm.default, aten.native_batch_norm_backward.default
    out, mean, rstd = call(forward, x, weight, weight, weight + 0, weight + 0, training, 0.1, 1e-5)
    running = (weight + 0, weight + 0)
    made = call(backward, grad, x, weight, *running, mean, rstd, training, 1e-5, [True, True, True])
    return out, made[0]


def layer_norm(call, x, grad):
    shape = [x.shape[-1]]
    weight = torch.ones(shape)
    _, mean, rstd = aten.native_layer_norm(x, shape, weight, weight, 1e-5)
    backward = aten.native_layer_norm_backward.default
    return call(backward, grad, x, shape, mean, rstd, weight, weight, [True, True, True])[:1]


WORK = {
    "batch norm": lambda call, x, grad: norm(call, x, grad, True),
    "batch norm, evaluated": lambda call, x, grad: norm(call, x, grad, False),
    "layer norm": layer_norm,
    "squared error": lambda call, x, grad: (call(aten.mse_loss_backward.default, grad, x, x, 1),),
    "smooth error": lambda call, x, grad: (
        call(aten.smooth_l1_loss_backward.default, grad, x, x, 1, 1.0),
    ),
    "huber": lambda call, x, grad: (call(aten.huber_loss_backward.default, grad, x, x, 1, 1.0),),
    "log of sigmoid": lambda call, x, grad: call(aten.log_sigmoid_forward.default, x)[:1],
    "log of softmax": lambda call, x, grad: (
        call(aten._log_softmax_backward_data.default, grad, x, 1, x.dtype),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("work", WORK)
def test_results_are_laid_out_as_real_kernels_do(work, layout):
    make = LAYOUTS[layout]
    for gradient in GRADIENTS.values():
        real = WORK[work](lambda func, *args: func(*args), make(), gradient(make))
        with FakeTensorMode():
            fake = WORK[work](without_data, make(), gradient(make))
        assert [one.stride() for one in fake] == [one.stride() for one in real]


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(64), nn.BatchNorm1d(64).eval(), nn.LayerNorm(128)],
    ids=["batch norm", "batch norm, evaluated", "layer norm"],
)
def test_a_norm_of_what_is_transposed_takes_what_was_predicted(module):
    x = torch.randn(8, 128, 64, requires_grad=True)

    def fn(x):
        return module(x.transpose(1, 2)).transpose(1, 2).sum()

    predicted = predict_peak(fn, x)
    assert not predicted.approximate
    true_bytes = predicted.baseline_bytes + true_peak_bytes(step_of(fn, x, None))
    assert 0 <= predicted.peak_bytes - true_bytes <= 256
