import collections
import copy
import gc
import logging
import logging.handlers
import threading

import pandas as pd
import pytest
import torch

from tenure.profiler import GrowthWatch, snapshot

N = 64


class _Holder:
    pass


def _trained(keep, n_steps=8, watch=None):
    """Train, with something kept at each step."""
    model = torch.nn.Linear(N, N)
    optimizer = torch.optim.Adam(model.parameters())
    watch = watch or GrowthWatch()
    with watch:
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


def test_detached_outputs_are_a_growth_without_graphs():
    holder = _Holder()
    holder.outputs = {"all": []}
    keep = lambda i, out, loss: holder.outputs["all"].append(out.detach().clone())  # noqa: E731
    (found,) = _trained(keep).growth()
    assert "outputs" in found.name
    assert found.graph_bytes == 0
    assert found.grown_bytes == (found.n_tensors - found.n_before) * N * N * 4
    assert str(found).endswith(". Bound it, or keep numbers instead of tensors.")


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


def test_a_mapping_of_many_keys_is_one_place():
    holder = _Holder()
    holder.cache = {}
    keep = lambda i, out, loss: holder.cache.update({f"image{i}": out.detach().clone()})  # noqa: E731
    (found,) = _trained(keep).growth()
    assert found.name.endswith(".cache")


def test_a_loop_without_an_optimizer_has_it_look_itself():
    answers, watch = [], GrowthWatch()
    for step in range(2):
        assert watch.look(step).total_bytes >= len(answers) * N * 4
        assert watch.growth() == ()
        answers.append(torch.ones(N))
    watch.look(2)
    (found,) = watch.growth()
    assert (found.n_before, found.n_tensors, found.first_step, found.last_step) == (0, 2, 0, 2)


def test_a_sum_that_is_carried_on_is_named():
    state = {"total": torch.zeros(())}

    def keep(i, out, loss):
        state["total"] = state["total"] + loss

    (found,) = _trained(keep).growth()
    assert "state" in found.name
    assert found.graph_bytes > 0


def test_training_without_a_leak_grows_nowhere():
    data = [torch.ones(N) for _ in range(8)]
    assert _trained(lambda i, out, loss: None).growth(snapshot()) == ()
    assert len(data) == 8


def test_a_cache_that_is_full_is_no_growth():
    cache = {}

    def keep(i, out, loss):
        cache[i % 3] = out.detach().clone()

    assert _trained(keep, n_steps=16).growth() == ()


def test_a_deque_that_has_just_filled_is_no_growth():
    recent = collections.deque(maxlen=10)
    watch = _trained(lambda i, out, loss: recent.append(out.detach().clone()), n_steps=20)
    assert not [each for each in watch.growth(snapshot()) if "recent" in each.name]


def test_of_a_program_without_steps_nothing_is_said_to_grow():
    outputs = [torch.ones(N) for _ in range(3)]
    with GrowthWatch() as watch:
        pass
    assert watch.growth() == watch.growth(at_end=snapshot()) == ()
    assert len(outputs) == 3


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


