"""A model gets the tensors of its file, all of them or none."""

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, load_paged

from ..models import Recurrent, TiedLanguageModel
from ..support import assert_equal, on_meta, saved


class Net(nn.Module):
    def __init__(self, *, has_rope=False):
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.BatchNorm1d(3)
        if has_rope:
            self.register_buffer("rope", torch.ones(2), persistent=False)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "0.safetensors"


def load(model, path):
    load_paged(model, path, "cpu").unpage()


@pytest.mark.parametrize(
    "made", [torch.device("meta"), torch.device("cpu"), torch.inference_mode()]
)
def test_a_model_gets_the_values_and_its_parameters_stay_the_same_objects(path, made):
    source = Net()
    with made:
        model = Net()
    if not isinstance(made, torch.inference_mode):
        model.a.weight.requires_grad_(False)
    model.a.weight.note = "kept"
    needed = [p.requires_grad for p in model.parameters()]
    before = list(map(id, (*model.parameters(), *model.buffers())))
    load(model, saved(source, path))
    assert list(map(id, (*model.parameters(), *model.buffers()))) == before
    assert_equal(model.state_dict(), source.state_dict())
    assert [p.requires_grad for p in model.parameters()] == needed
    assert model.a.weight.note == "kept"
    assert type(model.a.weight) is nn.Parameter
    version = model.a.weight._version
    with torch.no_grad():
        model.a.weight.mul_(2)
    assert model.a.weight._version == version + 1


def test_a_budget_that_is_too_small_leaves_the_model_as_it_was(path):
    plain, meta = Recurrent(), on_meta(Recurrent)
    saved(Recurrent(), path)
    values = {name: each.clone() for name, each in plain.state_dict().items()}
    for model in (plain, meta):
        with pytest.raises(PagingError, match="can't be paged within 1 B"):
            load_paged(model, path, "cpu", budget=1)
    assert {each.device.type for each in (*meta.parameters(), *meta.buffers())} == {"meta"}
    assert_equal(plain.state_dict(), values)


@pytest.mark.parametrize("left_out", ["embed.weight", "head.weight", None])
def test_tied_parameters_stay_tied_whichever_name_the_file_has(path, left_out):
    source, model = TiedLanguageModel(), on_meta(TiedLanguageModel)
    state = source.state_dict()
    state.pop(left_out, None)
    load(model, saved(state, path))
    assert model.head.weight is model.embed.weight
    assert model.head.weight.equal(source.embed.weight)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            Net,
            {"a.bias": None},
            r"0.safetensors does not fit Net: the file lacks 'a.bias'. Nothing was loaded. Build "
            "the model as it was when its state_dict was saved, or save this one's",
        ),
        (
            Net,
            {f"more.{i}": torch.ones(1) for i in range(7)},
            "the model has no 'more.0', 'more.1', 'more.2', 'more.3', 'more.4' and 2 more. Nothing",
        ),
        (
            Net,
            {"a.weight": torch.ones(3, 4).half()},
            r"'a.weight' is float16\[3, 4\] in the file, and float32\[3, 2\] in the model",
        ),
        (
            TiedLanguageModel,
            {"head.weight": torch.ones(50, 32)},
            "'embed.weight' and 'head.weight' are one tensor in the model, and differ in the file",
        ),
        (
            lambda: Net(has_rope=True),
            {},
            r"0.safetensors does not fit Net: no file holds 'rope' \(buffers on meta, "
            r"persistent=False\). Nothing was loaded. Give such a buffer "
            r'its values outside of torch.device\("meta"\) first, as by `model.rope = ...`.$',
        ),
        (
            lambda: nn.Sequential(Net(has_rope=True)),
            {},
            r'loaded. Give such a buffer its values outside of torch.device\("meta"\) first, as by '
            r"`model\[0\] = Net\(...\)`.$",
        ),
    ],
    ids=["missing", "unexpected", "other", "tied", "without values", "inside"],
)
def test_what_does_not_fit_is_refused_and_the_model_stays_as_it_is(path, make, changes, message):
    def seen():
        return [(id(each), each.device.type, each.data_ptr()) for each in model.parameters()]

    state = make().state_dict() | changes
    saved({name: each for name, each in state.items() if each is not None}, path)
    model = on_meta(make)
    before = seen()
    with pytest.raises(PagingError, match=message):
        load(model, path)
    assert seen() == before


def test_a_buffer_that_no_file_holds_keeps_the_values_that_it_has(path):
    model = on_meta(lambda: Net(has_rope=True))
    model.rope = torch.ones(2)
    load(model, saved(Net(), path))
    assert model.rope.tolist() == [1, 1]
