"""PyTorch's operators and modules, recorded: whole and in parts they give what they give at once.

What is held is the trial on a few samples: a call that is found to keep samples apart is run on two
parts of the batch, and those have to make the whole. All samples of all operators are `exhaustive`.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tenure.adaptive import BatchCoupledError, LazyTensor, OutOfRetriesError, lazy, reset

from .samples import samples_of, tensors_in

# What the operators warn of is no matter of their being recorded.
pytestmark = pytest.mark.filterwarnings("ignore")

# one of each kind of verdict: apart in each way, a term, mixed, by place, drawn and never tried
BRANCHES = {
    "add", "argmax", "cat", "cumsum", "lu_unpack", "masked_fill", "matmul", "mean", "new_full",
    "nn.functional.batch_norm", "nn.functional.cross_entropy", "nn.functional.mse_loss",
    "nn.functional.conv2d", "permute", "repeat", "roll", "select", "sort", "squeeze", "sum", "tril",
    "unbind", "unique", "where", "index_add", "linalg.solve", "scatter",
}  # fmt: skip
_RANDOM = {
    "bernoulli", "multinomial", "normal", "uniform", "cauchy", "exponential", "geometric",
    "log_normal", "rand_like", "randn_like", "randint_like", "svd_lowrank", "pca_lowrank",
    "nn.functional.rrelu", "nn.functional.dropout", "nn.functional.dropout2d",
    "nn.functional.dropout3d", "nn.functional.alpha_dropout",
    "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.scaled_dot_product_attention",
    "nn.functional.multi_head_attention_forward",
}  # fmt: skip
# They give a tensor another shape in place, which is refused.
_RESHAPED = {"resize_", "resize_as_"}
_UNWRITTEN = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}


@dataclass
class Found:
    """What a sweep saw."""

    n_split: int = 0
    n_whole: int = 0
    differences: list = field(default_factory=list)


def _copied(tree):
    return tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)


def _recorded(tree, dim, size):
    def one(tensor):
        has_samples = tensor.dim() > dim and tensor.shape[dim] == size
        return lazy(tensor, batch=dim) if has_samples else tensor

    return tree_map_only(Tensor, one, tree)


def _ways(sample):
    """Which tensors have samples, and where: all that can, or the first alone, or in its second."""
    first = next(iter(tensors_in(sample.input)), None)
    if first is None or first.layout is not torch.strided or not first.dim():
        return
    if (n := first.shape[0]) > 1:
        alike = {t.dim() for t in tensors_in((sample.args, sample.kwargs))}
        if alike <= {first.dim()}:
            yield 0, n, True
        yield 0, n, False
    if first.dim() > 1 and first.shape[1] > 1:
        yield 1, first.shape[1], False


def _same(a, b):
    torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-7, atol=1e-9, equal_nan=True)


class FailsOnce(TorchDispatchMode):
    """Memory runs out at the first operation, so that what was recorded runs in parts."""

    has_failed = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


def _check(name, run, expected, found):
    out = tensors_in(run())
    assert len(out) == len(expected), name
    for mine, theirs in zip(out, expected, strict=True):
        assert tuple(mine.shape) == tuple(theirs.shape), name
        assert mine.dtype == theirs.dtype, name
        _same(mine.value() if isinstance(mine, LazyTensor) else mine, theirs)
    reset()
    with torch.no_grad():
        out = tensors_in(run())
    memory = FailsOnce()
    for mine, theirs in zip(out, expected, strict=True):
        # what is there already asks for no memory
        if not isinstance(mine, LazyTensor) or "not computed" not in repr(mine):
            continue
        try:
            with memory:
                value = mine.value()
        except (BatchCoupledError, OutOfRetriesError):
            found.n_whole += 1
            return
        _same(value, theirs)
        found.n_split += 1


def _sweep_operator(info, n_samples, found):
    dtype = torch.float64 if torch.float64 in info.dtypes else torch.int64
    grad = info.supports_autograd and dtype.is_floating_point
    for sample in samples_of(info, dtype, n_samples, grad=grad):
        given = (sample.input, tuple(sample.args), sample.kwargs)
        try:
            first, args, kwargs = _copied(given)
            expected = tensors_in(info.op(first, *args, **kwargs))
        except Exception:  # torch refuses a sample of its own
            continue
        if any(t.layout is not torch.strided for t in expected):
            continue
        for dim, size, others_too in _ways(sample):

            def run(dim=dim, size=size, others_too=others_too, given=given):
                first, args, kwargs = _copied(given)
                first = _recorded(first, dim, size)
                if others_too:
                    args, kwargs = _recorded((args, kwargs), dim, size)
                return info.op(first, *args, **kwargs)

            try:
                _check(info.name, run, expected, found)
            except Exception as error:
                found.differences.append((info.name, dim, others_too, str(error)[:200]))


@pytest.mark.parametrize(
    ("n_samples", "names", "n_split", "n_whole"),
    [
        (2, BRANCHES, 30, 40),
        pytest.param(8, {op.name for op in op_db}, 1600, 400, marks=pytest.mark.exhaustive),
    ],
    ids=("branches", "all"),
)
def test_operators_give_the_same_recorded_and_in_parts(n_samples, names, n_split, n_whole):
    found = Found()
    for info in op_db:
        is_known = {torch.float64, torch.int64} & set(info.dtypes)
        if info.name in names - _RANDOM - _UNWRITTEN - _RESHAPED and is_known:
            _sweep_operator(info, n_samples, found)
    assert found.differences == []
    # most calls keep samples apart
    assert found.n_split > n_split
    assert found.n_whole > n_whole


# one draws random numbers, one gives what no tree of tensors is
_MODULES_LEFT_OUT = {"RReLU", "AdaptiveLogSoftmaxWithLoss"}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("n_samples", [1, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_modules_give_the_same_recorded_and_in_parts(n_samples, training):
    found = Found()
    for info in module_db:
        name = info.module_cls.__name__
        # torch's own lazy modules have no parameters yet
        if name in _MODULES_LEFT_OUT or name.startswith("Lazy") or torch.float64 not in info.dtypes:
            continue
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=False, training=training
        )
        # one loss has 857, every combination of its options
        for sample in random.Random(0).sample(samples, min(len(samples), n_samples)):
            try:
                _sweep_module(info, sample, training, found)
            except Exception as error:
                found.differences.append((name, str(sample), str(error)[:200]))
    assert found.differences == []
    assert found.n_split > 60


def _sweep_module(info, sample, training, found):
    made = sample.constructor_input
    if sample.forward_input is None or "dropout" in repr(made.kwargs):
        return
    given = (sample.forward_input.args, sample.forward_input.kwargs)
    first = next(iter(tensors_in(given)), None)
    if first is None or not first.dim() or first.shape[0] < 2:
        return
    # one sample without a batch: torch's own fake tensors say (1,) of a result that is ()
    if info.module_cls.__name__ == "MultiLabelMarginLoss" and first.dim() == 1:
        return
    module = info.module_cls(*made.args, **made.kwargs).double().train(training)
    if training and "Dropout" in repr(module):
        return
    state = torch.get_rng_state()
    buffers = {k: v.clone() for k, v in module.state_dict().items()}
    args, kwargs = _copied(given)
    expected = tensors_in(module(*args, **kwargs))
    module.load_state_dict(buffers)

    def run():
        args, kwargs = _copied(given)
        torch.set_rng_state(state)
        return module(*_recorded(args, 0, first.shape[0]), **kwargs)

    _check(info.module_cls.__name__, run, expected, found)
