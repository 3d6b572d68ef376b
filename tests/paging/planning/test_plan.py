import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from tenure import ByteSizeError
from tenure.paging import PagingError, page, plan_paging

from ..models import TiedLanguageModel, linears, mlp


@pytest.fixture
def model():
    return linears(6, 256, bias=False)


def test_a_plan_is_printable_before_anything_runs(sim, model):
    plan = plan_paging(model, sim.device, "256KiB", budget="1MiB", compute_s=2e-5)
    assert sim.n_allocations == 0
    assert str(plan) == (
        "Sequential on sim:0: 1.5 MiB in 6 units, within 1.0 MiB (at least 256.0 KiB)\n"
        "  stays   512.0 KiB in 2 units\n"
        "  passes  1.0 MiB in 4 units, through a ring of 512.0 KiB\n"
        "  a pass  takes 0.044 ms at the least, and 0.164 ms by this plan, at 24.0 GB/s\n"
        "  takes   1.0 MiB of sim:0, in 2.0 MiB that its allocator reserves\n"
        "    0   256.0 KiB  stays\n"
        "    1   256.0 KiB  passes\n"
        "    2   256.0 KiB  passes\n"
        "    3   256.0 KiB  passes\n"
        "    4   256.0 KiB  stays\n"
        "    5   256.0 KiB  passes"
    )


def test_what_stays_is_evenly_spread(sim):
    plan = plan_paging(linears(16, 512, bias=False), sim.device, "1MiB", budget="10MiB")
    stays = [number for number, unit in enumerate(plan.units) if unit.resident]
    gaps = {b - a for a, b in pairwise(stays)}
    assert len(stays) == 8
    assert gaps <= {1, 2, 3}


@pytest.mark.parametrize("make", [mlp, TiedLanguageModel])
def test_an_impossible_budget_is_refused_and_the_named_minimum_is_tight(sim, make):
    names = [name for name, _ in make().named_children()]
    for keep in ([], names[:1], names):
        told = r"^\w+ can't be paged within 1 B: the least is .*needed at once.* larger budget\.$"
        with pytest.raises(PagingError, match=told) as caught:
            page(make(), sim.device, budget=1, keep=keep)
        minimum_bytes = caught.value.minimum_bytes
        assert sim.n_allocations == 0
        plan = plan_paging(make(), sim.device, budget=minimum_bytes, keep=keep)
        assert plan.allocated_bytes == plan.minimum_bytes == minimum_bytes
        with pytest.raises(PagingError, match="can't be paged within"):
            plan_paging(make(), sim.device, budget=minimum_bytes - 1, keep=keep)


def test_kept_modules_stay_and_everything_where_everything_fits(sim, model):
    plan = plan_paging(model, sim.device, budget="768KiB", keep=["3"])
    assert [unit.resident for unit in plan.units if unit.name == "3"] == [True]
    plan = plan_paging(model, sim.device, budget="2MiB")
    assert plan.ring_bytes == 0
    assert plan.allocated_bytes == plan.weight_bytes == 6 * 256 * 1024


def test_without_a_budget_a_plan_keeps_the_link_busy_and_a_share_is_of_what_is_free(sim, model):
    plan = plan_paging(model, sim.device, "256KiB")
    assert plan.ring_bytes == plan.allocated_bytes == plan.budget_bytes == 4 * 256 * 1024
    sim(budget="2MiB")
    assert plan_paging(model, sim.device, budget="50%").budget_bytes == 1024 * 1024


