"""What is remembered, for what, and for how long."""

import functools
import json
import textwrap
import weakref

import pytest
import torch
from torch import nn

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError, GlobalBatchsizeCache, explicit, memory_budget
from tests.programs import run_program

from ..attempt.failures import out_of_memory_once
from .loads import Limited

LEARNING = [64, 32, 16]


def signatures(tmp_path):
    """What is known of, as a file has it."""
    adaptive.save(tmp_path / "known.json")
    known = json.loads((tmp_path / "known.json").read_text())
    return [each["signature"] for each in known["sizes"]]


def decorated(limited, **options):
    return adaptive.batch(initial_batchsize=64, cache_type=GlobalBatchsizeCache, **options)(limited)


# --- circumstances


def test_a_signature_tells_modes_and_arguments_without_the_first_dimension(tmp_path):
    x, model = torch.ones(8, 3, dtype=torch.float16), nn.Linear(2, 2)
    fail = out_of_memory_once()
    chunked = adaptive.chunked(initial_step=4, dimension=1)(lambda *_, **named: fail())
    chunked(torch.ones(4, 9), x, 5, model, y=x[0], n=1)
    found = decorated(Limited(), context="one")
    with torch.no_grad():
        found(model.eval())
    with torch.inference_mode():
        found()
    with torch.autocast("cpu", torch.bfloat16):
        found()
    assert sorted(signatures(tmp_path)) == [
        "grad | float32[4, *] on cpu | float16[*, 3] on cpu | Linear in training | "
        "y=float16[*] on cpu",
        "grad, autocast cpu bfloat16",
        "inference",
        "no grad | Linear in evaluation",
    ]


@pytest.mark.parametrize(
    ("where", "evaluated"), [("argument without grad", [64, 32, 16, 8]), ("method", [16, 8])]
)
def test_evaluation_does_not_make_training_smaller(where, evaluated):
    limited = Limited()
    of_a_module = decorated(limited)

    class Net(nn.Linear):
        embed = decorated(lambda self, batchsize: limited(batchsize))

    model = Net(2, 2)

    def run(is_training):
        model.train(is_training)
        if where == "method":
            return model.embed()
        with torch.set_grad_enabled(is_training):
            return of_a_module(model)

    run(True)
    limited.largest = 8
    run(False)
    assert limited.tried() == [*LEARNING, *evaluated]
    limited.largest = 16
    assert (run(True), run(False)) == (16, 8)
    assert limited.tried() == [16, 8]


def test_another_shape_under_the_same_modes_begins_with_the_size_of_the_last():
    limited = Limited()
    f = decorated(limited)
    f(torch.ones(9, 4))
    f(torch.ones(5, 4))
    f(torch.ones(9, 5))
    assert limited.tried() == [*LEARNING, 16, 16]
    limited.largest = 4
    f(torch.ones(9, 5))
    limited.largest = 16
    f(torch.ones(9, 4))
    assert limited.tried() == [16, 8, 4, 16]


def test_gradients_of_before_are_a_circumstance_that_begins_with_a_quarter(tmp_path):
    limited, weight = Limited(), torch.ones(1, requires_grad=True)

    def run(width=1, *, adds):
        weight.grad = torch.ones(1) if adds else None

        def loss(batch):
            return weight.sum() * limited(len(batch))

        adaptive.step(loss, torch.ones(64, width), loss="sum", verify=False, context="step")
        return limited.tried()[0]

    run(adds=False)
    assert (run(adds=True), run(adds=True), run(adds=False)) == (4, 4, 16)
    # another shape begins with what was learned beside gradients, where something was
    assert (run(2, adds=True), run(2, adds=False)) == (4, 16)
    adaptive.save(tmp_path / "sizes.json")
    adaptive.reset()
    adaptive.load(tmp_path / "sizes.json")
    assert (run(adds=False), run(adds=True)) == (16, 4)
    adaptive.reset()
    run(adds=True)
    assert run(adds=False) == 16


def test_another_shape_is_measured_on_its_first_call():
    sizes = []

    @adaptive.chunked(initial_step=64)
    def work(chunk, start, end):
        sizes.append(end - start)
        torch.empty(len(chunk) * chunk.shape[1], dtype=torch.uint8)

    narrow, wide = torch.ones(64, 50), torch.ones(64, 100)
    with memory_budget(1000):
        for x in (wide, narrow):
            work(x)
    assert sizes[:2] == [64, 10]
    assert max(sizes[1:]) == 20


# --- for what


def test_functions_that_share_their_code_share_their_size_and_other_callables_do_not():
    limited = Limited()

    def made(_):
        def f(batchsize):
            limited(batchsize)

        return f

    def tried(function):
        explicit.batch(function, 64, toma_cache_type=GlobalBatchsizeCache)
        return limited.tried()

    assert tried(made(1)) == LEARNING
    assert tried(made(2)) == tried(torch.no_grad()(made(3))) == [16]
    assert tried(functools.partial(made(4))) == [16]
    assert tried(limited) == LEARNING
    assert tried(limited) == [16]
    assert tried(limited.__call__) == LEARNING


