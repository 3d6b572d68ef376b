import collections
import copy
import gc
import weakref

import pandas as pd
import pytest
import torch

from tenure.profiler import GrowthWatch, snapshot

N = 64


class _Holder:
    pass


def _trained(keep, n_steps=8):
    """Train, with something kept at each step."""
    model = torch.nn.Linear(N, N)
    optimizer = torch.optim.Adam(model.parameters())
    with GrowthWatch() as watch:
        for i in range(n_steps):
            out = model(torch.ones(N, N))
            loss = out.square().mean()
            keep(i, out, loss)
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
            del out, loss
    return watch


def test_a_list_of_losses_is_named_with_the_graphs_that_it_keeps():
    losses = []
    (found, *_) = _trained(lambda i, out, loss: losses.append(loss)).growth()
    assert found.name.rpartition(".")[2].startswith("losses")
    assert found.n_tensors - found.n_before >= 3
    # the input and the output of each step, but for parameters
    assert found.graph_bytes >= (found.n_tensors - found.n_before) * N * N * 4
    assert "losses" in str(found).split()[0]
    assert "kept graphs of autograd alive" in str(found)
    assert str(found).endswith(". Keep .detach() or .item() of what is kept, or bound it.")


def test_of_a_running_sum_only_the_graph_grows():
    trainer = _Holder()
    trainer.total = 0

    def add(i, out, loss):
        if i > 1:
            trainer.total = trainer.total + loss

    (found, *_) = _trained(add).growth()
    assert "trainer.total kept a growing graph of autograd alive, " in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "told"),
    [(("loss",), "history['loss']"), (("loss", "out"), "history[…]")],
    ids=["one key", "two keys"],
)
def test_the_key_is_named_where_all_of_it_grew_under_one(keys, told):
    holder = _Holder()
    holder.history = {"loss": [], "out": [], "first": [torch.ones(N)]}

    def keep(i, out, loss):
        for key in keys:
            holder.history[key].append(torch.full((N,), loss.item()))

    (found,) = _trained(keep).growth(snapshot())
    assert found.name.endswith(f".{told}")
    assert str(found).startswith(f"{found.name} grew by {len(keys) * 7} tensors")


def test_of_two_optimizers_one_is_looked_at():
    """What is alive after the other's step is something else, each time."""
    models = [torch.nn.Linear(N, N) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    with GrowthWatch() as watch:
        for _ in range(6):
            waves = []
            for model, optimizer in zip(models, optimizers, strict=True):
                waves.append(model(torch.ones(N, N)))
                waves[-1].mean().backward()
                optimizer.step()
    assert watch.growth() == ()


def test_an_error_in_a_look_is_none_of_the_program(monkeypatch):
    def fails():
        raise ValueError("broken")

    # a private name, because no program makes a look fail
    monkeypatch.setattr("tenure.profiler._recording._growth_watch.snapshot", fails)
    watch = _trained(lambda i, out, loss: None)
    assert watch.growth() == ()
    assert watch.notes == ["it looked for growth up to step 1: ValueError('broken')"]


def test_looks_keep_no_tensor_alive():
    died = []
    watch = _trained(lambda i, out, loss: died.append(weakref.ref(out)))
    assert watch.n_looks == 6
    assert [reference() for reference in died] == [None] * 8


kept_later = []


@pytest.mark.slow
def test_a_leak_every_few_steps_is_found_and_a_cache_that_filled_before_the_end_is_none():
    cache = []

    def keep(i, out, loss):
        if (i + 1) % 15 == 0:
            kept_later.append(torch.ones(N))
        if i in {1, 3}:
            cache.append(torch.ones(N))

    kept_later.clear()
    watch = _trained(keep, n_steps=61)
    assert watch.n_looks == 8
    (found,) = watch.growth(snapshot())
    kept_later.clear()
    assert found.name.endswith(".kept_later")
    assert found.n_tensors == 4


def test_slow_leaks_of_every_kind_are_found_after_four_epochs_and_nothing_else_is():
    kept_later.clear()
    model, trainer, by_split, seen = torch.nn.Linear(N, N), _Holder(), {"val": []}, []
    metric = torch.nn.Module()
    trainer.outputs, metric.predictions = collections.deque(), []
    frame = pd.DataFrame({"epoch": [0], "logits": pd.Series([None], dtype=object)})

    def in_frame(out):
        frame.loc[len(frame)] = [len(frame), out]

    leaks = {
        "outputs": lambda out: trainer.outputs.append(out),
        "by_split['val']": lambda out: by_split["val"].append(out),
        "seen": lambda out: seen.append(out),
        "kept_later": lambda out: kept_later.append(out),
        "predictions": lambda out: metric.predictions.append(out),
        "frame._mgr": in_frame,
    }
    # fills, is replaced, or is made once
    cache, best, recent, averaged = {}, {}, collections.deque(maxlen=2), []

    def keep_bounded(epoch, out):
        cache[epoch % 2] = out.clone()
        recent.append(out.clone())
        if epoch != 2:
            best["weights"] = {name: p.clone() for name, p in model.state_dict().items()}
        if epoch == 1:
            averaged.append(copy.deepcopy(model))

    optimizer = torch.optim.SGD(model.parameters())
    with GrowthWatch() as watch:
        for epoch in range(4):
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.ones(N, N)).square().mean().backward()
                optimizer.step()
            for keep in leaks.values():
                keep(model(torch.ones(2, N)).detach())
            keep_bounded(epoch, model(torch.ones(2, N)).detach())
    found = watch.growth(snapshot())
    named = {each: [f.name for f in found if each in f.name] for each in leaks}
    assert all(len(names) == 1 for names in named.values()), [each.name for each in found]
    assert len(found) == len(leaks), found
    kept_later.clear()


