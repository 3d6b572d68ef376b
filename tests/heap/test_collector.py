"""Objects that `gc.freeze` hides: found, as a search undoes it.

Each test runs in a process of its own: freezing cannot be undone for this one alone.
"""

import pytest

from ..programs import run_program

PRELUDE = """
import gc, torch, weakref
from tenure._heap import find_holders
from tenure._heap import instances, tracked_objects

class Box:
    pass

def chains(ref):
    return [holder.chain for holder in find_holders([ref()])[0]]
"""

CASES = {
    "global": (
        "HISTORY = [torch.ones(3)]; gc.freeze()",
        "[t for t in instances(tracked_objects(), torch.Tensor) if t is HISTORY[0]] "
        "and chains(weakref.ref(HISTORY[0]))",
        "['__main__.HISTORY[0]']",
    ),
    "attribute": (
        "BOX = Box(); BOX.cache = {'k': torch.ones(3)}; gc.freeze()",
        "chains(weakref.ref(BOX.cache['k']))",
        "[\"__main__.BOX.cache['k']\"]",
    ),
    "held by an object that came later": (
        "inner = [torch.ones(3)]; gc.freeze(); OUTER = {'inner': inner}; del inner",
        "chains(weakref.ref(OUTER['inner'][0]))",
        "[\"__main__.OUTER['inner'][0]\"]",
    ),
    "each object once, and none of the answer's own lists": (
        "BOX = Box(); gc.freeze()",
        "(lambda found: (len(found) == len(set(map(id, found))), "
        "any(o is BOX for o in found), any(o is found for o in found)))(tracked_objects())",
        "(True, True, False)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_is_found(case):
    setup, question, answer = CASES[case]
    done = run_program(f"{PRELUDE}\n{setup}\nprint({question})")
    assert (done.stdout, done.stderr) == (f"{answer}\n", "")


def test_only_the_user_holds_a_local_variable_after_a_freeze():
    code = f"""{PRELUDE}
from tenure.profiler import holders
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
    return chains(weakref.ref(kept[0]))
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
for _ in range(2):
    for start in range(0, len(heap := tracked_objects()), 1000):
        gc.get_referents(*heap[start : start + 1000])
    del heap
    print([holder.chain for holder in find_holders([asyncio.Future])[0] if holder.named][:1])
    print(chains(weakref.ref(CACHE[0])))
"""
    done = run_program(code)
    expected = "['Future']\n['__main__.CACHE[0]']\n" * 2
    assert (done.stdout, done.stderr) == (expected, "")
