"""Uses tenure in a torch that lacks private names; run by test_private_names.py.

Each fork imports the rooms without some of the names. Prints as JSON what each use raised there:
the name in a MissingTorchNameError, or the text of any other error.
"""

import importlib
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import tenure._torch

ROOMS = (
    "scopes", "adaptive", "adaptive._predict._measured", "profiler", "paging",
    "testing._interface._accelerator", "testing._interface._backward",
)  # fmt: skip


def scopes():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", tenure.TenureWarning)
        with tenure.scopes.DisposeScope():
            made = torch.ones(2) + 1
    if told:
        # a scope that can't dispose says so, and leaves its tensors alone
        assert made.sum() == 4
        text = str(told[0].message)
        raise tenure.MissingTorchNameError(text, text.split()[4].rstrip(","))
    assert tenure.scopes.is_disposed(made)


def memory_budget():
    with tenure.adaptive.memory_budget("1KiB") as made:
        kept = torch.ones(4)
    assert made.live_bytes == kept.nbytes


def step():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Linear(2, 1))
    tenure.adaptive.step(lambda part: model(part).mean(), torch.ones(4, 2), maximum=2)
    assert model[0].weight.grad is not None


def profiler():
    def work():
        return torch.ones(8).sum()

    with tenure.profiler.LineProfiler(work, device="cpu") as lines:
        work()
    assert len(lines.records)


def holders():
    kept = torch.ones(2, requires_grad=True)
    assert tenure.profiler.holders(kept)
    assert tenure.profiler.saved_for_backward(kept * kept)


def paging():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    with (
        tempfile.TemporaryDirectory() as folder,
        tenure.paging.page(model, "cpu", host=Path(folder)),
        torch.no_grad(),
    ):
        model(torch.ones(1, 2))


def predictions():
    model = nn.Linear(2, 2)
    assert tenure.adaptive.predict_peak(lambda x: model(x).sum(), torch.ones(4, 2)).peak_bytes


def simulated():
    with tenure.testing.simulated_accelerator() as sim:
        assert float(torch.ones(2, device=sim.device).sum()) == 2


# by a word of what tenure says it needs a name for; the simulated device is in torch for good
FIRST = {"scopes": scopes, "memory_budget": memory_budget, "step": step}
SECOND = {
    "profiler": profiler, "who holds what": holders, "paging": paging, "predictions": predictions,
    "simulated accelerator": simulated,
}  # fmt: skip


def in_a_fork(function, *arguments):
    reader, writer = os.pipe()
    if not os.fork():
        warnings.simplefilter("ignore")
        os.write(writer, json.dumps(function(*arguments)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = json.load(pipe)
    os.wait()
    return answer


def import_rooms(bind_instead):
    """Import them with other functions in the place of those that bind a name."""
    names = tenure._torch
    names.bound, names.getter = map(bind_instead, (names.bound, names.getter))
    for room in ROOMS:
        importlib.import_module(f"tenure.{room}")


def purposes():
    """What names are needed for, by name."""
    found = {}

    def noting(bind):
        def note(path, purpose):
            found[path] = f"{found.get(path)} {purpose}".replace("disposed tensors", "scopes")
            return bind(path, purpose)

        return note

    import_rooms(noting)
    return found


def raised_without(gone):
    """What uses raise, by word; with no names, without any."""

    def lacking(bind):
        def bind_unless_gone(path, purpose):
            is_gone = not gone or path in gone
            return (tenure._torch._stand_in if is_gone else bind)(path, purpose)

        return bind_unless_gone

    if not gone:
        tenure._torch.optional = lambda path: None
    import_rooms(lacking)
    errors = {}
    for word, use in (FIRST | SECOND).items():
        try:
            use()
        except tenure.MissingTorchNameError as error:
            errors[word] = error.name
        except Exception as error:
            errors[word] = f"{type(error).__name__}: {error}"
    return errors


def only_for(uses):
    """The names that these uses need and the others don't."""
    for path, text in needed.items():
        words = {word for word in FIRST | SECOND if word in text}
        if words and words <= uses.keys():
            yield path


logging.disable()
needed = in_a_fork(purposes)
lacks = [*only_for(FIRST)], [*only_for(SECOND)], []
json.dump([in_a_fork(raised_without, gone) for gone in lacks], sys.stdout)
