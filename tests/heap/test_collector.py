"""Objects that `gc.freeze` hides, and those that asyncio shows as they die: both are searched.

Each test runs in a process of its own: freezing cannot be undone for this one alone.
"""

import pytest

from ..programs import run_program

PRELUDE = """
import gc, torch
from tenure.profiler import holders


class Box:
    pass
"""

CASES = {
    "global": (
        "HISTORY = [torch.ones(3)]; gc.freeze()",
        "HISTORY[0]",
        "['__main__.HISTORY[0]']",
    ),
    "attribute": (
        "BOX = Box(); BOX.cache = {'k': torch.ones(3)}; gc.freeze()",
        "BOX.cache['k']",
        "[\"__main__.BOX.cache['k']\"]",
    ),
    "held by an object that came later": (
        "inner = [torch.ones(3)]; gc.freeze(); OUTER = {'inner': inner}; del inner",
        "OUTER['inner'][0]",
        "[\"__main__.OUTER['inner'][0]\"]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_is_found(case):
    setup, held, answer = CASES[case]
    done = run_program(f"{PRELUDE}\n{setup}\nprint(list(holders({held})))")
    assert (done.stdout, done.stderr) == (f"{answer}\n", "")


def test_only_the_user_holds_a_local_variable_after_a_freeze():
    code = f"""{PRELUDE}
def train():
    kept = torch.ones(3)
    alias = [kept]
    gc.freeze()
    return holders(kept)
print(train())
"""
    done = run_program(code)
    assert (done.stdout, done.stderr) == (
        "float32[3] on cpu, 12 B: 2 references, 2 explained, 0 unexplained:\n"
        "  train.<locals>.kept\n  train.<locals>.alias[0]\n",
        "",
    )


def test_a_local_of_a_running_function_is_found_after_a_freeze():
    code = f"""{PRELUDE}
def train():
    kept = [torch.ones(3)]
    gc.freeze()
    return list(holders(kept[0]))
print(train())
"""
    done = run_program(code)
    assert (done.stdout, done.stderr) == ("['train.<locals>.kept[0]']\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["", "gc.freeze()"])
def test_the_free_objects_that_asyncio_shows_end_no_search(freeze):
    """On Python 3.12 the second look at them would not end; who looks must not start a ring."""
    code = f"""
import asyncio, resource
{PRELUDE}
CACHE = [torch.ones(3)]

async def wait():
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 1)
    return await future

asyncio.run(wait())
{freeze}
_, hard = resource.getrlimit(resource.RLIMIT_CPU)
resource.setrlimit(resource.RLIMIT_CPU, (60, hard))
for _ in range(3):
    print(holders(CACHE[0]) == ["__main__.CACHE[0]"])
"""
    done = run_program(code)
    assert (done.stdout, done.stderr) == ("True\n" * 3, "")
