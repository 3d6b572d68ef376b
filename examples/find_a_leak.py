"""Who keeps my tensors alive? A scope with ``policy="report"`` changes nothing and tells."""

import logging

import torch
from torch import nn

from tenure import LeakReport, NewDisposeScope


class Recorder:
    """Keeps the last activation of a layer: handy, and a leak."""

    def __init__(self, layer: nn.Module) -> None:
        self.last: torch.Tensor | None = None
        layer.register_forward_hook(self._record)

    def _record(self, layer: nn.Module, args: object, output: torch.Tensor) -> None:
        self.last = output


@torch.no_grad()
def evaluate(model: nn.Module) -> LeakReport:
    """One pass; the report lists what outlived it."""
    with NewDisposeScope("evaluate", policy="report") as scope:
        model(torch.ones(8, 16))
    assert scope.leaks is not None
    return scope.leaks


def main() -> None:
    """Find the recorder, cure it, and see an empty report."""
    logging.disable(logging.WARNING)  # the report is logged as well; here it is printed
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
    recorder = Recorder(model[0])

    leaks = evaluate(model)
    assert len(leaks) == 1
    (record,) = leaks.records
    assert tuple(record.shape) == (8, 32)
    assert any("last" in holder for holder in record.holders), record.holders
    print(leaks)

    model[0]._forward_hooks.clear()
    recorder.last = None
    assert len(evaluate(model)) == 0
    print("After the cure: no leaks.")
    logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()
