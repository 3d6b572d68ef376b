import pytest
import torch
from torch import nn

from tenure.paging import PagingError
from tenure.paging._checkpoint._assigned import assigned
from tenure.paging._checkpoint._files import open_checkpoint

from ..models import TiedLanguageModel, lstm

save_file = pytest.importorskip("safetensors.torch").save_file


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.BatchNorm1d(3)


@pytest.fixture
def save(tmp_path):
    """Writes tensors to a file and opens it."""
    opened = []

    def save(tensors):
        path = tmp_path / f"{len(opened)}.safetensors"
        save_file({name: each.contiguous().clone() for name, each in tensors.items()}, path)
        opened.append(open_checkpoint(path))
        return opened[-1]

    yield save
    for checkpoint in opened:
        checkpoint.close()


def on_meta(make):
    with torch.device("meta"):
        return make()


def refused(model, checkpoint, message):
    """That a checkpoint is refused with a message, and the model stays what it is."""
    before = [(id(each), each.device.type, each.data_ptr()) for each in model.parameters()]
    with pytest.raises(PagingError, match=message), assigned(model, checkpoint):
        pass
    assert [(id(each), each.device.type, each.data_ptr()) for each in model.parameters()] == before


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_gets_the_values_and_its_parameters_stay_the_same_objects(save, device):
    source = Net()
    with torch.device(device):
        model = Net()
    model.a.weight.requires_grad_(False)
    model.a.weight.note = "kept"
    before = list(map(id, (*model.parameters(), *model.buffers())))
    with assigned(model, save(source.state_dict())):
        pass
    assert list(map(id, (*model.parameters(), *model.buffers()))) == before
    torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)
    assert (model.a.weight.requires_grad, model.a.bias.requires_grad) == (False, True)
    assert model.a.weight.note == "kept"
    assert type(model.a.weight) is nn.Parameter


def test_a_model_that_was_made_in_inference_mode_gets_tensors_that_count_writes(save):
    source = Net()
    with torch.inference_mode():
        model = Net()
    before = list(map(id, (*model.parameters(), *model.buffers())))
    with assigned(model, save(source.state_dict())):
        pass
    assert list(map(id, (*model.parameters(), *model.buffers()))) == before
    torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)
    version = model.a.weight._version
    with torch.no_grad():
        model.a.weight.mul_(2)
    assert model.a.weight._version == version + 1


def test_a_block_that_raises_leaves_the_model_as_it_was(save):
    model, source = on_meta(Net), Net()
    with pytest.raises(KeyError), assigned(model, save(source.state_dict())):
        raise KeyError
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"meta"}
    plain = Net()
    values = {name: each.clone() for name, each in plain.state_dict().items()}
    with pytest.raises(KeyError), assigned(plain, save(source.state_dict())):
        raise KeyError
    torch.testing.assert_close(plain.state_dict(), values, rtol=0, atol=0)


def test_layers_that_refer_weakly_to_their_parameters_get_theirs(save):
    source, model = lstm(), on_meta(lstm)
    with pytest.raises(KeyError), assigned(model, save(source.state_dict())):
        raise KeyError
    assert {each.device.type for each in model.parameters()} == {"meta"}
    with assigned(model, save(source.state_dict())):
        pass
    x = torch.randn(2, 5, 32)
    assert model(x).equal(source(x))


def test_tied_parameters_stay_tied_whichever_name_the_file_has(save):
    source = TiedLanguageModel()
    for left_out in ("embed.weight", "head.weight", None):
        model, state = on_meta(TiedLanguageModel), source.state_dict()
        state.pop(left_out, None)
        with assigned(model, save(state)):
            pass
        assert model.head.weight is model.embed.weight
        assert model.head.weight.equal(source.embed.weight)


def test_tied_parameters_that_differ_in_the_file_are_refused(save):
    state = dict(TiedLanguageModel().state_dict())
    state["head.weight"] = state["head.weight"] + 1
    message = "'embed.weight' and 'head.weight' are one tensor in the model, and differ in the file"
    refused(on_meta(TiedLanguageModel), save(state), message)


def test_missing_names_are_listed(save):
    state = Net().state_dict()
    del state["a.bias"], state["b.running_mean"]
    message = (
        r"0.safetensors does not fit Net: the file lacks 'a.bias', 'b.running_mean'. Nothing was "
        "loaded. Build the model as it was when its state_dict was saved, or save this one's"
    )
    refused(on_meta(Net), save(state), message)


def test_unexpected_names_are_listed(save):
    state = {**Net().state_dict(), **{f"more.{i}": torch.ones(1) for i in range(7)}}
    message = (
        "the model has no 'more.0', 'more.1', 'more.2', 'more.3', 'more.4' and 2 more. Nothing was"
    )
    refused(on_meta(Net), save(state), message)


def test_a_wrong_shape_is_told_with_both(save):
    state = {**Net().state_dict(), "a.weight": torch.ones(3, 4)}
    message = r"'a.weight' is float32\[3, 4\] in the file, and float32\[3, 2\] in the model"
    refused(on_meta(Net), save(state), message)


def test_a_wrong_dtype_is_told_with_both(save):
    state = {name: each.half() for name, each in Net().state_dict().items()}
    message = (
        r"'a.weight' is float16\[3, 2\] in the file, and float32\[3, 2\] in the model; 'a.bias'"
    )
    refused(on_meta(Net), save(state), message)


def test_many_troubles_are_cut_short_and_counted(save):
    state = {name: each.double() for name, each in Net().state_dict().items() if each.dim()}
    refused(on_meta(Net), save(state), r"does not fit Net: the file lacks .*; and 2 more. Nothing")


def test_a_buffer_that_no_file_holds_needs_its_values(save):
    def make():
        model = Net()
        model.register_buffer("rope", torch.ones(2), persistent=False)
        return model

    model, checkpoint = on_meta(make), save(Net().state_dict())
    message = (
        r"'rope' is a buffer that no file holds \(persistent=False\), and it is on meta: give it "
        "its values first"
    )
    refused(model, checkpoint, message)
    model.rope = torch.ones(2)
    with assigned(model, checkpoint):
        pass
    assert model.rope.tolist() == [1, 1]
