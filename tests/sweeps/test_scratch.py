"""What kernels take for themselves, over torch's own operators, forward and backward.

What is said is never too low, whatever the operator, dtype and layout. Small samples are run as
they are, so what this holds is the lists of those that take nothing; that larger ones are told from
smaller ones is held by the cases of ``tests/adaptive/predict``, here in more dtypes.
"""

from contextlib import suppress

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from ..adaptive.predict.scratch_cases import Listening, layers, listen
from .samples import gradients_of, samples_of
from .test_operators import LEFT_OUT, name_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.exhaustive]
CASES = layers(torch.float64)
# of sparse tensors nothing is said
RUNNING = [op for op in op_db if name_of(op) not in LEFT_OUT and not op.name.startswith("sparse.")]


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_of_layers_is_never_too_low_and_hardly_too_high(name):
    calls = listen(CASES[name])
    assert [call for call in calls if call.is_low] == []
    assert [call for call in calls if call.is_loose] == []


def test_what_is_said_of_an_operator_is_never_too_low():
    for op in RUNNING:
        if torch.float32 in op.dtypes:
            assert [call for call in _calls(op) if call.is_low] == [], name_of(op)


def _calls(op):
    differentiable = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    for made in samples_of(op, torch.float32, 1, grad=differentiable):
        for sample in (made, made.noncontiguous()):
            # what doesn't run here is for other tests to hold
            with (
                suppress(RuntimeError, NotImplementedError, TypeError, ValueError),
                Listening() as mode,
            ):
                _run(op, sample, differentiable)
            yield from mode.calls


def _run(op, sample, differentiable):
    result = op(sample.input, *sample.args, **sample.kwargs)
    if differentiable:
        given = sample.input, sample.args, sample.kwargs
        gradients_of(sample.output_process_fn_grad(result), given)