def test_max_layer_size_is_in_parameters_or_in_bytes(sim):
    model = nn.Sequential(mlp(), mlp())
    n_parameters = sum(p.numel() for p in mlp().parameters())
    for size, names in (
        (n_parameters + 1, ["0", "1"]),
        (n_parameters, [f"{i}.{j}" for i in range(2) for j in range(0, 12, 2)]),
        ("26KiB", ["0", "1"]),
    ):
        plan = plan_paging(model, sim.device, size)
        assert [unit.name for unit in plan.units] == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ["head"]}, "^keep= names 'head', which is no module of Sequential. Take names"),
        ({"keep": "0"}, r"^keep= takes names of modules, such as keep=\('0',\).$"),
        ({"keep": None}, "^keep="),
        ({"max_layer_size": 0}, "^max_layer_size=0: write a number of parameters"),
        ({"max_layer_size": "big"}, "^max_layer_size='big' is no number of bytes"),
        ({"budget": "0%"}, "^budget='0%': a share goes from above 0% to 100%.$"),
        ({"budget": "x%"}, "^budget='x%': a share goes"),
        ({"budget": "lots"}, "'lots' is not a number of bytes"),
        ({"prefetch": -1}, '^prefetch=-1: write prefetch="auto", or how many'),
        ({"training": True, "host": Path()}, r"^training=True and host='\.': a backward pass has"),
        ({"device": "cpu"}, r"^A model in .* 'cpu'.* or 'cpu' with a folder: host=Path\(...\)\.$"),
        ({"device": "meta"}, r"^A model in .* 'meta'.* or 'cpu' with a folder: host=Path"),
        ({"device": "cuda", "host": Path()}, "^There is no 'cuda' .* that is there, or 'cpu'.$"),
        ({"device": "nowhere"}, "^'nowhere' is not a device.$"),
        ({"device": "sim:1"}, "^There is no device 'sim:1': there are 1.$"),
        ({"device": "cpu", "training": True}, "^training=True and 'cpu': .* such as 'cuda', and"),
        ({"training": True, "activations": "disk"}, r"^activations='disk': write activations=\"ho"),
        ({"activations": "host"}, r"^activations='host' without training=True: only a backward"),
        ({"link_bytes_per_s": 0}, "^link_bytes_per_s="),
        ({"link_bytes_per_s": float("nan")}, "^link_bytes_per_s="),
        ({"compute_s": -1}, "^compute_s="),
        ({"inputs": 3}, "^inputs= got int: give what the model is called with"),
    ],
)
def test_what_can_not_be_asked_for_is_refused(sim, model, options, message):
    ask = plan_paging if options.keys() & {"link_bytes_per_s", "compute_s", "inputs"} else page
    with pytest.raises((PagingError, ByteSizeError), match=message):
        ask(model, **{"device": sim.device} | options)
    assert sim.n_allocations == 0


def foreign():
    model = mlp()
    model[0]._hf_hook = object()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mlp().to("meta"), r"^'0.weight' has no values \(float32\[32, 32\] on meta"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), "^'0.weight' is not initialized yet. Run"),
        (lambda: mlp().share_memory(), "^'0.weight' is in memory shared with other processes"),
        (foreign, r"^'0' is offloaded by accelerate \(_hf_hook\), which moves its weights. Remove"),
        (lambda: mlp, "^A model is paged, a torch.nn.Module; this is a function.$"),
        (lambda: nn.Sequential(torch.jit.script(mlp())), "^'0' is a module of TorchScript"),
        (lambda: mlp().to("sim"), r"^'0.weight' is not in host memory .* Call model.cpu\("),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_can_not_be_paged_is_refused(sim, make, message):
    model, before = make(), sim.n_allocations
    with pytest.raises(PagingError, match=message):
        page(model, sim.device)
    assert sim.n_allocations == before


def test_a_model_is_paged_once(sim, model):
    with page(model, sim.device):
        told = r"^'0', a Linear, is paged already\. .*, page a copy: copy\.deepcopy"
        with pytest.raises(PagingError, match=told):
            page(model, sim.device)
        page(copy.deepcopy(model), sim.device).unpage()
        with pytest.raises(PagingError, match=r"^'0.0', a Linear, is paged already"):
            page(nn.Sequential(model), sim.device)
    page(model, sim.device).unpage()


# --- other accelerators than CUDA, by the modules that torch has for them in every build


def make_available(monkeypatch, module, **functions):
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "device_count", lambda: 1)
    for name, function in functions.items():
        monkeypatch.setattr(module, name, function)


def test_a_device_without_streams_is_refused_with_what_to_do_instead(monkeypatch):
    make_available(monkeypatch, torch.mps)
    for name in ("Stream", "stream", "current_stream"):  # torch 2.15 has them, and no more
        monkeypatch.delattr(torch.mps, name, raising=False)
    told = (
        r"torch\.mps lacks Stream, stream, .* move the model there with model\.to\('mps'\), or run"
    )
    with pytest.raises(PagingError, match=told):
        page(mlp(), "mps")


def test_a_plan_is_made_for_an_xpu_and_a_share_of_what_no_device_tells_is_refused(monkeypatch):
    free_and_total = (40 << 20, 80 << 20)
    make_available(
        monkeypatch, torch.xpu, current_device=lambda: 0, mem_get_info=lambda _: free_and_total
    )
    monkeypatch.delattr(torch.xpu, "get_per_process_memory_fraction", raising=False)
    plan = plan_paging(mlp(), "xpu", budget="50%")
    assert (plan.device, plan.budget_bytes) == ("xpu:0", 20 << 20)
    make_available(monkeypatch, torch.mtia, current_device=lambda: 0)
    with pytest.raises(PagingError, match=r"can't tell how much of 'mtia:0' is free.*\"6GiB\"\.$"):
        plan_paging(mlp(), "mtia", budget="80%")
