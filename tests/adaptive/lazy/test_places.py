"""Calls that name places among the samples, which the first few samples of a batch do not show."""

import pytest
import torch

from tenure.adaptive import (
    AdaptiveUsageError,
    BatchCoupledError,
    OutOfRetriesError,
    SplitMismatchError,
    lazy,
)

from .programs import RoomFor, batch, gradients, mlp

pytestmark = pytest.mark.usefixtures("forgetful")


def _written(out, write):
    write(out)
    return out


# Each changes nothing of three samples, whole or in parts, and something of eight.
PLACES = {
    "triu": lambda out: out.triu(-5),
    "tril": lambda out: out.flip(1).mT.tril(4).mT,
    "triu_": lambda out: _written(out, lambda out: out.triu_(-5)),
    "triu of a view": lambda out: out[None].triu(-5)[0],
    "roll": lambda out: out.roll(6, 0),
    "roll by name": lambda out: out.roll(shifts=6, dims=(-2,)),
    "roll all": lambda out: out.roll(18),
    "slice": lambda out: _written(out, lambda out: out.__setitem__(slice(5, None), 0.0)),
    "slice of two": lambda out: _written(
        out, lambda out: out.__setitem__((slice(5, None), slice(0, 2)), 0.0)
    ),
    "slice after an ellipsis": lambda out: _written(
        out, lambda out: out.__setitem__((..., slice(5, None), slice(None)), 0.0)
    ),
    "slice of what is flat": lambda out: _written(
        out, lambda out: out.view(-1).__setitem__(slice(15, None), 0.0)
    ),
    "as_strided": lambda out: out.as_strided((out.size(0), 3), (3, 1), 0),
    # one number of the fourth sample is among the others of the seventh
    "isin": lambda out: out * torch.isin((out[:, :1] * 100).round(), (out[:, 1:2] * 100).round()),
    "as_strided_scatter": lambda out: torch.as_strided_scatter(
        out, out.new_zeros(3), (3,), (1,), 18
    ),
}
BY_PLACE = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
REFUSALS = (AdaptiveUsageError, BatchCoupledError, OutOfRetriesError, SplitMismatchError)


@BY_PLACE
def test_values_are_those_of_the_whole_or_refused(place):
    model, (x, _) = mlp(), batch()
    with torch.no_grad():
        expected = place(model(x))
        with RoomFor(3):
            try:
                found = place(model(lazy(x))).value()
            except REFUSALS:
                return
    torch.testing.assert_close(found, expected)


@BY_PLACE
def test_gradients_are_those_of_the_whole_or_refused(place):
    model, (x, _) = mlp(), batch()

    def run(wrap):
        out = model(wrap(x))
        (out * place(out * 1)).square().mean().backward()
        found = gradients(model)
        model.zero_grad()
        return found

    expected = run(lambda x: x)
    with RoomFor(3):
        try:
            found = run(lazy)
        except REFUSALS:
            assert not gradients(model)
            return
    torch.testing.assert_close(found, expected)
