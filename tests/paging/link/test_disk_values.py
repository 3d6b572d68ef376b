"""What is written to a model over a file is used and kept, and never reaches the file."""

import copy
import os

import pytest
import torch

from tenure.paging import PagingError, load_paged, page

from ..models import WIDTH, linears, mlp, resnet
from ..support import assert_equal, on_meta, saved

pytestmark = pytest.mark.usefixtures("without_gradients")

X = torch.ones(4, WIDTH)


@pytest.fixture(params=["load_paged", "page"])
def paged(request, tmp_path):
    """Pages a model from a file; the file, where it is the user's, must stay as it is."""
    contents = {}

    def paged(model, **options):
        if request.param == "page":
            return page(model, "cpu", host=tmp_path, **options)
        path = saved(model, tmp_path / "m.safetensors")
        contents[path] = path.read_bytes()
        return load_paged(model, path, "cpu", **options)

    yield paged
    for path, content in contents.items():
        assert path.read_bytes() == content


def test_a_write_through_an_old_alias_counts_when_the_weight_passes_again(paged):
    """Neither a version nor the model sees it: the kernel does."""
    model = mlp()
    plain = copy.deepcopy(model)
    with paged(model, budget="8KiB") as handle:
        alias = model[0].weight.data
        model(X)
        handle._pager.engine._link.finish()
        model(X)  # all that was read ahead before the write is used up where nothing is read ahead
        alias[3:5] = 7
        plain[0].weight[3:5] = 7
        model(X)
        assert_equal(model(X), plain(X))


def test_statistics_of_a_training_pass_are_kept(paged):
    model, x = resnet(), torch.randn(2, 3, 6, 6)
    plain = copy.deepcopy(model)
    handle = paged(model, budget="24KiB")
    for trains in (True, True, True, False):
        for each in (model, plain):
            each.train(trains)
        assert_equal(model(x), plain(x))
    handle.unpage()
    assert_equal(model.state_dict(), plain.state_dict())


def test_a_weight_that_is_given_data_of_another_layout_is_refused(paged):
    model = mlp()
    plain = copy.deepcopy(model)
    plain[0].weight.zero_()
    handle = paged(model, budget="8KiB")
    model[0].weight.data = torch.zeros(WIDTH, 2 * WIDTH)[:, ::2]
    with pytest.raises(PagingError, match=r"'0.weight' was given other .* not laid out as its own"):
        model(X)
    handle.unpage()
    assert_equal(model(X), plain(X))


def in_parts(monkeypatch):
    """A disk that reads a thousand bytes at a time."""
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:1000]], at))


def untold(monkeypatch):
    """A system that does not tell which pages were written, as any other than Linux."""
    monkeypatch.setattr("tenure.paging._files.tells_written", lambda: False)


@pytest.mark.parametrize("system", [lambda monkeypatch: None, in_parts, untold])
def test_a_pass_has_the_values_of_the_file_and_those_written_since(system, tmp_path, monkeypatch):
    system(monkeypatch)
    # larger than pages of memory, in the middle of which they begin
    plain = linears(3, 70)
    path, x = saved(plain, tmp_path / "model.safetensors"), torch.randn(3, 70)
    content, model = path.read_bytes(), on_meta(lambda: linears(3, 70))
    generator = torch.Generator().manual_seed(0)
    with load_paged(model, path, "cpu", budget="48KiB") as handle:
        assert handle.plan.ring_bytes
        for _ in range(12):
            for _ in range(2):
                assert torch.equal(model(x), plain(x))
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                at = torch.randint(ours.numel(), (1,), generator=generator).item()
                ours.view(-1)[at] = theirs.view(-1)[at] = 7.0
    assert path.read_bytes() == content
    path.unlink()
    # each has a storage of its own, which outlives the file
    assert torch.equal(model(x), plain(x))
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in model.parameters())
