"""A day of training, a step a second, compressed: every room of tenure takes its turn."""

import gc
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from tenure import NewDisposeScope
from tenure.adaptive import memory_budget, reset, step
from tenure.paging import page
from tenure.profiler import snapshot

from .growth import grown

SECONDS = 86_400


class Day:
    """A training that steps in scopes; some steps retry, some models are paged."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.x = torch.randn(64, 8)
        self.y = self.x.sum(1, keepdim=True)
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.paged = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).eval()
        self.input = torch.ones(1, 64)
        with torch.no_grad():
            self.whole = self.paged(self.input)
        self.folder = folder
        self.retries = self.passes = 0

    def one(self, i):
        """The step of one second."""
        self.optimizer.zero_grad()
        with NewDisposeScope("second"):
            if i % 100 == 99:
                self.retried()
            elif i % 10 == 9:
                step(self.loss, (self.x, self.y))
            else:
                self.loss((self.x, self.y)).backward()
            self.optimizer.step()
        if i % 200 == 199:
            self.page_once()
        if i % 10_000 == 9_999:
            str(snapshot())

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def retried(self):
        """A step of which the whole does not fit."""

        def loss(x, y):
            return ((self.model(x) - y).expand(-1, 256).contiguous() ** 2).mean()

        with memory_budget("150KiB"):
            result = step(lambda batch: loss(*batch), (self.x, self.y))
        self.retries += result.micro_batch < len(self.x)

    def page_once(self):
        with (
            page(self.paged, "cpu", budget="36KiB", host=self.folder, max_layer_size=4200),
            torch.no_grad(),
        ):
            assert self.paged(self.input).equal(self.whole)
        self.passes += 1


def run(n_steps, *, n_warm):
    """Run so many seconds, in a process of their own; the growth, the day, and its last loss."""
    # every retry would be a line
    logging.getLogger("tenure").setLevel(logging.ERROR)
    with TemporaryDirectory() as folder:
        day = Day(Path(folder))
        # a place remembers which sizes failed in it, which are more from time to time
        growth = grown(day.one, n_steps, n_warm, forget=reset)
        gc.collect()
        assert list(Path(folder).iterdir()) == []
        return growth, day, day.loss((day.x, day.y)).item()
