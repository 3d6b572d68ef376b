"""The time that tenure costs, as ratios within one run. Only what is badly broken fails."""

import functools
import statistics
import time

import torch
from torch import nn

from tenure import NewDisposeScope
from tenure.paging import page

from .paging import Mean
from .rig import MIB, check, parameter_bytes, transformers


@check(alone=True, limit_s=90)
def share_of_the_link(rig):
    """Bytes a second of a paged model, by those of one copy after another from pinned memory."""
    layer_bytes, n_layers = rig.pick(64, 1) * MIB, 24
    model = nn.Sequential(*[Mean(layer_bytes) for _ in range(n_layers)]).eval()
    x = torch.ones(8, device=rig.device)
    host = torch.empty(layer_bytes, dtype=torch.uint8).pin_memory()
    there = rig.bytes(layer_bytes)

    def copy_all():
        for _ in range(n_layers):
            there.copy_(host, non_blocking=True)

    copied_ms = rig.milliseconds(copy_all)
    with torch.inference_mode(), page(model, rig.device, budget=4 * layer_bytes) as handle:
        model(x)
        passed_ms = rig.milliseconds(lambda: model(x))
        report = handle.report()
    rate = n_layers * layer_bytes / copied_ms / 1e6
    share = report.bytes_per_pass / passed_ms / 1e6 / rate
    assert share > 0.3, share
    told = ("bytes_per_pass", "share_of_limit", "pinned_bytes")
    return {"plain_gb_per_s": rate, "share": share} | {name: getattr(report, name) for name in told}


@check(alone=True)
def host_time_per_layer(rig):
    """The host's time for a paged layer: if all layers stay, and if half of them do."""
    n_layers, width = rig.pick(200, 20), 64
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(n_layers)]).eval()
    x = torch.ones(4, width, device=rig.device)

    def microseconds(call):
        found = []
        for _ in range(rig.pick(20, 2)):
            rig.synchronize()
            begin = time.perf_counter()
            call(x)
            found.append(time.perf_counter() - begin)
        return statistics.median(found) / n_layers * 1e6

    found = {}
    with torch.inference_mode():
        found["plain_us"] = microseconds(nn.Sequential(*model).to(rig.device))
        model.cpu()
        # without a number, a unit is what the plan thinks best; so each layer is one
        per_layer = parameter_bytes(model[0])
        for name, share in (("all_stay_us", 2.0), ("half_pass_us", 0.5)):
            budget = int(share * parameter_bytes(model)) + 8 * MIB * (share > 1)
            with page(model, rig.device, per_layer + 1, budget=budget):
                model(x)
                model(x)
                found[name] = microseconds(model)
    assert found["all_stay_us"] - found["plain_us"] < rig.pick(1000, 1e6), found
    return found


def _gpt2(rig):
    library = transformers()
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100}
    config = library.GPT2Config(**rig.pick({}, small))
    return library.GPT2LMHeadModel(config).to(rig.device), config.vocab_size


@check(alone=True, limit_s=90)
def scope_overhead(rig):
    """A training step of GPT-2 on 16 tokens, bound by launches: in a scope by plain, in pairs."""
    model, n_words = _gpt2(rig)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(n_words, (1, 16), device=rig.device)

    def train():
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def forward():
        model(tokens)

    def scoped(work):
        with NewDisposeScope("step"):
            work()

    figures = {}
    for name, plain in (("training", train), ("inference", forward)):
        ours = functools.partial(scoped, plain)
        times = {plain: [], ours: []}
        for number in range(rig.pick(30, 2)):
            for work in (plain, ours) if number % 2 else (ours, plain):
                rig.synchronize()
                begin = time.perf_counter()
                work()
                rig.synchronize()
                times[work].append(time.perf_counter() - begin)
        ratios = [b / a for a, b in zip(times[plain], times[ours], strict=True)]
        skipped = len(ratios) // 6
        figures[f"{name}_ratio"] = statistics.median(ratios[skipped:])
        figures[f"{name}_ms"] = statistics.median(times[plain][skipped:]) * 1e3
        assert figures[f"{name}_ratio"] < rig.pick(2, 100), figures
    return figures
