"""What kernels take for themselves, over torch's own operators, forward and backward.

What is said is never too low, whatever the operator, dtype and layout. Small samples are run as
they are, so what this holds is the lists of those that take nothing; that larger ones are told from
smaller ones is held by the cases of ``tests/adaptive/predict``, here in more dtypes.
"""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from ..adaptive.predict.scratch_cases import convolutions, layers, losses
from ..adaptive.predict.scratch_truth import Listening, listen
from .samples import samples_of
from .test_operators import LEFT_OUT, name_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.exhaustive]
SAMPLES = 1
DTYPES = (torch.float32,)
# torch's kernel for a loss that bfloat16 lacks
_LACKING = {"multi_margin"}
CASES = {
    f"{name}-{dtype}": case
    for dtype in (torch.float64,)
    for group in (layers, losses, convolutions)
    for name, case in group(dtype).items()
    if not (dtype == torch.bfloat16 and name in _LACKING)
}
# of sparse tensors nothing is said
RUNNING = [op for op in op_db if name_of(op) not in LEFT_OUT and not op.name.startswith("sparse.")]


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_of_layers_is_never_too_low_and_hardly_too_high(name):
    calls = listen(CASES[name])
    assert [call for call in calls if call.is_low] == []
    assert [call for call in calls if call.is_loose] == []


@pytest.mark.parametrize("op", RUNNING, ids=name_of)
def test_what_is_said_of_an_operator_is_never_too_low(op):
    calls = [call for dtype in DTYPES if dtype in op.dtypes for call in _calls(op, dtype)]
    assert [call for call in calls if call.is_low] == []


def _calls(op, dtype):
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for made in samples_of(op, dtype, SAMPLES, grad=differentiable):
        for sample in (made, made.noncontiguous()):
            mode = Listening()
            # what doesn't run here is for other tests to hold
            try:
                with mode:
                    _run(op, sample, differentiable)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                pass
            yield from mode.calls


def _run(op, sample, differentiable):
    result = op(sample.input, *sample.args, **sample.kwargs)
    if differentiable:
        result = sample.output_process_fn_grad(result)
        ends = [t for t in tree_leaves(result) if torch.is_tensor(t) and t.requires_grad]
        inputs = tree_leaves((sample.input, sample.args, sample.kwargs))
        leaves = [t for t in inputs if torch.is_tensor(t) and t.requires_grad and t.is_leaf]
        if ends and leaves:
            ones = [torch.ones_like(t) for t in ends]
            torch.autograd.grad(ends, leaves, ones, allow_unused=True)
