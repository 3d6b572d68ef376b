"""Methods beside forward, that use weights of their module: while they run the device shows."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, page

from ..models import WIDTH, linears
from ..support import paged

pytestmark = pytest.mark.usefixtures("without_gradients")


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = linears(4), linears(4, seed=1)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def encode(self, x):
        """Encode it."""
        self.seen += len(x)
        return self.encoder(x) + self.shift

    def decode(self, z, *, scale=1.0):
        return self.decoder(z - self.shift) * scale

    def both(self, x):
        return self.decode(self.encode(x))

    def forward(self, x):
        return self.both(x)

    def fail(self, x):
        raise ValueError(self.shift.device.type)

    def pieces(self, x):
        yield self.decoder(x)

    async def later(self, x):
        return self.decoder(x)


METHODS = ("encode", "decode", "both")


@pytest.fixture
def coder():
    return Coder().eval()


def test_methods_compute_what_those_of_the_whole_model_do_each_in_an_order_of_its_own(
    sim, coder, x
):
    plain, there = copy.deepcopy(coder).to(sim.device), x.to(sim.device)
    with paged(sim, coder, 60, methods=METHODS) as handle:
        for _ in range(3):
            z = coder.encode(x)
            assert torch.equal(z, plain.encode(there))
            assert torch.equal(coder.decode(z, scale=2.0), plain.decode(z, scale=2.0))
        assert coder.seen.device.type == "cpu"
        assert coder.seen == 3 * len(x)
        coder.encode(x)
        assert handle.report().faults == 0
        coder.decode(z)
        assert handle.report().faults == 0
        assert torch.equal(coder.both(x), plain.both(there))
        assert torch.equal(coder(x), plain(there))


def test_a_method_that_raises_leaves_the_model_on_the_host(sim, coder, x):
    with paged(sim, coder, methods=("fail", "encode")) as handle:
        with pytest.raises(ValueError, match="sim"):
            coder.fail(x)
        assert coder.shift.device.type == "cpu"
        assert not handle._pager.is_inside
        coder.encode(x)
    with paged(sim, coder), pytest.raises(ValueError, match="cpu"):
        coder.fail(None)


def test_copies_and_pickles_have_plain_methods(sim, coder, x):
    expected = coder.decode(x)
    with paged(sim, coder, methods=METHODS):
        for each in (copy.deepcopy(coder), pickle.loads(pickle.dumps(coder))):
            assert each is not coder
            assert each.decode.__self__ is each
            assert torch.equal(each.decode(x), expected)
    assert torch.equal(each.decode(x), expected)


def test_nothing_keeps_a_model_whose_methods_are_named(sim, x, uncollected):
    coder = Coder().eval()
    handle = paged(sim, coder, methods=METHODS)
    coder.encode(x)
    encode, alive = coder.encode, weakref.ref(coder)
    del coder, handle
    assert alive() is None
    with pytest.raises(PagingError, match=r"^encode\(\) was called of a paged module that is gone"):
        encode(x)


NO_METHOD = (
    r"^methods= names {}, which is no method of Coder or of a module in it\. Coder has: both, "
    r"decode, encode, fail, later, pieces\.$"
)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (("encode", "encoed"), NO_METHOD.format("'encoed'")),
        (("encode", "decoder"), NO_METHOD.format("'decoder'")),
        (("encode", "nowhere.encode"), NO_METHOD.format("'nowhere.encode'")),
        (("encode", 3), NO_METHOD.format("3")),
        ("encode", r"such as methods=\('encode',\)\.$"),
        (3, r"^methods=3: write names of methods"),
        (("pieces",), "goes on after it has returned"),
        (("later",), "goes on after it has returned"),
    ],
)
def test_what_names_no_method_that_can_be_paged_is_refused(coder, tmp_path, methods, message):
    with pytest.raises(PagingError, match=message):
        page(coder, "cpu", host=tmp_path, methods=methods)
    assert "encode" not in vars(coder)