def test_looks_keep_no_tensor_alive_and_change_no_bit():
    import weakref

    torch.manual_seed(0)
    plain, watched = torch.nn.Linear(N, N), torch.nn.Linear(N, N)
    watched.load_state_dict(plain.state_dict())
    died = []

    def train(model):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            out = model(torch.ones(N, N))
            died.append(weakref.ref(out))
            out.square().mean().backward()
            optimizer.step()
        del out

    train(plain)
    with GrowthWatch():
        train(watched)
    pairs = zip(plain.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(reference() is None for reference in died)


kept_later = []


@pytest.mark.slow
@pytest.mark.parametrize(("every", "n_kept"), [(1, 60), (10, 6)])
def test_the_end_is_a_look_too(every, n_kept):
    kept_later.clear()
    keep = lambda i, out, loss: (i + 1) % every or kept_later.append(torch.ones(N))  # noqa: E731
    watch = _trained(keep, n_steps=60)
    found = {each.name: each for each in watch.growth(snapshot())}
    (grown,) = (each for name, each in found.items() if "kept_later" in name)
    kept_later.clear()
    assert (grown.n_tensors, grown.last_step) == (n_kept, 60)


@pytest.mark.slow
@pytest.mark.parametrize(("at", "n_steps"), [((1, 3), 60), ((9, 19), 40), ((9, 19), 100)])
def test_a_cache_that_filled_before_the_end_is_no_growth_at_it(at, n_steps):
    kept_later.clear()
    keep = lambda i, out, loss: i in at and kept_later.append(torch.ones(N))  # noqa: E731
    watch = _trained(keep, n_steps=n_steps)
    assert not [each for each in watch.growth(snapshot()) if "kept_later" in each.name]
    kept_later.clear()


class _Metric(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.predictions = []


class _Callback:
    def __init__(self):
        self.batches = collections.deque()


def _slow_leaks():
    """What keeps something once an epoch, by what keeps it."""
    trainer, by_split, seen, metric, callback = _Holder(), {"val": []}, [], _Metric(), _Callback()
    trainer.outputs = []
    log = logging.Logger("kept")
    log.addHandler(logging.handlers.MemoryHandler(10**6))
    frame = pd.DataFrame({"epoch": [0], "logits": pd.Series([None], dtype=object)})

    def in_closure(out):
        seen.append(out)

    def in_frame(out):
        frame.loc[len(frame)] = [len(frame), out]

    leaks = {
        "outputs": lambda out: trainer.outputs.append(out),
        "by_split['val']": lambda out: by_split["val"].append(out),
        "seen": in_closure,
        "kept_later": lambda out: kept_later.append(out),
        "predictions": lambda out: metric.predictions.append(out),
        "buffer": lambda out: log.info("%s", out),
        "batches": lambda out: callback.batches.append(out),
        "in_frame: frame": in_frame,
    }
    return leaks, trainer, by_split, metric, callback, log


def _bounded(model):
    """What fills, is replaced, or is made once, and is no leak."""
    cache, best, recent, averaged, warm = {}, {}, collections.deque(maxlen=2), [], []

    def keep(epoch, out):
        cache.setdefault(epoch % 2, out.clone())
        recent.append(out.clone())
        warm.append(out.clone()) if epoch < 2 else None
        if epoch in (0, 1, 3):
            best["weights"] = {name: p.clone() for name, p in model.state_dict().items()}
        if epoch == 1:
            averaged.append(copy.deepcopy(model))

    return keep


@pytest.mark.slow
@pytest.mark.parametrize(("every", "n_steps"), [(10, 40), (7, 34), (11, 44), (15, 61)])
def test_a_leak_every_few_steps_is_found_by_looks_at_doubled_steps_alone(every, n_steps):
    kept_later.clear()
    keep = lambda i, out, loss: (i + 1) % every or kept_later.append(torch.ones(N))  # noqa: E731
    watch = _trained(keep, n_steps=n_steps)
    assert watch.n_looks == 6 + (n_steps.bit_length() - 4)
    (found,) = (each for each in watch.growth(snapshot()) if "kept_later" in each.name)
    kept_later.clear()
    assert found.n_tensors == n_steps // every


@pytest.mark.slow
def test_many_looks_late_do_not_push_out_those_that_see_a_slow_leak():
    kept, watch = [], GrowthWatch()
    for step in (1, 2, 4, 8, 16, 32, 64, *range(100, 116)):
        kept += [torch.ones(N) for _ in range(step // 16 - len(kept))]
        watch.look(step)
    (found,) = watch.growth()
    assert (found.n_before, found.n_tensors, found.last_step) == (0, 7, 115)


def test_the_end_is_no_look_if_no_step_came_since_the_last():
    kept_later.clear()
    with GrowthWatch() as watch:
        _trained(lambda i, out, loss: kept_later.append(torch.ones(N)), n_steps=2, watch=watch)
    found = watch.growth(snapshot())
    kept_later.clear()
    assert found == ()


def test_what_comes_after_the_last_step_is_seen_at_the_end():
    kept_later.clear()
    watch = _trained(
        lambda i, out, loss: i in (1, 3) and kept_later.append(torch.ones(N)), n_steps=4
    )
    kept_later.append(torch.ones(N))
    (found,) = (each for each in watch.growth(snapshot()) if "kept_later" in each.name)
    kept_later.clear()
    assert (found.n_before, found.n_tensors, found.last_step) == (0, 3, 4)


def test_slow_leaks_of_every_kind_are_found_after_four_epochs_and_nothing_else_is():
    kept_later.clear()
    leaks, trainer, by_split, metric, callback, log = _slow_leaks()
    model = torch.nn.Linear(N, N)
    bounded = _bounded(model)
    optimizer = torch.optim.SGD(model.parameters())
    with GrowthWatch() as watch:
        for epoch in range(4):
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.ones(N, N)).square().mean().backward()
                optimizer.step()
            for keep in leaks.values():
                keep(model(torch.ones(2, N)).detach())
            bounded(epoch, model(torch.ones(2, N)).detach())
    found = watch.growth(snapshot())
    named = {each: [f.name for f in found if each in f.name] for each in leaks}
    assert all(len(names) == 1 for names in named.values()), [each.name for each in found]
    assert len(found) == len(leaks), found
    kept_later.clear()
    assert all((trainer.outputs, by_split, metric.predictions, callback.batches, log))


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


def test_calls_of_a_model_before_the_first_step_are_no_steps():
    losses = []
    model = torch.nn.Linear(N, N)
    with torch.no_grad(), GrowthWatch() as watch:
        for _ in range(10):
            model(torch.ones(N, N))
        with torch.enable_grad():
            _trained(lambda i, out, loss: losses.append(loss), watch=watch)
            (found,) = watch.growth(snapshot())
    assert (found.first_step, found.last_step) == (1, 8)


class _Bank(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner, self.heads = kind, torch.nn.Linear(N, N), torch.nn.ModuleDict()
        self.register_buffer("bank", torch.zeros(0, N))

    def forward(self, x):
        h = self.inner(x)
        if self.kind == "bank":
            self.bank = torch.cat([self.bank, h.detach()])
        elif self.kind == "heads":
            self.heads[f"task{len(self.heads)}"] = head = torch.nn.Linear(N, N)
            h = head(h)
        return h.square().mean()


@pytest.mark.parametrize("kind", ["bank", "heads", "neither"])
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
    assert names == ([] if kind == "neither" else [f"_Bank.{kind}"])


def test_the_history_of_an_optimizer_is_named():
    model = torch.nn.Linear(N, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-4, max_iter=2, tolerance_change=0)
    # of other data each time the history may stay what it is
    data = torch.linspace(-1, 1, N * N).reshape(N, N)

    def closure():
        optimizer.zero_grad()
        loss = model(data).exp().mean()
        loss.backward()
        return loss

    with GrowthWatch() as watch:
        for _ in range(8):
            optimizer.step(closure)
    found = watch.growth(snapshot())
    assert any("LBFGS" in each.name and "old_dirs" in each.name for each in found), found


def test_beginning_twice_leaves_no_hook_behind():
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_post_hooks)
    watch = GrowthWatch()
    watch.begin()
    watch.begin()
    watch.end()
    assert len(optimizer._global_optimizer_post_hooks) == before
    model = torch.nn.Linear(2, 2)
    for _ in range(8):
        model(torch.ones(2))
    assert watch.n_looks == 0


def test_the_end_is_a_look_of_a_loop_that_looks_itself():
    answers, watch = [], GrowthWatch()
    for step in range(2):
        watch.look(step)
        answers.append(torch.ones(N))
    assert watch.growth() == ()
    (found,) = (each for each in watch.growth(snapshot()) if "answers" in each.name)
    assert (found.n_before, found.n_tensors, watch.n_looks) == (0, 2, 2)


class _Link:
    def __init__(self, rest=None):
        self.tensor, self.rest = torch.ones(N), rest


def _of_list(kept):
    kept.append(copy.deepcopy(kept[0]) if kept else torch.nn.Linear(N, N))


def _of_cat(kept):
    kept[:] = [torch.cat([*kept, torch.ones(1, N)])]


def _of_links(kept):
    kept[:] = [_Link(*kept)]


def _of_storages(kept):
    kept.append(torch.ones(N).untyped_storage())


@pytest.mark.parametrize(
    ("grow", "name"),
    [
        (_of_list, "Linear"),
        (_of_cat, "kept"),
        (_of_links, "kept[…].rest.….tensor"),
        (_of_storages, "something without a name"),
    ],
)
def test_one_place_grows_of(grow, name):
    kept, watch = [], GrowthWatch()
    for step in range(16):
        watch.look(step)
        grow(kept)
    (found,) = watch.growth(snapshot())
    assert found.name.endswith(name)
    assert found.last_step == 15


def test_threads_without_a_name_are_one_place():
    end, watch, threads = threading.Event(), GrowthWatch(), []

    def wait():
        kept = torch.ones(N)
        begun.set()
        end.wait()
        return kept

    for step in range(6):
        watch.look(step)
        begun = threading.Event()
        threads.append(threading.Thread(target=wait))
        threads[-1].start()
        begun.wait()
    found = watch.growth(snapshot())
    end.set()
    for thread in threads:
        thread.join()
    assert [each.name.rpartition(".")[2] for each in found] == ["kept"]


def test_a_list_of_thousands_of_tensors_is_seen_to_grow_on():
    answers, watch = [], GrowthWatch()
    for step in (0, 1, 2, 4, 6, 8, 10):
        watch.look(step)
        answers.extend(torch.ones(1) for _ in range(1000 * (1 + (step > 1))))
    (found,) = watch.growth()
    assert found.name.endswith(".answers")
    assert found.n_tensors == 10_000


def test_a_list_of_hundreds_of_links_is_one_place():
    first, watch = None, GrowthWatch()
    for step in range(4):
        for _ in range(200):
            first = _Link(first)
        watch.look(step)
    (found,) = watch.growth()
    assert found.name.endswith("<locals>.first.rest.….tensor")
    # but for the first three, of which none is said to repeat itself
    assert (found.n_before, found.n_tensors) == (197, 797)
    assert max(len(row.name) for row in snapshot().records) < 200


def test_an_optimizer_of_each_step_that_waits_for_the_collector_counts():
    """Its scheduler refers to it, and it to that."""
    outputs, model = [], torch.nn.Linear(N, N)
    gc.disable()
    try:
        with GrowthWatch() as watch:
            for _ in range(12):
                optimizer = torch.optim.SGD(model.parameters())
                torch.optim.lr_scheduler.StepLR(optimizer, 1)
                outputs.append(model(torch.ones(N, N)).detach())
                model(torch.ones(N, N)).mean().backward()
                optimizer.step()
    finally:
        gc.enable()
    (found,) = watch.growth(snapshot())
    assert (found.n_tensors, found.last_step) == (12, 12)


def test_batches_of_many_sizes_are_no_growth():
    watch = GrowthWatch()
    for step, size in enumerate((1, 2, 4, 8)):
        batch = [torch.ones(size, N) for _ in range(size)]
        watch.look(step)
    assert watch.growth() == ()
    assert batch
