"""Methods beside forward, that use weights of their module: while they run the device shows."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tenure.paging import PagingError, load_paged, page, plan_paging

pytestmark = pytest.mark.usefixtures("without_gradients")

WIDTH = 32


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.decoder = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
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


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.coder = Coder()
        self.head = nn.Linear(WIDTH, WIDTH)

    def describe(self, x):
        return self.head(self.coder.encode(x))


METHODS = ("encode", "decode", "both")


@pytest.fixture
def coder():
    torch.manual_seed(0)
    return Coder().eval()


def paged(sim, model, methods=METHODS, percent=50):
    budget_bytes = plan_paging(model, sim.device).weight_bytes * percent // 100
    return page(model, sim.device, budget=budget_bytes, methods=methods)


def whole(sim, model):
    return copy.deepcopy(model).to(sim.device)


def test_methods_compute_what_those_of_the_whole_model_do(sim, coder, x):
    plain = whole(sim, coder)
    there = x.to(sim.device)
    with paged(sim, coder):
        for _ in range(3):
            z = coder.encode(x)
            assert torch.equal(z, plain.encode(there))
            assert torch.equal(coder.decode(z, scale=2.0), plain.decode(z, scale=2.0))
            assert torch.equal(coder.both(x), plain.both(there))
            assert torch.equal(coder(x), plain(there))
        assert coder.seen.device.type == "cpu"
        assert coder.seen == 9 * len(x)


def test_each_method_has_an_order_of_its_own(sim, coder, x):
    with paged(sim, coder, percent=60) as handle:
        for _ in range(3):
            z = coder.encode(x)
            coder.decode(z)
        coder.encode(x)
        assert handle.report().faults == 0
        coder.decode(z)
        assert handle.report().faults == 0


def test_a_method_that_is_not_named_sees_the_host(sim, coder):
    with paged(sim, coder, ()), pytest.raises(ValueError, match="cpu"):
        coder.fail(None)


def test_a_method_that_raises_leaves_the_model_on_the_host(sim, coder, x):
    with paged(sim, coder, ("fail", "encode")) as handle:
        with pytest.raises(ValueError, match="sim"):
            coder.fail(x)
        assert coder.shift.device.type == "cpu"
        assert not handle._pager.is_inside
        coder.encode(x)


def test_a_method_of_a_module_inside_is_named_with_its_path(sim, x):
    torch.manual_seed(0)
    model = Pair().eval()
    plain = whole(sim, model)
    with paged(sim, model, ("coder.encode", "describe")):
        assert torch.equal(model.coder.encode(x), plain.coder.encode(x.to(sim.device)))
        assert torch.equal(model.describe(x), plain.describe(x.to(sim.device)))


def test_the_method_looks_like_itself_and_is_itself_again_after(sim, coder):
    with paged(sim, coder):
        assert coder.encode.__name__ == "encode"
        assert coder.encode.__doc__ == "Encode it."
        assert str(coder.encode.__signature__) == "(x)"
    assert not set(METHODS) & set(vars(coder))
    assert coder.encode.__func__ is Coder.encode


def test_a_function_set_on_the_model_itself_can_be_named(sim, coder, x):
    coder.first = lambda x: coder.shift + x
    own = coder.first
    with paged(sim, coder, ("first",)):
        assert coder.first(x).device.type == "sim"
    assert coder.first is own


def test_a_function_without_a_signature_can_be_named(sim, coder, x):
    coder.most = max
    with paged(sim, coder, ("most",)):
        assert coder.most(x, key=len).device.type == "sim"
    assert coder.most is max


def test_what_was_set_on_the_model_meanwhile_stays(sim, coder):
    with paged(sim, coder):
        coder.encode = len
    assert coder.encode is len


def test_copies_and_pickles_have_plain_methods(sim, coder, x):
    expected = coder.decode(x)
    with paged(sim, coder):
        file = io.BytesIO()
        pickle.dump(coder, file)
        file.seek(0)
        for each in (copy.deepcopy(coder), pickle.load(file)):
            assert each is not coder
            assert each.decode.__self__ is each
            assert torch.equal(each.decode(x), expected)
    assert torch.equal(each.decode(x), expected)


def test_nothing_keeps_a_model_whose_methods_are_named(sim, x):
    coder = Coder().eval()
    handle = paged(sim, coder)
    coder.encode(x)
    encode, alive = coder.encode, weakref.ref(coder)
    gc.disable()  # nothing waits for a collection
    try:
        del coder, handle
        assert alive() is None
    finally:
        gc.enable()
    with pytest.raises(PagingError, match=r"^encode\(\) was called of a paged module that is gone"):
        encode(x)


def test_methods_work_from_a_file(coder, x, tmp_path):
    expected = coder.decode(x)
    save_file(coder.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Coder().eval()
    with load_paged(model, tmp_path, "cpu", budget="12KiB", methods=["decode"]):
        assert torch.equal(model.decode(x), expected)


@pytest.mark.parametrize("name", ["encoed", "shift", "decoder", "", 3, "nowhere.encode"])
def test_a_name_of_no_method_is_refused_with_those_that_there_are(coder, tmp_path, name):
    with pytest.raises(PagingError) as caught:
        page(coder, "cpu", host=tmp_path, methods=("encode", name))
    assert str(caught.value) == (
        f"methods= names {name!r}, which is no method of Coder or of a module in it. "
        "Coder has: both, decode, encode, fail, later, pieces."
    )
    assert "encode" not in vars(coder)


def test_names_without_a_tuple_are_refused(coder, tmp_path):
    with pytest.raises(PagingError, match=r"such as methods=\('encode',\)\.$"):
        page(coder, "cpu", host=tmp_path, methods="encode")
    with pytest.raises(PagingError, match=r"^methods=3: write names of methods"):
        page(coder, "cpu", host=tmp_path, methods=3)


@pytest.mark.parametrize("name", ["pieces", "later"])
def test_a_method_that_goes_on_after_it_returned_is_refused(coder, tmp_path, name):
    with pytest.raises(PagingError, match="goes on after it has returned"):
        page(coder, "cpu", host=tmp_path, methods=(name,))


class Scaled(nn.Module):
    factor = 1

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * self.factor


def test_a_shallow_copy_runs_its_own_forward(x, tmp_path):
    model = Scaled().eval()
    with page(model, "cpu", host=tmp_path):
        other = copy.copy(model)
        other.factor = 2
        assert torch.equal(other(x), 2 * model(x))


def test_a_copy_goes_without_a_collection_and_runs_as_it_is(coder, x, tmp_path):
    expected = coder(x)
    with page(coder, "cpu", host=tmp_path):
        copied = copy.deepcopy(coder)
    assert torch.equal(copied(x), expected)
    assert "_call_impl" not in vars(copied)
    alive = weakref.ref(copied)
    gc.disable()  # nothing waits for a collection
    try:
        del copied
        assert alive() is None
    finally:
        gc.enable()


def test_an_encoder_layer_can_be_called_alone_on_its_fast_path(x, tmp_path):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    x = x[None]
    expected = model.layers[1](x)
    with page(model, "cpu", budget="40KiB", host=tmp_path):
        assert torch.equal(model.layers[1](x), expected)
