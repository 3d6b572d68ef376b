"""A model gets the tensors of its file, all of them or none."""

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, load_paged

from ..models import TiedLanguageModel, lstm

save_file = pytest.importorskip("safetensors.torch").save_file


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.BatchNorm1d(3)


@pytest.fixture
def save(tmp_path):
    """Writes tensors to a file."""

    def save(tensors):
        path = tmp_path / "0.safetensors"
        save_file({name: each.contiguous().clone() for name, each in tensors.items()}, path)
        return path

    return save


def load(model, path):
    load_paged(model, path, "cpu").unpage()


def on_meta(make):
    with torch.device("meta"):
        return make()


def refused(model, path, message):
    """Check that a file is refused with a message, and the model stays as it is."""
    before = [(id(each), each.device.type, each.data_ptr()) for each in model.parameters()]
    with pytest.raises(PagingError, match=message):
        load(model, path)
    assert [(id(each), each.device.type, each.data_ptr()) for each in model.parameters()] == before


@pytest.mark.parametrize(
    "made", [torch.device("meta"), torch.device("cpu"), torch.inference_mode()]
)
def test_a_model_gets_the_values_and_its_parameters_stay_the_same_objects(save, made):
    source = Net()
    with made:
        model = Net()
    if not isinstance(made, torch.inference_mode):
        model.a.weight.requires_grad_(False)
    model.a.weight.note = "kept"
    needed = [p.requires_grad for p in model.parameters()]
    before = list(map(id, (*model.parameters(), *model.buffers())))
    load(model, save(source.state_dict()))
    assert list(map(id, (*model.parameters(), *model.buffers()))) == before
    torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)
    assert [p.requires_grad for p in model.parameters()] == needed
    assert model.a.weight.note == "kept"
    assert type(model.a.weight) is nn.Parameter
    version = model.a.weight._version
    with torch.no_grad():
        model.a.weight.mul_(2)
    assert model.a.weight._version == version + 1


def test_a_budget_that_is_too_small_leaves_the_model_as_it_was(save):
    path, plain, meta = save(lstm().state_dict()), lstm(), on_meta(lstm)
    values = {name: each.clone() for name, each in plain.state_dict().items()}
    for model in (plain, meta):
        with pytest.raises(PagingError, match="can't be paged within 1 B"):
            load_paged(model, path, "cpu", budget=1)
    assert {each.device.type for each in (*meta.parameters(), *meta.buffers())} == {"meta"}
    torch.testing.assert_close(plain.state_dict(), values, rtol=0, atol=0)


def test_layers_that_refer_weakly_to_their_parameters_get_theirs(save):
    source, model = lstm(), on_meta(lstm)
    load(model, save(source.state_dict()))
    x = torch.randn(2, 5, 32)
    assert model(x).equal(source(x))


def test_tied_parameters_stay_tied_whichever_name_the_file_has_and_may_not_differ_in_it(save):
    source = TiedLanguageModel()
    for left_out in ("embed.weight", "head.weight", None):
        model, state = on_meta(TiedLanguageModel), source.state_dict()
        state.pop(left_out, None)
        load(model, save(state))
        assert model.head.weight is model.embed.weight
        assert model.head.weight.equal(source.embed.weight)
    state = dict(source.state_dict())
    state["head.weight"] = state["head.weight"] + 1
    message = "'embed.weight' and 'head.weight' are one tensor in the model, and differ in the file"
    refused(on_meta(TiedLanguageModel), save(state), message)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {name: each for name, each in Net().state_dict().items() if name[:3] != "a.b"},
            r"0.safetensors does not fit Net: the file lacks 'a.bias'. Nothing was loaded. Build "
            "the model as it was when its state_dict was saved, or save this one's",
        ),
        (
            {**Net().state_dict(), **{f"more.{i}": torch.ones(1) for i in range(7)}},
            "the model has no 'more.0', 'more.1', 'more.2', 'more.3', 'more.4' and 2 more. Nothing",
        ),
        (
            {**Net().state_dict(), "a.weight": torch.ones(3, 4).half()},
            r"'a.weight' is float16\[3, 4\] in the file, and float32\[3, 2\] in the model",
        ),
    ],
    ids=["missing", "unexpected", "other"],
)
def test_what_differs_is_listed(save, state, message):
    refused(on_meta(Net), save(state), message)


def test_a_buffer_that_no_file_holds_needs_its_values(save):
    def make():
        model = Net()
        model.register_buffer("rope", torch.ones(2), persistent=False)
        return model

    model, path = on_meta(make), save(Net().state_dict())
    message = (
        r"'rope' is a buffer that no file holds \(persistent=False\), and it is on meta: give it "
        "its values first"
    )
    refused(model, path, message)
    model.rope = torch.ones(2)
    load(model, path)
    assert model.rope.tolist() == [1, 1]
