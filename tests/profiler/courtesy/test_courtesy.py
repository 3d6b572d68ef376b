import gc
import warnings

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing import reductions
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import tenure
from tenure.profiler import AwayTensorError, Courtesy, CourtesyError, CourtesyWarning
from tests.small_heap import hide
from tests.testing.machine import library_pool


@pytest.fixture(autouse=True)
def _no_garbage():
    """Let earlier tests' tensors go: a Courtesy moves all that are alive."""
    gc.collect()
    hide()  # also what the first use of the device has imported


def bits(t):
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()


def portrait(t):
    """Everything about a tensor that must be the same afterwards."""
    storage = t.untyped_storage()
    return (
        type(t), id(t), tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device,
        t._version, t.requires_grad, t.is_leaf, id(t.grad_fn), id(t._base), dict(vars(t)),
        id(storage), storage._cdata, storage.nbytes(), bits(t),
    )  # fmt: skip


def net(device, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(
        device, dtype
    )


def batch(device):
    return torch.arange(20, dtype=torch.float64).reshape(5, 4).div(7).to(device)


@pytest.fixture
def trained(sim):
    """A model with gradients, buffers and the state of an optimizer."""
    model = net(sim.device)
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(sim.device)).pow(2).sum().backward()
    optimizer.step()
    return model, optimizer


# --- what is away, and what comes back


def test_the_device_is_empty_inside_and_everything_is_as_it_was_afterwards(sim, trained):
    model, optimizer = trained
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    before = [portrait(t) for t in tensors]
    resting_bytes = sim.requested_bytes
    with Courtesy() as courtesy:
        assert sim.allocated_bytes == 0
        assert courtesy.away_bytes == courtesy.report.moved_bytes == resting_bytes
    assert courtesy.away_bytes == 0
    assert sim.requested_bytes == resting_bytes
    assert [portrait(t) for t in tensors] == before


# --- graphs


GRAPHS = {
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False).exp().sum(),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=True).exp().sum(),
    "saved on the host": lambda model, x: saved_on_host(model, x),
    "custom function": lambda model, x: Squared.apply(model(x)).sum(),
}


def saved_on_host(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x).exp().sum()


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.twice = {"two": x * 2}
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x + ctx.twice["two"] / 2)


def gradients(model, x, graph, between):
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = graph(model, x)
    del graph
    between()
    loss.backward()
    return [p.grad.cpu() for p in (*model.parameters(), x) if p.grad is not None]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_from_before_gives_the_same_gradients_afterwards(sim, name):
    def lend():
        with Courtesy() as courtesy:
            assert not courtesy.report.stays, str(courtesy.report)
            assert sim.allocated_bytes == 0

    model, x = net(sim.device), batch(sim.device)
    plain = gradients(model, x, GRAPHS[name], lambda: None)
    lent = gradients(model, x, GRAPHS[name], lend)
    assert len(plain) == len(lent) > 0
    assert all(map(torch.equal, plain, lent))


# --- meanwhile