def test_a_loop_without_an_optimizer_is_watched_by_calls_of_its_outermost_module():
    features = {}
    model = torch.nn.Sequential(torch.nn.Linear(N, N), torch.nn.ReLU())
    model[1].register_forward_hook(
        lambda module, args, out: features.setdefault("relu", []).append(out)
    )
    with GrowthWatch() as watch, torch.no_grad():
        for _ in range(20):
            model(torch.ones(N, N))
    (found,) = watch.growth(snapshot())
    assert "features['relu']" in found.name
    assert found.n_tensors == 20
    # calls inside of a call count for nothing
    assert found.last_step == 20


class _Bank(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner, self.heads = kind, torch.nn.Linear(N, N), torch.nn.ModuleDict()
        self.register_buffer("bank", torch.zeros(0, N))

    def forward(self, x):
        h = self.inner(x)
        if self.kind == "bank":
            self.bank = torch.cat([self.bank, h.detach()])
        else:
            self.heads[f"task{len(self.heads)}"] = head = torch.nn.Linear(N, N)
            h = head(h)
        return h.square().mean()


@pytest.mark.parametrize("kind", ["bank", "heads"])
def test_what_grows_inside_a_model_is_named_by_module_and_buffer(kind):
    model = _Bank(kind)
    optimizer = torch.optim.SGD(model.inner.parameters(), momentum=0.9)
    with GrowthWatch() as watch:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.ones(N, N)).backward()
            optimizer.step()
            if step > 2:
                watch.look(step + 1)
    names = [each.name.partition(",")[0] for each in watch.growth(snapshot())]
    assert names == [f"_Bank.{kind}"]


# --- the place that grows, and the advice for what holds its tensors


def _fail(kept):
    x = torch.ones(N)
    try:
        raise ValueError(len(x))
    except ValueError as error:
        kept.append(error)


def _register(kept):
    x = torch.ones(N)
    kept[:] = kept or [torch.nn.Linear(1, 1)]
    kept[0].register_forward_hook(lambda *_: x.sum())


def _make_a_cycle(kept):
    trainer = _Holder()
    trainer.model = torch.nn.Linear(N, N)
    trainer.model.trainer = trainer


def _append_in_a_hook(kept):
    if not kept:
        kept.append(torch.nn.Linear(1, 1))
        outs = []
        kept[0].register_forward_hook(lambda *_: outs.append(torch.ones(N)))
    kept[0](torch.ones(1))


def _concatenate(kept):
    kept[:] = [torch.cat([*kept, torch.ones(1, N)])]


def _link(kept):
    link = _Holder()
    link.tensor, link.rest = torch.ones(N), kept[0] if kept else None
    kept[:] = [link]


def _set_an_attribute(kept):
    kept[:] = kept or [_Holder()]
    setattr(kept[0], f"last{len(vars(kept[0]))}", torch.ones(N))


_BOUND = "Bound it, or keep numbers instead of tensors."
_COLLECT = "gc.collect() frees it; break the cycle, or open a scope around what makes it."


# with the findings of two snapshots, which name no place whose tensors are replaced
@pytest.mark.parametrize(
    ("grow", "name", "n_findings", "advice"),
    [
        (_fail, "_fail(): local x", 1, "Keep str(error), or error.with_traceback(None)."),
        (_register, "<lambda>: x", 1, "Keep the handle of each hook, and call handle.remove()."),
        (_make_a_cycle, "_Holder, in a reference cycle", 1, _COLLECT),
        (_append_in_a_hook, "<lambda>: outs", 1, _BOUND),
        (_set_an_attribute, "kept[…].last…", 0, _BOUND),
        (_link, "kept[…].rest.….tensor", 1, _BOUND),
        (lambda kept: kept.append(torch.nn.Linear(N, N)), "Linear", 0, _BOUND),
        (_concatenate, "kept", 0, _BOUND),
    ],
)
def test_one_place_grows_and_the_advice_is_of_what_holds_it(grow, name, n_findings, advice):
    kept, watch = [], GrowthWatch()
    gc.collect()
    before = snapshot()
    gc.disable()
    try:
        for step in range(16):
            watch.look(step)
            # two looks are too few
            assert step > 1 or watch.growth() == ()
            grow(kept)
        (found,) = watch.growth(now := snapshot())
    finally:
        gc.enable()
    findings = now.diff(before).findings
    assert found.name.partition(", held by ")[0].removesuffix("[…]").endswith(name)
    assert str(found).endswith(f" to step 15. {advice}")
    assert [str(each).endswith(f". {advice}") for each in findings] == [True] * n_findings
