"""A model, and functions that make a mask once and keep it somewhere."""

import functools
import threading

import torch
from torch import nn

CACHE = {}
MASK = None
SPACE = threading.local()


class Table:
    rows = None


TABLE = Table()


@functools.lru_cache
def pair(n):
    return torch.ones(n, n), "beside"


def cached(n):
    return pair(n)[0]


def in_dict(n):
    return CACHE.setdefault(n, {"mask": torch.ones(n, n)})["mask"]


def in_global(n):
    global MASK
    if MASK is None:
        MASK = torch.ones(n, n)
    return MASK


def on_object(n):
    if TABLE.rows is None:
        TABLE.rows = torch.ones(n, n)
    return TABLE.rows


def _closure():
    mask = None

    def get(n):
        nonlocal mask
        mask = torch.ones(n, n) if mask is None else mask
        return mask

    return get


in_closure = _closure()


def of_thread(n):
    return SPACE.__dict__.setdefault("mask", torch.ones(n, n))


class Net(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.linear, self.mask = nn.Linear(4, 4), mask

    def forward(self, x):
        return self.linear(x) @ self.mask(4)
