"""Which files hold a model's weights, and what is refused of them before anything is loaded."""

import gc
import json
import os

import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from tenure.paging import PagingError, load_paged

from ..support import open_files

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3),
    "halves": torch.ones(5, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7),
    "nothing": torch.empty(0, 4),
}
USUAL, INDEX = "model.safetensors", "model.safetensors.index.json"
F4 = b'{"weight":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'


class Holding(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.zeros_like(tensor))


def assert_holds(path, tensors=TENSORS):
    model = Holding(tensors)
    with load_paged(model, path, "cpu"):
        for name, tensor in tensors.items():
            assert torch.equal(model.state_dict()[name], tensor)


def refused(path, message):
    with pytest.raises(PagingError, match=message):
        load_paged(Holding(TENSORS), path, "cpu")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / USUAL
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def test_files_and_indexes_are_named_by_a_path_by_text_or_by_their_folder(tmp_path, path):
    path.chmod(0o444)
    for each in (path, str(path), path.parent):
        assert_holds(each)
    index, weight_map = tmp_path / INDEX, {}
    for number in range(2):
        shard = f"model-{number + 1}-of-2.safetensors"
        part = {name: TENSORS[name] for name in sorted(TENSORS)[number::2]}
        save_file(part, tmp_path / shard)
        weight_map |= dict.fromkeys(part, shard)
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    assert_holds(index)
    path.unlink()
    assert_holds(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"],
        ["diffusion_pytorch_model.fp16.safetensors", "config.json"],
        ["open_clip_model.safetensors", "pytorch_model.bin"],
    ],
)
def test_the_usual_name_or_the_only_file_is_taken_if_there_is_no_index(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    save_file(TENSORS, tmp_path / names[0])
    assert_holds(tmp_path)
    (tmp_path / "b.safetensors").touch()
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": names[0]}}))  # the shard holds more
    assert_holds(tmp_path, {"weight": TENSORS["weight"]})


def saved_index(shard):
    """An index of two shards, and the files that there are of them."""
    weight_map = {"weight": "a.safetensors", "flag": "b.safetensors"}
    index = json.dumps({"weight_map": weight_map}).encode()
    whole = {"a.safetensors": save({"weight": TENSORS["weight"]})}
    return {INDEX: index, **whole, **({} if shard is None else {"b.safetensors": shard})}


NOTHING = (
    "is a folder with neither model.safetensors.index.json nor model.safetensors in it, nor "
    "another safetensors file.{} Name a safetensors file, or the index of several"
)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {f"{number}.safetensors": b"" for number in range(8)},
            "is a folder with '0.safetensors', .* '5.safetensors' and 2 more in it, and which of "
            r"them is meant can't be told. Name one file, or an index of several\.$",
        ),
        ({}, NOTHING.format("")),
        (
            {"unet/a.safetensors": b"", "vae/a.safetensors": b"", "scheduler/a.json": b""},
            NOTHING.format(" There are such files in its folders 'unet', 'vae'."),
        ),
        (
            {USUAL: save(TENSORS)[:-1]},
            r"model.safetensors is no whole safetensors file \(.+\). It may be cut short or "
            "damaged: fetch or save it again",
        ),
        ({USUAL: b"PK\3\4 is what torch.save writes"}, "no whole safetensors file"),
        (
            {USUAL: bytes([64, *[0] * 7]) + F4.ljust(64) + bytes(2)},
            r"'weight' is F4\[4\] in the file, and float32",
        ),
        ({INDEX: b""}, "is no index of safetensors files: a JSON object with a"),
        ({INDEX: b'{"weight_map": {"a": 1}}'}, "is no index of safetensors files: a JSON"),
        (
            saved_index(save({"other": torch.ones(1)})),
            "model.safetensors.index.json says that b.safetensors holds 'flag', and it "
            "does not: index and files are not of one save",
        ),
        (saved_index(None), r"'.*b.safetensors' can't be read: No such"),
        (saved_index(b""), "b.safetensors is no whole safetensors file"),
    ],
)
def test_what_holds_no_weights_is_refused_and_leaves_no_file_open(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    gc.collect()  # files of tests before this one
    n_files = open_files()
    refused(tmp_path, message)
    gc.collect()  # the traceback of an error leads to what it failed with
    assert open_files() == n_files


def test_a_path_of_no_file_is_refused_and_a_pipe_is_not_waited_for(tmp_path):
    refused(tmp_path / "missing", "^The weights '.*' can't be read: No such .* Name a safetensors")
    refused(tmp_path / "a\0b", "^The weights '.*' can't be read: embedded")
    refused(3, "^weights=3: write the path of a safetensors file or")
    os.mkfifo(tmp_path / "pipe.safetensors")
    told = r"pipe.safetensors' can't be read: it is not a regular file\. Name"
    refused(tmp_path / "pipe.safetensors", told)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": "pipe.safetensors"}}))
    refused(tmp_path / INDEX, told)
