"""Random programs of scopes against a model of who owns what, in as many threads as one likes.

The model of `tests/scopes/test_model.py` shrinks what it finds; this one runs anywhere, and fast.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from tenure import NewDisposeScope, attach_to_scope, dispose, is_disposed, owner_of, statistics


class Program:
    """One program, and what should be true of it."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.scopes = []
        # tensor, value, owner, is it disposed
        self.items = []

    def run(self, n_operations):
        """Run so many operations, and end all scopes."""
        operations = [self.open, self.close, self.create, self.create, self.view, self.drop]
        operations += [self.outwards, self.across, self.detach, self.attach, self.let_go]
        for _ in range(n_operations):
            self.random.choice(operations)()
        self.check()
        while self.scopes:
            self.close()
        self.check()

    def check(self):
        for tensor, value, owner, disposed in self.items:
            assert is_disposed(tensor) is disposed
            if not disposed:
                assert owner_of(tensor) is owner
                assert tensor[0].item() == value

    def open(self):
        if len(self.scopes) < 8:
            self.scopes.append(NewDisposeScope().__enter__())

    def close(self):
        if self.scopes:
            scope = self.scopes.pop()
            scope.__exit__(None, None, None)
            self.mark(lambda item: item[2] is scope)

    def create(self):
        value = self.random.randrange(100)
        tensor = torch.full((2,), float(value))
        self.items.append([tensor, value, self.current, False])

    def view(self):
        if item := self.alive():
            # a view of a view has the first one's base, which holds no handle of ours
            view = item[0].detach()
            self.items.append([view, item[1], self.current, False])

    def drop(self):
        if self.items:
            self.items.pop(self.random.randrange(len(self.items)))

    def outwards(self):
        if self.scopes and (item := self.alive()):
            self.current.move_to_outer(item[0])
            if item[2] is self.current:
                item[2] = self.scopes[-2] if len(self.scopes) > 1 else None

    def across(self):
        if self.scopes and (item := self.alive()):
            scope = self.random.choice(self.scopes)
            self.current.move_to(scope, item[0])
            if item[2] is self.current:
                item[2] = scope

    def detach(self):
        if self.scopes and (item := self.alive()):
            self.current.detach(item[0])
            if item[2] is self.current:
                item[2] = None

    def attach(self):
        if self.scopes and (item := self.alive()):
            attach_to_scope(item[0])
            item[2] = self.current

    def let_go(self):
        if item := self.alive():
            dispose(item[0])
            self.mark(lambda other: other is item)

    @property
    def current(self):
        return self.scopes[-1] if self.scopes else None

    def alive(self):
        alive = [item for item in self.items if not item[3]]
        return self.random.choice(alive) if alive else None

    def mark(self, is_gone):
        for item in self.items:
            if is_gone(item):
                item[2], item[3] = None, True


def run_in_threads(n_threads, n_programs, n_operations=60):
    """So many programs in each of so many threads; the errors, and the entries that are left."""
    # the first survivor of a process has the heap looked through once, and what is looked at is
    # held meanwhile, whichever thread has it
    with NewDisposeScope():
        survivor = torch.ones(1)
    assert is_disposed(survivor)
    begin = threading.Barrier(n_threads)

    def work(thread):
        begin.wait()
        before = statistics().live
        for number in range(n_programs):
            Program(thread * n_programs + number).run(n_operations)
        return statistics().live - before

    with ThreadPoolExecutor(n_threads) as pool:
        ended = [pool.submit(work, i) for i in range(n_threads)]
    errors = [each.exception() for each in ended if each.exception()]
    return errors, [each.result() for each in ended if not each.exception()]