USES = {
    "add": lambda t: t + 1,
    "data": lambda t: t.data,
    "pickle": lambda t: t.__reduce_ex__(2),
    "list": lambda t: torch.stack([t, t]),
    "out": lambda t: torch.add(torch.ones(4), 1, out=t),
    "backward": lambda t: torch.autograd.backward([t], [torch.ones(4)]),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_meanwhile_is_refused_by_name(sim, use):
    t = torch.ones(4, device=sim.device, requires_grad=True)
    with Courtesy() as courtesy:
        with pytest.raises(
            AwayTensorError,
            match=r"\(\) got float32\[4\] on sim:0, 16 B, which a Courtesy moved to host memory\. "
            r"Leave|^\.(data|__get__|is_nested) got float32\[4\] on sim:0",
        ) as caught:
            USES[use](t)
        assert caught.value.courtesy is courtesy
    assert (t + 1).tolist() == [2, 2, 2, 2]


def test_what_a_tensor_is_can_be_asked_meanwhile(sim):
    t = nn.Parameter(torch.ones(2, 3, device=sim.device))
    t.sum().backward()
    with Courtesy():
        assert (t.shape, t.dtype, t.device, t.size(1)) == ((2, 3), torch.float32, sim.device, 3)
        assert (t.requires_grad, t.is_leaf, t.grad_fn, t._version) == (True, True, None, 0)
        assert isinstance(t, nn.Parameter)
        shown = "<AwayTensor float32[2, 3] on sim:0, 24 B, which a Courtesy moved to host memory>"
        assert repr(t) == f"{t}" == shown
        assert type(t.grad).__name__ == "AwayTensor"
    assert type(t) is nn.Parameter


def test_a_backward_pass_meanwhile_is_refused_before_it_reads(sim):
    w = torch.ones(4, device=sim.device, requires_grad=True)
    loss = (w * w).sum().cpu()
    on_host = loss * 2
    with Courtesy() as courtesy:
        with pytest.raises(AwayTensorError, match=r"^mul\(\) got"):
            (w * w).sum().backward()
        with pytest.raises(
            AwayTensorError,
            match=r"^backward\(\) came to MulBackward0, which saved a tensor of 16 B on sim:0 that",
        ) as caught:
            on_host.backward(retain_graph=True)
        assert caught.value.courtesy is courtesy
    assert w.grad is None


def test_what_dies_or_is_disposed_meanwhile_frees_its_host_memory_and_is_not_brought_back(sim):
    x, y, z = (torch.ones(256, device=sim.device) for _ in range(3))
    y.requires_grad_().sum().backward()
    with Courtesy() as courtesy:
        assert courtesy.away_bytes == 4096
        del x
        assert courtesy.away_bytes == 3072
        tenure.dispose(z)
        assert courtesy.away_bytes == 2048
        y.grad = None
        assert courtesy.away_bytes == 1024
    assert sim.allocated_bytes == 1024
    assert y.sum() == 256
    with pytest.raises(tenure.DisposedTensorError):
        z + 1


# --- failures


def test_a_host_without_room_is_named_and_nothing_is_moved(sim, monkeypatch):
    x = torch.ones(4, device=sim.device)
    available = psutil.virtual_memory()._replace(available=15)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    with (
        pytest.raises(
            CourtesyError,
            match=r"^16 B on sim:0 don't fit in the memory of the host: 15 B are free\. Nothing",
        ),
        Courtesy(),
    ):
        pytest.fail("the block must not begin")
    assert (x + 1).tolist() == [2, 2, 2, 2]


def test_an_interrupt_while_leaving_brings_back_what_had_left(sim, monkeypatch):
    tensors = [torch.full((4,), float(i), device=sim.device) for i in range(3)]
    resize, emptied = torch.UntypedStorage.resize_, []

    def interrupt(storage, n_bytes):
        if storage.nbytes() and not n_bytes:
            emptied.append(storage)
            if len(emptied) == 2:
                raise KeyboardInterrupt
        return resize(storage, n_bytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", interrupt)
    courtesy = Courtesy()
    with pytest.raises(KeyboardInterrupt):
        courtesy.yield_memory()
    assert courtesy.away_bytes == 0
    emptied.clear()
    assert [t.tolist() for t in tensors] == [[float(i)] * 4 for i in range(3)]


def test_an_error_of_the_block_is_not_masked_by_a_device_without_room(sim):
    sim(budget="18MiB")  # and a number more while it sums up
    x = torch.ones(16 << 18, device=sim.device)
    courtesy, others = Courtesy(), []

    def block():
        with courtesy:
            others.append(torch.empty(16 << 18, device=sim.device))
            raise KeyError

    with pytest.raises(KeyError) as caught:
        block()
    assert caught.value.__notes__ == [
        "sim:0 has no memory for 16.0 MiB that belong there. They are safe in host memory. Make "
        "room, then call restore() on the Courtesy again: it is the attribute courtesy of a "
        "CourtesyError, as any use of these tensors raises one."
    ]
    others.clear()
    with pytest.raises(AwayTensorError) as away:
        x.sum()
    away.value.courtesy.restore()
    assert x.sum() == len(x)


# --- several at once


def test_one_courtesy_is_not_used_inside_itself(sim):
    x = torch.ones(4, device=sim.device)
    courtesy = Courtesy()
    with (
        courtesy,
        pytest.raises(
            CourtesyError,
            match=r"^<Courtesy of every accelerator, 16 B away> has moved that already, and the",
        ),
        courtesy,
    ):
        pytest.fail("the inner block must not begin")
    assert x.sum() == 4


# --- streams


def test_memory_of_a_side_stream_stays(sim):
    side = sim.module.Stream()
    with sim.module.stream(side):
        x = torch.ones(4, device=sim.device)
    y = torch.ones(8, device=sim.device)
    courtesy = Courtesy()
    with pytest.warns(CourtesyWarning, match="allocated on a side stream"):
        courtesy.yield_memory()
    assert (x + 1).tolist() == [2, 2, 2, 2]
    assert courtesy.report.moved_bytes == y.nbytes
    courtesy.restore()
    with sim.module.stream(side):
        x.mul_(2)
        del x  # its memory goes back to the side stream: no race
    assert y.sum() == 8


# --- what stays


def test_what_another_library_holds_stays_and_is_named_in_a_report_that_reads_as_a_whole(sim):
    x = torch.ones(4, device=sim.device)
    y, courtesy = torch.ones(512, device=sim.device), Courtesy()
    view = y[1:]
    exported = torch.utils.dlpack.to_dlpack(x)
    with pytest.warns(
        CourtesyWarning,
        match=r"^16 B could not be moved to host memory: float32\[4\] on sim:0, 16 B: something in "
        r"C\+\+ that can't be seen uses it too, such as another library by DLPack, .*\. The report",
    ) as caught:
        courtesy.yield_memory()
    assert caught[0].filename == __file__
    assert sim.requested_bytes == 16
    assert (x + 1).tolist() == [2, 2, 2, 2]
    (stay,) = courtesy.report.stays
    assert (stay.text, stay.n_bytes) == ("float32[4] on sim:0, 16 B", 16)
    assert courtesy.report.text(width=300) == (
        "Courtesy moved 2.0 KiB to host memory (1 storage, 2 tensors).\n"
        "16 B stay where they are:\n"
        "  float32[4] on sim:0, 16 B: something in C++ that can't be seen uses it too, such as "
        "another library by DLPack, an operation that is running, the graph of a change to a "
        "view, or a sparse tensor"
    )
    assert "Courtesy moved 2.0 KiB" in courtesy.report._repr_html_()
    assert "can&#x27;t" in courtesy.report._repr_html_()
    courtesy.restore()
    assert view.sum() == 511
    del exported


def staying(sim):
    """The reasons of what stays, quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CourtesyWarning)
        with Courtesy() as courtesy:
            return {stay.text: stay.reason for stay in courtesy.report.stays}


def changed_view(device):
    w = torch.ones(3, device=device, requires_grad=True)
    y = w * 2
    y[0] *= w[1]
    return y


KINDS = {
    "views of a parameter": lambda d: [p := nn.Parameter(torch.ones(4, device=d)), p[1:], p.data],
    "node": lambda d: (nn.Parameter(torch.ones(4, device=d)) * torch.ones(4, device=d)).grad_fn,
    "storage": lambda d: torch.ones(4, device=d).untyped_storage(),
    "inference": lambda d: torch.inference_mode()(lambda: torch.ones(3, device=d) * 2)(),
    "a change to a view": changed_view,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_owner_of_every_kind_is_seen_but_those_of_cpp(sim, kind):
    made = KINDS[kind](sim.device)
    reasons = staying(sim).values()
    assert bool(reasons) == (kind == "a change to a view")
    assert all("the graph of a change to a view" in reason for reason in reasons)
    del made


def test_memory_that_cannot_be_resized_or_is_shared_with_another_process_stays(sim, monkeypatch):
    x = torch.ones(4, device=sim.device)
    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resizable", lambda _: False)
        assert list(staying(sim).values()) == ["its memory belongs to somebody else than torch"]
    assert x.sum() == 4
    reference = reductions.StorageWeakRef(x.untyped_storage())
    monkeypatch.setattr(reductions, "shared_cache", {"a handle": reference})
    assert list(staying(sim).values()) == ["it is shared with another process"]


def test_nothing_is_copied_from_a_device_whose_storages_cannot_be_emptied(sim, monkeypatch):
    """As on MPS, where torch has no way to resize a storage in place."""

    def refuse(storage, n_bytes):
        raise RuntimeError(f"UntypedStorage.resize_: got unexpected device type {storage.device}")

    x = torch.ones(4, device=sim.device)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", refuse)
    with pytest.raises(CourtesyError, match=r"^torch can't empty a storage of sim:0, and fill it"):
        Courtesy().yield_memory()
    assert sim.copied_bytes("d2h") == 0
    assert x.sum() == 4


def test_a_subclass_moves_with_its_attributes_and_a_wrapper_as_often_as_its_parts_do(sim):
    class Named(torch.Tensor):
        pass

    x = torch.Tensor._make_subclass(Named, torch.ones(4, device=sim.device))
    x.name_of_it = "x"
    wrapper = TwoTensor(torch.ones(4, device=sim.device), torch.zeros(4, device=sim.device))
    for _ in range(2):
        with Courtesy() as courtesy:
            assert sim.allocated_bytes == 0
            assert courtesy.report.n_storages == 3
            assert x.name_of_it == "x"
            with pytest.raises(AwayTensorError):
                wrapper + 1
    assert wrapper.a.tolist() == [1] * 4
    assert wrapper.b.tolist() == [0] * 4
    assert (type(x), vars(x)) == (Named, {"name_of_it": "x"})


def test_modes_of_the_program_see_nothing_of_it(sim):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"saw {func}")

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"saw {func}")

    x = torch.ones(4, device=sim.device)
    with Functions(), Operations(), torch.inference_mode(), Courtesy():
        assert sim.allocated_bytes == 0
    assert (x + 1).tolist() == [2, 2, 2, 2]
    assert not x.is_inference()


# --- what CUDA asks for beside tensors


BREAKS = r"^A graph is being captured on sim(:0)?\. A copy or a wait would end the capture with an "


@pytest.mark.parametrize("device", [None, "sim:0"])
def test_nothing_is_moved_or_brought_back_while_a_graph_is_captured(captures, device):
    module, courtesy = captures.module, Courtesy(device)
    x = torch.ones(4, device=captures.device)
    with module.graph(module.CUDAGraph()):
        with pytest.raises(CourtesyError, match=BREAKS + ".*nothing was moved to host") as raised:
            courtesy.yield_memory()
        assert raised.value.courtesy is courtesy
        assert courtesy.away_bytes == 0
    assert x.sum() == 4
    courtesy.yield_memory()
    with module.graph(module.CUDAGraph()):
        with pytest.raises(CourtesyError, match=BREAKS + ".*nothing was brought back"):
            courtesy.restore()
        assert courtesy.away_bytes == 16
    courtesy.restore()
    assert x.sum() == 4


def test_nothing_moves_under_a_captured_graph(captures):
    x, graph = torch.ones(4, device=captures.device), captures.module.CUDAGraph()
    graph.itself = graph  # the collector must know it
    with pytest.raises(CourtesyError, match=r"^A live CUDAGraph replays on the addresses of sim:0"):
        Courtesy().yield_memory()
    assert x.sum() == 4
    del graph


def test_the_weights_that_autocast_has_cast_are_let_go(sim):
    layer = torch.nn.Linear(64, 64, bias=False).to(sim.device)
    x = torch.ones(2, 64, device=sim.device)
    with torch.autocast("sim", dtype=torch.bfloat16):
        expected = layer(x).detach().cpu()
        with Courtesy():
            assert sim.allocated_bytes == 0
        assert layer(x).detach().cpu().equal(expected)


def test_the_workspaces_of_libraries_go_before_the_cache_is_emptied(sim, monkeypatch):
    sim(allocator="cuda")
    pool, x = library_pool(), torch.ones(4, device=sim.device)
    workspaces = [pool.allocate(8 << 20, 0.0)]
    monkeypatch.setattr(
        "tenure.profiler._courtesy._courtesy.clear_workspaces",
        lambda device: pool.free(workspaces.pop()) if device == sim.device else None,
    )
    with Courtesy():
        assert sim.module.memory_reserved() == 0
        assert not workspaces
    assert x.sum() == 4


def test_what_is_no_device_is_refused_by_name():
    message = (
        r"^'foo' is no device that torch knows here, so nothing can leave it\. Name one as "
        r'torch does, such as "cuda" or "cuda:1"; without any, all accelerators are meant\.$'
    )
    with pytest.raises(CourtesyError, match=message):
        Courtesy("foo")


OPERATIONS = st.sampled_from(["make", "view", "drop", "write", "yield", "restore", "starve"])


def run_step(sim, operation, n, pairs, courtesies):
    """Do one thing with tensors of the device, each beside a twin on the host that shares alike."""
    courtesy = courtesies[n % len(courtesies)]
    t, twin = pairs[n % len(pairs)] if pairs else (None, None)
    match operation:
        case "make":
            made = torch.arange(2.0 * n, 2.0 * n + 6)
            pairs.append((made.to(sim.device), made))
        case "view" if pairs and is_away(t):
            with pytest.raises(AwayTensorError):
                t[1:]
        case "view" if pairs:
            pairs.append((t[1:], twin[1:]))
        case "drop" if pairs:
            pairs.pop(n % len(pairs))
        case "write" if pairs and not is_away(t):
            t.add_(1)
            twin.add_(1)
        case "yield":
            courtesy.yield_memory()
        case "restore":
            courtesy.restore()
            assert courtesy.away_bytes == 0
        case "starve" if courtesy.away_bytes:
            sim.fail_at(1)
            with pytest.raises(CourtesyError, match="no memory"):
                courtesy.restore()


def is_away(t):
    return type(t) is not torch.Tensor


def check(sim, pairs, courtesies):
    away_bytes = sum(courtesy.away_bytes for courtesy in courtesies)
    storages = {twin.untyped_storage()._cdata: twin.untyped_storage() for _, twin in pairs}
    assert sim.requested_bytes + away_bytes == sum(each.nbytes() for each in storages.values())
    for t, twin in pairs:
        assert is_away(t) or torch.equal(t.cpu(), twin)
        assert (t.stride(), t.storage_offset()) == (twin.stride(), twin.storage_offset())


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(program=st.lists(st.tuples(OPERATIONS, st.integers(0, 7)), max_size=25))
def test_no_program_loses_a_byte_or_holds_one_twice(sim, program):
    sim()
    pairs, courtesies = [], [Courtesy() for _ in range(3)]
    for operation, n in program:
        run_step(sim, operation, n, pairs, courtesies)
        check(sim, pairs, courtesies)
    for courtesy in courtesies:
        courtesy.restore()
    check(sim, pairs, courtesies)
    assert not any(is_away(t) for t, _ in pairs)
