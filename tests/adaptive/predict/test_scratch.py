"""What kernels take for themselves, said without running them at size, against the allocator.

By private names, because a prediction tells its peak, and not what each call was said to take.
"""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tenure.adaptive import predict_peak
from tenure.adaptive._predict import _scratch
from tenure.adaptive._predict._device import taken_inside
from tenure.adaptive._predict._scratch import inside
from tenure.adaptive._predict._values import STAND_INS
from tests.true_peak import true_peak_bytes

from .scratch_cases import layers, listen, optimizers, sequences

CASES = {**layers(), **sequences(), **optimizers()}
GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_measured_before(monkeypatch):
    monkeypatch.setattr(_scratch, "_known", {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_never_too_low_and_hardly_too_high(name):
    calls = listen(CASES[name])
    assert [call for call in calls if call.said.n_bytes] or calls
    assert [call for call in calls if call.keeps_more] == []
    assert [call for call in calls if call.is_low] == []
    assert [call for call in calls if call.is_loose] == []
    assert [call for call in calls if call.said.reason] == []


def test_a_convolution_of_a_batch_far_larger_than_memory_is_measured_in_a_few_mib():
    conv, batch = nn.Conv2d(64, 64, 3, 1, 1), torch.empty(1_000_000, 64, 224, 224, device="meta")
    reports = []
    measured_bytes = true_peak_bytes(lambda: reports.append(predict_peak(conv, batch)))
    (report,) = reports
    assert report.reasons == ()
    # beside the batch, its result and a gradient of that a copy in oneDNN's layout, at the least
    assert report.peak_bytes >= 4 * batch.nbytes > 40_000 * GIB
    assert 0 < measured_bytes < 8 << 20


def test_measuring_draws_no_random_number_and_is_seen_by_no_mode():
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        x = torch.empty(300, 400)
        result = torch.multinomial(x, 3)
    state = torch.get_rng_state()
    with Functions(), Operations(), torch.autocast("cpu", dtype=torch.bfloat16):
        said = inside(torch.ops.aten.multinomial.default, (x, 3), {}, result)
    assert said.reason is None
    assert said.n_bytes > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert not [func for func in seen if func is torch.ops.aten.multinomial.default]


def test_an_operation_of_somebody_else_is_not_run_but_named():
    @torch.library.custom_op("tenure_tests::taking", mutates_args=())
    def taking(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it was run")

    @taking.register_fake
    def _(x):
        return torch.empty_like(x)

    report = predict_peak(taking, torch.ones(3, 4))
    assert report.peak_bytes == 2 * 48
    said = "nobody has measured what tenure_tests.taking.default takes for itself"
    assert report.reasons == (said,)


def test_a_part_of_a_batch_takes_the_same_when_it_is_predicted_first():
    # its backward pass is measured on smaller sizes, some of which do not go together
    x = torch.ones(8, 256, 512, requires_grad=True)

    def fn(x):
        return (x * 2)[:, 128:].square().sum()

    gc.collect()
    gc.disable()
    try:
        first, second = (predict_peak(fn, x).peak_bytes for _ in range(2))
    finally:
        gc.enable()
    assert first == second


def test_a_product_of_16_bits_takes_no_more_than_a_copy_in_32():
    n = 65536
    with torch.device("meta"):
        layer, x = nn.Linear(16384, 4096), torch.zeros(n, 16384)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).square().mean()

    report = predict_peak(fn, x, device="cpu")
    tensors_bytes = x.nbytes + layer.weight.nbytes + 4 * n * 4096
    assert report.peak_bytes < 6 * tensors_bytes
    assert "grows in steps for 16 bits" in report.reasons[0]


# kind, times, samples, features, hidden, layers, directions, projected, reserve on an H100
_RESERVES = [
    ("LSTM", 64, 32, 128, 256, 2, 2, 0, 22 * 2**21 + 512),
    ("LSTM", 256, 256, 512, 1024, 2, 1, 0, 11 * 2**28 + 512),
    ("LSTM", 64, 32, 128, 256, 2, 1, 64, 14 * 2**21 + 512),
    ("GRU", 64, 32, 128, 256, 2, 2, 0, 26 * 2**21 + 512),
    ("RNN", 64, 32, 128, 256, 2, 1, 0, 3 * 2**21 + 512),
]


@pytest.mark.parametrize(
    ("kind", "n_times", "n_samples", "n_in", "n_hidden", "n_layers", "n_ways", "n_out", "reserve"),
    _RESERVES,
)
def test_what_recurrent_layers_keep_on_cuda(
    kind, n_times, n_samples, n_in, n_hidden, n_layers, n_ways, n_out, reserve
):
    options = {"proj_size": n_out} if n_out else {}
    with torch.device("meta"):
        module = getattr(nn, kind)(n_in, n_hidden, n_layers, bidirectional=n_ways == 2, **options)
        x = torch.empty(n_times, n_samples, n_in)
        state = torch.empty(n_layers * n_ways, n_samples, n_out or n_hidden)
        cell = torch.empty(n_layers * n_ways, n_samples, n_hidden) if kind == "LSTM" else None
    weights = list(module.parameters())
    mode = {"RNN": 1, "LSTM": 2, "GRU": 3}[kind]
    layers = (mode, n_hidden, n_out, n_layers, False, 0.0, True, n_ways == 2, [], None)
    forward, backward = torch.ops.aten._cudnn_rnn, torch.ops.aten._cudnn_rnn_backward
    args = x, weights, 4, None, state, cell
    output, hy, cy, kept, _ = STAND_INS[forward.default](*args, *layers)
    assert kept.nbytes == reserve
    backward_args = *args, output, output, None, None, *layers, kept, [True] * 4
    gradients = STAND_INS[backward.default](*backward_args)
    assert [each.shape for each in gradients[3]] == [each.shape for each in weights]
    assert len({each.untyped_storage()._cdata for each in gradients[3]}) == 1
    assert gradients[0].shape == x.shape
    assert gradients[1].shape == hy.shape
    assert gradients[2] is None if cell is None else gradients[2].shape == cy.shape
    for func, given in ((forward.default, (*args, *layers)), (backward.default, backward_args)):
        assert reserve / 20 < taken_inside(func, given)[0] < 16 * reserve
