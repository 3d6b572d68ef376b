import errno
import gc
import itertools
import os
import textwrap
from pathlib import Path

import pytest
import torch

from tenure.paging import PagingError, page, plan_paging

from ...programs import run_program
from ..models import mlp
from ..test_zoo import assert_equal

X = torch.ones(4, 32)


def open_files(folder):
    """How many files in a folder this process holds open or mapped, named or not."""
    with open("/proc/self/maps") as maps:
        mapped = sum(str(folder) in line for line in maps)
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return mapped + sum(str(folder) in os.readlink(each) for each in links if os.path.islink(each))


def computed(model):
    with torch.no_grad():
        return model(X)


def state_of(model):
    return {name: each.clone() for name, each in model.state_dict().items()}


def in_another_process(code, **environment):
    return run_program(textwrap.dedent(code), **environment)


def test_the_folder_is_made_and_nothing_is_ever_seen_in_it(tmp_path):
    folder, model = tmp_path / "deep" / "down", mlp()
    expected = computed(model)
    with page(model, "cpu", host=folder):
        assert os.listdir(folder) == []
        assert_equal(computed(model), expected)
    assert os.listdir(folder) == []


def test_the_file_goes_with_the_model(tmp_path):
    model = mlp()
    expected = computed(model)
    handle = page(model, "cpu", host=tmp_path)
    assert open_files(tmp_path) > 0
    handle.unpage()
    assert_equal(computed(model), expected)
    del model, handle
    gc.collect()
    assert open_files(tmp_path) == 0


def test_a_model_that_is_let_go_of_while_paged_leaves_nothing_open(tmp_path):
    page(mlp(), "cpu", host=tmp_path)
    gc.collect()
    assert open_files(tmp_path) == 0


def test_a_block_that_raises_leaves_nothing_and_the_model_whole(tmp_path):
    model = mlp()
    expected = computed(model)
    with pytest.raises(KeyError), page(model, "cpu", host=tmp_path):
        raise KeyError
    assert_equal(computed(model), expected)
    assert os.listdir(tmp_path) == []


def test_models_share_a_folder_and_neither_sees_the_other(tmp_path):
    models = [mlp() for _ in range(3)]
    expected = [computed(model) for model in models]
    handles = [page(model, "cpu", host=tmp_path) for model in models]
    for _ in range(2):
        for model, output in zip(models, expected, strict=True):
            assert_equal(computed(model), output)
    handles[0].unpage()
    assert_equal([computed(model) for model in models], expected)


