"""Which files hold a model's weights, and what is refused of them before anything is loaded."""

import gc
import importlib
import json
import os

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, load_paged

save_file = pytest.importorskip("safetensors.torch").save_file

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3),
    "halves": torch.ones(5, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7),
    "nothing": torch.empty(0, 4),
}
USUAL, INDEX = "model.safetensors", "model.safetensors.index.json"


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
    with pytest.raises(PagingError, match=message) as caught:
        load_paged(Holding(TENSORS), path, "cpu")
    return caught.value


@pytest.fixture
def path(tmp_path):
    path = tmp_path / USUAL
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def index(tmp_path):
    return sharded(tmp_path, TENSORS)


def sharded(folder, tensors, n_shards=2):
    """Shards as large models have them, and their index."""
    names = sorted(tensors)
    weight_map = {}
    for number in range(n_shards):
        shard = f"model-{number + 1}-of-{n_shards}.safetensors"
        part = {name: tensors[name] for name in names[number::n_shards]}
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = folder / INDEX
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def write_raw(path, header, n_bytes):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_bytes))
    return path


def test_a_file_may_be_named_by_a_path_by_text_or_by_its_folder(path):
    path.chmod(0o444)
    for each in (path, str(path), path.parent):
        assert_holds(each)


def test_an_index_may_be_named_by_itself_or_by_its_folder(index):
    assert_holds(index)
    assert_holds(index.parent)


def test_a_shard_may_hold_more_than_the_index_names(tmp_path):
    index = sharded(tmp_path, TENSORS, 1)
    index.write_text(json.dumps({"weight_map": {"weight": "model-1-of-1.safetensors"}}))
    assert_holds(index, {"weight": TENSORS["weight"]})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["diffusion_pytorch_model.safetensors"], 0),
        (["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"], 0),
        (["diffusion_pytorch_model.fp16.safetensors", "config.json"], 0),
        (["open_clip_model.safetensors", "pytorch_model.bin"], 0),
    ],
)
def test_the_usual_name_or_the_only_file_is_taken(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).touch()
    save_file(TENSORS, tmp_path / names[expected])
    assert_holds(tmp_path)


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("diffusion_pytorch_model.safetensors.index.json", "a.safetensors"),
        ("model.fp16.safetensors.index.json", "model.fp16-1-of-2.safetensors"),
        (INDEX, USUAL),
    ],
)
def test_of_a_folder_an_index_is_taken_before_a_file(tmp_path, name, shard):
    save_file(TENSORS, tmp_path / shard)
    (tmp_path / "b.safetensors").touch()
    (tmp_path / name).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, shard)}))
    assert_holds(tmp_path)


def test_several_files_of_other_names_are_named_and_none_is_taken(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.safetensors").touch()
    told = (
        r"is a folder with '0.safetensors', .* '5.safetensors' and 2 more in it, and which of them "
        r"is meant can't be told. Name one file, or an index of several\.$"
    )
    refused(tmp_path, told)
    for name in "ab":
        (tmp_path / f"{name}.safetensors.index.json").touch()
    refused(tmp_path, r"'a.safetensors.index.json', 'b.safetensors.index.json'")


def test_an_empty_folder_is_refused_and_a_pipeline_names_its_folders(tmp_path):
    told = (
        "is a folder with neither model.safetensors.index.json nor model.safetensors in it, nor "
        "another safetensors file.{} Name a safetensors file, or the index of several"
    )
    refused(tmp_path, told.format(""))
    for name in ("unet", "vae", "scheduler"):
        (tmp_path / name).mkdir()
    for name in ("unet", "vae"):
        (tmp_path / name / "diffusion_pytorch_model.safetensors").touch()
    refused(tmp_path, told.format(" There are such files in its folders 'unet', 'vae'."))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing.safetensors", "No such file or directory. Name a safetensors"),
        ("missing.json", "No such file or directory. Name a safetensors"),
        ("a\0b", "embedded"),
        ("a\0b.json", "embedded"),
    ],
)
def test_a_missing_file_is_refused(tmp_path, name, why):
    error = refused(tmp_path / name, rf"^The weights '.*' can't be read: {why}")
    assert isinstance(error.__cause__, OSError | ValueError)


def test_what_is_no_path_is_refused():
    refused(3, r"^weights=3: write the path of a safetensors file or")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_that_may_not_be_read_is_refused(path):
    path.chmod(0)
    refused(path, "can't be read: Permission denied")


@pytest.mark.parametrize("n_bytes", [0, 5, 100, -1])
def test_a_file_that_is_cut_short_is_refused(path, n_bytes):
    os.truncate(path, n_bytes if n_bytes >= 0 else path.stat().st_size - 1)
    refused(
        path,
        r"model.safetensors is no whole safetensors file \(.+\). It may be cut short or damaged: "
        "fetch or save it again",
    )


def test_a_file_of_another_kind_is_refused(path):
    path.write_bytes(b"PK\3\4 is what torch.save writes")
    refused(path, "no whole safetensors file")
    write_raw(path, {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 8)
    refused(path, "no whole safetensors file")


def test_a_dtype_that_torch_lacks_is_told_by_its_name(path):
    entry = {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}
    refused(write_raw(path, {"weight": entry}, 2), r"'weight' is F4\[4\] in the file, and float32")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path, "is no index of safetensors files: a JSON object with a")


def test_a_shard_that_lacks_what_the_index_promises_is_refused(index):
    save_file({"other": torch.ones(1)}, index.with_name("model-1-of-2.safetensors"))
    refused(
        index,
        r"model.safetensors.index.json says that model-1-of-2.safetensors holds 'flag', and it "
        "does not: index and files are not of one save",
    )


def test_a_missing_shard_is_refused(index):
    index.with_name("model-2-of-2.safetensors").unlink()
    refused(index, r"'.*model-2-of-2.safetensors' can't be read: No such")


def test_a_refusal_leaves_no_file_open(index):
    index.with_name("model-2-of-2.safetensors").write_bytes(b"")
    gc.collect()  # Files of tests before this one.
    n_files = len(os.listdir("/proc/self/fd"))
    refused(index, "model-2-of-2.safetensors is no whole safetensors file")
    gc.collect()  # The traceback of an error leads to what it failed with.
    assert len(os.listdir("/proc/self/fd")) == n_files


def test_without_the_library_it_is_named(path, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    refused(
        path,
        r"Reading model.safetensors takes safetensors and numpy \(No module named 'safetensors'\). "
        r"Install both with: pip install \"safetensors>=0.5\" numpy\.",
    )


@pytest.mark.parametrize("name", [USUAL, "index.json"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    refused(tmp_path / name, rf"{name}' can't be read: it is not a regular file\. Name")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pipe.safetensors", "it is not a regular file"),
        ("/dev/zero", "it is not a regular file"),
        ("a\0b", "embedded null"),
    ],
)
def test_an_index_that_names_what_is_no_file_is_refused(tmp_path, name, why):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": name}}))
    refused(tmp_path, rf"^The weights '.*' can't be read: {why}")
