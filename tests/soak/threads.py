"""The random programs of `tests/scopes/test_model.py`, in as many threads as one likes."""

import threading

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tenure import NewDisposeScope, is_disposed

from ..scopes.test_model import Ownership


def run(n_threads, n_programs, n_steps):
    """So many programs in each of so many threads, against the model; the errors."""
    # the first survivor of a process has the heap looked through once, and what is looked at is
    # held meanwhile, whichever thread has it
    with NewDisposeScope():
        survivor = torch.ones(1)
    assert is_disposed(survivor)
    chosen = settings(
        max_examples=n_programs, stateful_step_count=n_steps, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    errors = []
    begin = threading.Barrier(n_threads)

    def work(number):
        programs = seed(number)(type("OfThisThread", (Ownership,), {}))
        begin.wait()
        try:
            run_state_machine_as_test(programs, settings=chosen)
        # whatever it is, the test is to tell it
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
