"""Results that leave the device piece by piece: to the host, or into a metric.

What is held of the device between two pieces is read by the simulated one, and by a budget.
"""

from collections import Counter

import pytest
import torch
from torch import nn

from tenure import NewDisposeScope, adaptive
from tenure.adaptive import (
    AdaptiveUsageError,
    AdaptiveUsageWarning,
    NoBatchsizeCache,
    memory_budget,
)
from tenure.testing import for_each_allocation

from ..attempt.failures import oom

N_PIECES = 8


class Total:
    """A sum of its own, and what it was given for it."""

    def __init__(self):
        self.value, self.ends = 0, []

    def update(self, x, end=None):
        self.value = self.value + x.sum()
        self.ends.append(end)


# --- to the host


def test_results_come_to_the_host_as_they_would_be_concatenated(sim):
    x = torch.arange(60.0, device=sim.device).reshape(5, 12)

    def parts(collect):
        @adaptive.chunked(initial_step=5, dimension=1, collect=collect)
        def f(chunk, start, end):
            expanded = chunk[:, :1].expand(-1, end - start)
            shown = {"t": chunk.t().exp().t(), "expanded": expanded, "bool": chunk > 30}
            return shown, [(chunk * 2).half(), chunk.cpu() + 1]

        return f(x)

    expected, found = parts("cat"), parts("host")
    assert torch.equal(expected[1][1], x.cpu() + 1)
    pairs = zip((*expected[0].values(), *expected[1]), (*found[0].values(), *found[1]), strict=True)
    for there, here in pairs:
        assert here.device.type == "cpu"
        assert here.dtype == there.dtype
        assert not here.is_pinned()
        assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("collect", ["cat", "host"])
def test_nothing_to_split_gives_the_result_of_an_empty_piece(collect):
    f = adaptive.chunked(
        lambda rows, start, end: (rows.half() @ torch.ones(3, 2).half(),), collect=collect
    )
    (found,) = f(torch.ones(0, 3))
    assert (found.shape, found.dtype) == ((0, 2), torch.float16)
    squares = adaptive.range(lambda start, end: torch.arange(start, end) ** 2, collect=collect)
    assert squares(5, 5).tolist() == squares(5, 3).tolist() == []
    with NewDisposeScope():
        assert squares(0, 0).shape == (0,)


@pytest.mark.parametrize("is_given", [False, True])
def test_a_module_that_mixes_samples_is_named_if_its_batch_is_split(is_given):
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256))
    functions = {
        True: lambda rows, start, end, model: model(rows).argmax(1),
        False: lambda rows, start, end: net(rows).argmax(1),
    }
    predict = adaptive.chunked(torch.no_grad()(functions[is_given]), collect="host")
    arguments = (torch.randn(500, 64), net)[: 1 + is_given]
    assert predict(*arguments).shape == (500,)
    named = r"was split to fit, and \w+\.1 \(BatchNorm1d, training .*call eval\(\)"
    with memory_budget("300KiB"), pytest.warns(AdaptiveUsageWarning, match=named):
        predict(*arguments)
    adaptive.reset()
    net.eval()
    with memory_budget("300KiB"):
        predict(*arguments)


def test_a_batch_norm_that_is_not_called_in_training_mode_is_no_cause_for_a_warning():
    net, other = (nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256)) for _ in range(2))

    @adaptive.chunked(collect="host")
    @torch.no_grad()
    def predict(rows, start, end):
        net.eval()
        found = other[0](rows).argmax(1) + net(rows).argmax(1)
        net.train()
        return found

    with memory_budget("300KiB"):
        assert predict(torch.randn(500, 64)).shape == (500,)


def test_the_device_holds_one_result_however_many_pieces_there_are(sim):
    held_bytes = []

    @adaptive.range(initial_step=256, collect="host")
    def f(start, end):
        held_bytes.append(sim.allocated_bytes)
        return torch.ones(end - start, device=sim.device) * start

    assert f(0, N_PIECES * 256).sum() == 256 * 256 * sum(range(N_PIECES))
    assert held_bytes == [0] * N_PIECES


def test_a_result_is_copied_while_the_next_piece_computes(sim):
    def elapsed_s(collect):
        sim(budget="64MiB")

        @adaptive.range(initial_step=1 << 20, collect=collect)
        def f(start, end):
            x = torch.ones(end - start, device=sim.device)
            for _ in range(8):
                x = x * 2
            return x if collect == "host" else x.cpu()

        f(0, N_PIECES << 20)
        return sim.elapsed_s

    assert elapsed_s("host") < 0.7 * elapsed_s("cat")


