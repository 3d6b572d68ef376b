import json
import os

import pytest
import torch

from tenure.paging import PagingError
from tenure.paging._checkpoint import _files as module
from tenure.paging._checkpoint._files import open_checkpoint

save_file = pytest.importorskip("safetensors.torch").save_file

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7),
    "nothing": torch.empty(0, 4),
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def sharded(folder, tensors, n_shards=2):
    """Shards as large models have them, and their index."""
    names = sorted(tensors)
    weight_map = {}
    for number in range(n_shards):
        shard = f"model-{number + 1}-of-{n_shards}.safetensors"
        part = {name: tensors[name] for name in names[number::n_shards]}
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def assert_holds(checkpoint, tensors):
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        view = checkpoint.tensors[name].view()
        assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
        assert view.equal(tensor)
    checkpoint.close()


def write_raw(path, header, n_bytes):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_bytes))


def test_every_tensor_of_a_file_is_found_where_it_lies(path):
    assert_holds(open_checkpoint(path), TENSORS)


def test_a_path_may_be_text(path):
    assert_holds(open_checkpoint(str(path)), TENSORS)


def test_the_tensors_of_all_shards_are_found(tmp_path):
    assert_holds(open_checkpoint(sharded(tmp_path, TENSORS)), TENSORS)


def test_a_folder_stands_for_the_file_in_it(path):
    assert_holds(open_checkpoint(path.parent), TENSORS)


def test_a_folder_stands_for_the_index_in_it(tmp_path):
    sharded(tmp_path, TENSORS)
    assert_holds(open_checkpoint(tmp_path), TENSORS)


def test_a_shard_may_hold_more_than_the_index_names(tmp_path):
    index = sharded(tmp_path, TENSORS, 1)
    kept = {"weight": "model-1-of-1.safetensors"}
    index.write_text(json.dumps({"weight_map": kept}))
    assert_holds(open_checkpoint(index), {"weight": TENSORS["weight"]})


def test_a_dtype_that_torch_lacks_keeps_its_name(tmp_path):
    path = tmp_path / "small.safetensors"
    write_raw(path, {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, 2)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["w"].dtype == "F4"
    checkpoint.close()


def test_an_empty_folder_is_refused(tmp_path):
    message = (
        "is a folder with neither model.safetensors.index.json nor model.safetensors in it, nor "
        "another safetensors file. Name a safetensors file, or the index of several"
    )
    with pytest.raises(PagingError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["missing.safetensors", "missing.json"])
def test_a_missing_file_is_refused(tmp_path, name):
    message = (
        rf"The weights '.*{name}' can't be read: No such file or directory. Name a safetensors"
    )
    with pytest.raises(PagingError, match=message) as caught:
        open_checkpoint(tmp_path / name)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("name", ["a\0b", "a\0b.json"])
def test_a_path_that_no_system_takes_is_refused(tmp_path, name):
    with pytest.raises(PagingError, match=r"^The weights '.*a.x00b.*' can't be read: embedded"):
        open_checkpoint(tmp_path / name)


def test_an_index_that_names_such_a_path_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "a\0b"}}))
    with pytest.raises(PagingError, match=r"^The weights '.*a.x00b' can't be read: embedded null"):
        open_checkpoint(index)


def test_what_is_no_path_is_refused():
    with pytest.raises(PagingError, match=r"^weights=3: write the path of a safetensors file or"):
        open_checkpoint(3)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_that_may_not_be_read_is_refused(path):
    path.chmod(0)
    with pytest.raises(PagingError, match="can't be read: Permission denied"):
        open_checkpoint(path)


def test_a_file_that_may_not_be_written_is_fine(path):
    path.chmod(0o444)
    assert_holds(open_checkpoint(path), TENSORS)


@pytest.mark.parametrize("n_bytes", [0, 5, 100, -1])
def test_a_file_that_is_cut_short_is_refused(path, n_bytes):
    os.truncate(path, n_bytes if n_bytes >= 0 else path.stat().st_size - 1)
    message = (
        r"model.safetensors is no whole safetensors file \(.+\). It may be cut short or damaged: "
        "fetch or save it again"
    )
    with pytest.raises(PagingError, match=message):
        open_checkpoint(path)


def test_a_file_of_another_kind_is_refused(path):
    path.write_bytes(b"PK\3\4 is what torch.save writes")
    with pytest.raises(PagingError, match="no whole safetensors file"):
        open_checkpoint(path)


def test_tensors_that_reach_past_the_file_are_refused(tmp_path):
    path = tmp_path / "wrong.safetensors"
    write_raw(path, {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 8)
    with pytest.raises(PagingError, match="no whole safetensors file"):
        open_checkpoint(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(PagingError, match="is no index of safetensors files: a JSON object with a"):
        open_checkpoint(index)


def test_a_missing_shard_is_refused(tmp_path):
    index = sharded(tmp_path, TENSORS)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(PagingError, match=r"'.*model-2-of-2.safetensors' can't be read: No such"):
        open_checkpoint(index)


def test_a_shard_that_lacks_what_the_index_promises_is_refused(tmp_path):
    index = sharded(tmp_path, TENSORS)
    save_file({"other": torch.ones(1)}, tmp_path / "model-1-of-2.safetensors")
    message = (
        r"model.safetensors.index.json says that model-1-of-2.safetensors holds 'flag', and it "
        "does not: index and files are not of one save"
    )
    with pytest.raises(PagingError, match=message):
        open_checkpoint(index)


def test_without_the_library_it_is_named(path, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", absent)
    message = (
        r"Reading model.safetensors takes safetensors and numpy \(No module named 'safetensors'\). "
        r"Install both with: pip install \"safetensors>=0.5\" numpy\."
    )
    with pytest.raises(PagingError, match=message):
        open_checkpoint(path)


def test_a_refusal_leaves_no_file_open(tmp_path):
    index = sharded(tmp_path, TENSORS)
    (tmp_path / "model-2-of-2.safetensors").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PagingError):
        open_checkpoint(index)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["model.safetensors", "index.json"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(
        PagingError, match=rf"{name}' can't be read: it is not a regular file\. Name"
    ):
        open_checkpoint(tmp_path / name)


def test_an_index_that_names_a_pipe_or_a_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("pipe.safetensors", "/dev/zero"):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"weight": name}}))
        with pytest.raises(PagingError, match="can't be read: it is not a regular file"):
            open_checkpoint(index)