def test_what_others_keep_in_the_folder_stays(tmp_path):
    (tmp_path / "model.safetensors").write_text("precious")
    with page(mlp(), "cpu", host=tmp_path):
        pass
    assert (tmp_path / "model.safetensors").read_text() == "precious"


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_nothing(tmp_path):
    done = in_another_process(
        """
        import os, pathlib, signal, torch
        from torch import nn
        from tenure.paging import page
        handle = page(nn.Linear(64, 64), "cpu", host=pathlib.Path(os.environ["FOLDER"]))
        print("paged", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        FOLDER=str(tmp_path),
    )
    assert (done.returncode, done.stdout) == (-9, "paged\n"), done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_forked_process_computes_too_and_its_end_is_not_the_parents(tmp_path):
    done = in_another_process(
        """
        import os, pathlib, torch
        from torch import nn
        from tenure.paging import page
        torch.set_num_threads(1)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        x = torch.ones(2, 64)
        folder = pathlib.Path(os.environ["FOLDER"])
        with torch.no_grad(), page(model, "cpu", budget="64KiB", host=folder):
            expected = model(x)
            model(x)
            child = os.fork()
            if not child:
                raise SystemExit(0 if model(x).equal(expected) else 1)
            _, status = os.waitpid(child, 0)
            assert model(x).equal(expected)
        print("child", os.waitstatus_to_exitcode(status))
        """,
        FOLDER=str(tmp_path),
    )
    assert (done.returncode, done.stdout) == (0, "child 0\n"), done.stderr


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    path, model = tmp_path / "file", mlp()
    path.write_text("mine")
    message = (
        r"No file can be made in host='.*file': File exists. The model is as before. Name a folder "
        "that this process may write to"
    )
    with pytest.raises(PagingError, match=message):
        page(model, "cpu", host=path)
    with pytest.raises(PagingError, match="Not a directory"):
        page(model, "cpu", host=path / "below")
    assert path.read_text() == "mine"
    page(model, "cpu", host=tmp_path).unpage()


def test_a_path_that_no_system_takes_is_refused():
    model = mlp()
    reason = "(mkdir: )?embedded null (byte|character in path)"
    message = rf"No file can be made in host='a.x00b': {reason}\. The model is as before"
    with pytest.raises(PagingError, match=message):
        page(model, "cpu", host=Path("a\0b"))


@pytest.mark.slow
def test_a_full_disk_leaves_the_model_in_memory(tmp_path):
    done = in_another_process(
        """
        import os, pathlib, resource, torch
        from torch import nn
        from tenure.paging import page, PagingError
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        before = [(p.data_ptr(), p.clone()) for p in model.parameters()]
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            page(model, "cpu", host=pathlib.Path(os.environ["FOLDER"]))
        except PagingError as error:
            print(error)
        for p, (address, value) in zip(model.parameters(), before, strict=True):
            assert p.data_ptr() == address and p.equal(value)
        print(model(torch.ones(1, 64)).shape, os.listdir(os.environ["FOLDER"]))
        """,
        FOLDER=str(tmp_path),
    )
    said, *rest = done.stdout.splitlines()
    assert "of Sequential could not be written to host=" in said, done.stderr
    assert "File too large;" in said
    assert "are free there. The model is as before, and the file is gone. Free space, or" in said
    assert rest == ["torch.Size([1, 64]) []"]


def test_a_disk_that_fills_up_while_it_is_written_leaves_the_model_in_memory(tmp_path, monkeypatch):
    model = mlp()
    before = [each.data_ptr() for each in model.parameters()]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tenure.paging._files._write", full)
    with pytest.raises(PagingError, match=r"27.0 KiB of Sequential .*: No space left on device; "):
        page(model, "cpu", host=tmp_path)
    assert [each.data_ptr() for each in model.parameters()] == before
    assert open_files(tmp_path) == 0


def test_memory_is_let_go_of_while_paged(tmp_path):
    model = mlp()
    storages = [each.untyped_storage()._weak_ref() for each in model.parameters()]
    with page(model, "cpu", budget="8KiB", host=tmp_path):
        assert all(torch.UntypedStorage._expired(each) for each in storages)


def test_the_host_may_be_text_that_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for host in (f"{tmp_path}/new", "./here", "there"):
        with page(mlp(), "cpu", host=host) as handle:
            assert handle.plan.device == "cpu"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "new", "there"]


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("pined", r"""host='pined': .*, or the path of a folder, such as host='./pined'\.$"""),
        (" ", r"""host=' ': write host="pinned", host="pageable", or the path"""),
        (None, "host=None: write"),
        (1, "host=1: write"),
    ],
)
def test_a_word_that_is_no_path_is_refused_and_no_folder_is_made(
    tmp_path, monkeypatch, host, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PagingError, match=message):
        page(mlp(), "cpu", host=host)
    assert not list(tmp_path.iterdir())


def test_a_plan_takes_the_path_of_weights_as_text_or_path():
    for host in ("model.safetensors", Path("model.safetensors")):
        assert plan_paging(mlp(), "cpu", host=host).device == "cpu"
    with pytest.raises(PagingError, match=r"a folder, or the path of the weights, such as host="):
        plan_paging(mlp(), "cpu", host="weights")


def test_the_cpu_needs_a_folder_and_does_not_train():
    folder = r", or 'cpu' with a folder: host=Path\(\.\.\.\)\.$"
    with pytest.raises(PagingError, match=f"Name an accelerator, such as 'cuda'{folder}"):
        page(mlp(), "cpu")
    with pytest.raises(
        PagingError, match=f"no 'xpu' device here .* Name one that is there{folder}"
    ):
        page(mlp(), "xpu")
    for ask, host in itertools.product((page, plan_paging), ("pinned", "./folder")):
        with pytest.raises(PagingError, match=r"^training=True and 'cpu': .* such as 'cuda', and"):
            ask(mlp(), "cpu", training=True, host=host)
    with pytest.raises(PagingError, match=r"^training=True and host='folder': a backward pass"):
        page(mlp(), "cuda", training=True, host="./folder")