def test_a_result_of_another_stream_is_whole(sim):
    side = sim.module.Stream()

    @adaptive.range(initial_step=64, collect="host")
    def f(start, end):
        here = sim.module.current_stream()
        side.wait_stream(here)
        with sim.module.stream(side):
            result = torch.full((end - start,), float(start), device=sim.device)
        here.wait_stream(side)
        return result

    assert f(0, 256).tolist() == [float(n // 64 * 64) for n in range(256)]


def test_where_nothing_can_be_pinned_results_come_all_the_same(sim):
    sim(fail_pinning="all")
    f = adaptive.chunked(initial_step=2, collect="host")(lambda chunk, start, end: chunk * 2)
    assert f(torch.arange(5.0, device=sim.device)).tolist() == [0, 2, 4, 6, 8]


@pytest.mark.usefixtures("captures")
def test_the_host_is_not_waited_for_while_a_graph_is_captured(sim):
    f = adaptive.chunked(initial_step=2, collect="host")(lambda chunk, start, end: chunk * 2)
    x = torch.ones(4, device=sim.device)
    graph = sim.module.CUDAGraph()
    told = r"would break the graph .* Use collect=\"cat\""
    with sim.module.graph(graph), pytest.raises(AdaptiveUsageError, match=told):
        f(x)


def test_a_result_with_a_graph_is_refused_at_the_first_piece(sizes):
    @adaptive.chunked(initial_step=2, collect="host")
    def f(chunk, start, end):
        sizes.append(len(chunk))
        return chunk * weight

    weight = torch.ones(1, requires_grad=True)
    told = r'^collect="host" got float32\[2\] on cpu, 8 B, which requires grad: .*no_grad'
    with pytest.raises(AdaptiveUsageError, match=told):
        f(torch.ones(4))
    assert sizes == [2]
    with torch.no_grad():
        assert f(torch.ones(4)).tolist() == [1] * 4


@pytest.mark.parametrize(
    ("collect", "results", "message"),
    [
        ("cat", [1.5], "result of type float"),
        ("cat", [None], "result of type NoneType"),
        (
            "host",
            [{"x": (torch.ones(()),)}],
            r"^collect= joins .* 0, and result\['x'\]\[0\] of rows 0 to 2 is a tensor of \[\]\.",
        ),
        ("host", [torch.ones(2), torch.ones(())], r"and result of rows 2 to 4 is a tensor of \[\]"),
        (
            "host",
            [torch.ones(2, 5), torch.ones(2, 7)],
            r"result of rows 0 to 2 is \[2, 5\], and of rows 2 to 4 \[2, 7\]\. .* padded to one",
        ),
        (
            "cat",
            [{"a": torch.ones(2)}, {}],
            r"result\['a'\] .* is \[2\], .* nothing\. .* structure",
        ),
        ("cat", [[torch.ones(2)], [torch.ones(2)] * 2], r"result\[1\] .* nothing, .* \[2\]\."),
        ("host", [(torch.ones(2), None), (torch.ones(2),) * 2], r"\[1\] .* is None, .* \[2\]\."),
        # layers or views come first, in pieces of one size
        ("host", [torch.ones(3, 2, 5)] * 2, r"0: result .* rows first, as by movedim\(1, 0\)"),
    ],
)
def test_what_can_not_be_concatenated_is_refused_at_the_first_piece_that_shows_it(
    sizes, collect, results, message
):
    @adaptive.range(initial_step=2, collect=collect)
    def f(start, end):
        sizes.append(end - start)
        return results[start // 2]

    with pytest.raises(AdaptiveUsageError, match=message):
        f(0, 6)
    assert sizes == [2] * len(results)


def test_none_in_the_result_of_each_piece_is_none_in_what_is_joined():
    made = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput

    @adaptive.chunked(initial_step=2, collect="host")
    def f(rows, start, end):
        # no piece has its rows in the first dimension of the second, whose length varies
        return made(last_hidden_state=rows, attentions=(None, rows[rows > 2]))

    found = f(torch.arange(5))
    assert list(found) == ["last_hidden_state", "attentions"]
    assert found.last_hidden_state.tolist() == [0, 1, 2, 3, 4]
    assert found.attentions[0] is None
    assert found.attentions[1].tolist() == [3, 4]


def test_memory_that_runs_out_as_results_are_joined_is_told_of_the_host():
    whole = adaptive.range(lambda start, end: torch.ones(end - start), collect="cat", maximum=1024)
    with memory_budget("10KiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        whole(0, 2 * 1024)
    assert 'memory twice. With collect="host"' in caught.value.__notes__[-1]


# --- into what the user has


def test_a_metric_is_updated_over_many_calls_as_by_the_whole_batches():
    metrics = pytest.importorskip("torchmetrics.classification")
    plain, ours = metrics.BinaryAUROC(), metrics.BinaryAUROC()
    net = nn.Linear(3, 1)

    @adaptive.chunked(initial_step=8, collect=ours)
    def scores(rows, start, end, labels):
        if len(rows) > 3:
            oom()
        return net(rows).squeeze(1).sigmoid(), labels[start:end]

    with torch.no_grad():
        for n_rows in (8, 8, 5):
            x, labels = torch.randn(n_rows, 3), torch.randint(2, (n_rows,))
            plain.update(net(x).squeeze(1).sigmoid(), labels)
            with NewDisposeScope():
                assert scores(x, labels) is ours
    torch.testing.assert_close(ours.compute(), plain.compute())


@pytest.mark.parametrize(
    ("shape", "ends"),
    [
        (lambda x, end: (x, end), [2, 3]),
        (lambda x, end: {"end": end, "x": x}, [2, 3]),
        (lambda x, end: x, [None, None]),
    ],
)
def test_a_tuple_is_spread_by_place_a_dict_by_name_and_all_else_is_one_result(shape, ends):
    total = Total()
    f = adaptive.chunked(initial_step=2, collect=total)(lambda c, start, end: shape(c, end))
    assert f(torch.ones(3)) is total
    assert (total.value, total.ends) == (3, ends)


@pytest.mark.parametrize("collect", ["list", "reducer", "host"])
def test_a_failure_of_any_allocation_repeats_and_loses_nothing_and_leaves_nothing(sim, collect):
    rows = torch.arange(24.0).reshape(12, 2).to(sim.device)
    resting_bytes = sim.allocated_bytes
    escaped, totals = [], []

    def run():
        escaped.clear()
        total = Total()
        options = {"collect": total if collect == "reducer" else collect}

        @adaptive.chunked(initial_step=5, cache_type=NoBatchsizeCache, **options)
        def work(chunk, start, end):
            escaped.append(chunk * 2)
            if collect == "host":
                # not dense: its copy to the host takes memory of the device
                return (chunk * 2).t().repeat_interleave(2, 0)[::2].t()
            return escaped[-1].sum(1).cpu(), (start, end)

        found = work(rows)
        if collect == "host":
            assert torch.equal(found, 2 * rows.cpu())
            total.update(found, (0, 12))
        elif collect == "list":
            for each in found:
                total.update(*each)
        totals.append(total)

    def check(failure):
        assert failure.error is None
        total = totals.pop()
        assert total.value == 2 * sum(range(24))
        assert [start for start, _ in total.ends] == [0, *(end for _, end in total.ends[:-1])]
        assert total.ends[-1][1] == 12
        escaped.clear()
        assert sim.allocated_bytes == resting_bytes

    assert for_each_allocation(run, check) >= 4


@pytest.mark.parametrize("collect", ["list", "host", "reducer"])
def test_a_budget_for_two_results_does_for_many_that_are_reduced(collect, sizes):
    @adaptive.range(initial_step=1024, collect=Total() if collect == "reducer" else collect)
    def f(start, end):
        sizes.append(end - start)
        return torch.ones(end - start)

    with memory_budget("9KiB"):
        if collect != "reducer":
            told = r"Not even 1 fits beside the results of the pieces before.*collect=\"host\""
            with pytest.raises(adaptive.OutOfRetriesError, match=told):
                f(0, N_PIECES * 1024)
        else:
            assert f(0, N_PIECES * 1024).value == N_PIECES * 1024
            assert sizes == [1024] * N_PIECES


def test_an_error_of_the_reducer_goes_on_and_it_is_not_asked_again():
    class Full(Total):
        def update(self, x):
            super().update(x)
            oom()

    full = Full()
    with pytest.raises(torch.OutOfMemoryError):
        adaptive.chunked(initial_step=2, collect=full)(lambda c, start, end: c)(torch.ones(4))
    assert full.value == 2


def test_what_has_an_update_of_its_own_is_a_reducer_and_a_class_is_a_function():
    words = adaptive.range(initial_step=1, collect=Counter())(lambda start, end: ["a", "b"][start:])
    assert words(0, 2) == Counter(a=1, b=2)
    counted = adaptive.range(initial_step=1, collect=Counter)(lambda start, end: "ab"[start])
    assert counted(0, 2) == Counter(a=1, b=1)


def test_a_metric_that_is_a_class_is_refused_by_name():
    kind = pytest.importorskip("torchmetrics").MeanMetric
    told = r"^collect=MeanMetric is a class\. Give .* collect=MeanMetric\(\)"
    with pytest.raises(AdaptiveUsageError, match=told):
        adaptive.chunked(collect=kind)(lambda chunk, start, end: chunk)


@pytest.mark.parametrize("collect", ["list", "cat", "host", len])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_buffer_that_the_next_piece_writes_is_refused(collect, guard):
    rows, constant = torch.arange(6.0), torch.ones(2)

    def run(function):
        with guard():
            buffer = torch.empty(6)
            return adaptive.execute.chunked(rows, initial_step=2, collect=collect)(
                lambda chunk, start, end: function(buffer, chunk, start, end)
            )

    for part in (
        lambda buffer, chunk, start, end: torch.mul(chunk, 2, out=buffer[: end - start]),
        lambda buffer, chunk, start, end: {"x": [chunk, buffer[:2].copy_(chunk)]},
    ):
        with pytest.raises(AdaptiveUsageError, match="two pieces in the same memory"):
            run(part)
    # rows of one buffer, views of one result, and a constant are no such results
    run(lambda buffer, chunk, start, end: torch.mul(chunk, 2, out=buffer[start:end]))
    run(lambda buffer, chunk, start, end: (x := chunk * 2, x.view(-1), constant))