def test_a_function_that_is_decorated_in_each_call_of_another_knows_its_size():
    limited = Limited()

    def evaluate():
        @adaptive.batch(initial_batchsize=64)
        @torch.no_grad()
        def run(batchsize):
            limited(batchsize)

        run()

    evaluate()
    evaluate()
    assert limited.tried() == [*LEARNING, 16]


class Key:
    """An object of a user, as a context."""


@pytest.mark.parametrize("context", ["name", ("a", 1, None), Key()])
def test_what_shares_a_context_shares_its_size(context):
    limited = Limited()
    decorated(limited, context=context)()
    decorated(limited)(toma_context=context)
    assert limited.tried() == [*LEARNING, 16]


def test_a_context_is_not_kept_alive():
    context = Key()
    decorated(Limited(), context=context)()
    dead = weakref.ref(context)
    del context
    assert dead() is None


def test_nothing_is_noted_where_everything_fits(tmp_path):
    for _ in range(3):
        decorated(Limited(largest=100))()
        adaptive.explicit.batch(Limited(largest=100), 64)
    assert signatures(tmp_path) == []


# --- files


def test_what_was_learned_is_written_and_read(tmp_path):
    limited = Limited()
    f = decorated(limited, context="step")
    path = tmp_path / "sizes.json"
    f()
    adaptive.save(path)
    adaptive.reset()
    assert json.loads(path.read_text()) == {
        "format": "tenure.adaptive sizes",
        "version": 1,
        "sizes": [
            {
                "site": "GlobalBatchsizeCache | context 'step'",
                "signature": "grad",
                "ok": 16,
                "bad": 32,
                "device": "cuda",
            }
        ],
    }
    adaptive.load(path)
    # what was not used yet is saved again; a context without a stable name is not
    decorated(Limited(), context=Key())()
    adaptive.save(tmp_path / "second.json")
    assert path.read_text() == (tmp_path / "second.json").read_text()
    f()
    assert limited.tried() == [*LEARNING, 16]


PROGRAM = """
    import sys
    import torch
    from tenure import adaptive
    {shift}
    tried = []

    def f(batchsize):
        tried.append(batchsize)
        if batchsize > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    @adaptive.batch(initial_batchsize=64)
    def g(batchsize):
        f(batchsize)

    def main():
        adaptive.explicit.batch(f, 64)
        g()
        adaptive.execute.batch(64)(f)

    if len(sys.argv) > 2:
        adaptive.load(sys.argv[1])
    main()
    adaptive.save(sys.argv[1])
    print(tried)
"""


@pytest.mark.slow
def test_sites_are_the_same_in_another_process_and_after_changes_elsewhere(tmp_path):
    program, path = tmp_path / "train.py", tmp_path / "sizes.json"

    def run(shift, *arguments):
        program.write_text(textwrap.dedent(PROGRAM).format(shift=shift))
        return json.loads(run_program(program, str(path), *arguments).stdout)

    assert run("") == [64, 32, 16] * 3
    assert [size["site"] for size in json.loads(path.read_text())["sizes"]] == [
        "StacktraceMemoryBatchsizeCache | train:f | train:main+1:4",
        "StacktraceMemoryBatchsizeCache | train:g | train:main+2:4",
        "StacktraceMemoryBatchsizeCache | train:main+3:4",
    ]
    assert run("# another line\nimport os", "load") == [16] * 3


GOOD = {"site": "a", "signature": "grad", "ok": 1, "bad": 2, "device": None}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"No such file"),
        ("", r"Expecting value"),
        ({"version": 2}, r"its version is 2, and not 1"),
        ({"sizes": [GOOD, {"site": "b"}]}, r"one of its sizes is \{'site': 'b'\}"),
        ({"sizes": [GOOD | {"bad": 1}]}, r"one of its sizes is "),
        ({"sizes": [GOOD | {"ok": "1"}]}, r"one of its sizes is "),
    ],
)
def test_a_file_that_can_not_be_used_changes_nothing(tmp_path, content, reason):
    path = tmp_path / "sizes.json"
    if isinstance(content, dict):
        whole = {"format": "tenure.adaptive sizes", "version": 1, "sizes": []}
        content = json.dumps(whole | content)
    if content is not None:
        path.write_text(content)
    message = rf"^load\(\) can't use '.*sizes\.json': .*{reason}.*\. Nothing was changed\. Give it"
    with pytest.raises(AdaptiveUsageError, match=message):
        adaptive.load(path)
    assert signatures(tmp_path) == []


def test_a_file_that_can_not_be_written_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(AdaptiveUsageError, match=r"^save\(\) can't write '.*': .*No such file"):
        adaptive.save(tmp_path / "missing" / "sizes.json")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(AdaptiveUsageError, match=r"^save\(\) can't write "):
        adaptive.save(folder)
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    for call in (adaptive.save, adaptive.load):
        with pytest.raises(AdaptiveUsageError, match=r"\(\) got 5, which names no file\. Give"):
            call(5)
