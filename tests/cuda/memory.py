"""The allocator against tenure's model of it, and what budgets count.

By the private names of that model, because reports show only sums of it.
"""

import random

import torch

from tenure._cuda_blocks import taken_by
from tenure.adaptive import NoBatchsizeCache, batch, memory_budget
from tenure.testing._allocator._caching import CachingPool

from .rig import MIB, check

_COUNTERS = (
    *("reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes"),
    *("inactive_split_bytes", "inactive_split", "segment"),
)


@check()
def allocator_rules(rig):
    """Drive the allocator and the model of it alike: every counter, after every operation."""
    module = rig.module
    module.empty_cache()
    model = CachingPool(None, wait_host=lambda _: None, finished_s=lambda: 0.0)
    streams = [module.current_stream(rig.device), module.Stream(rig.device)]
    draw, held, n_operations = random.Random(0), [], 600
    for number in range(n_operations):
        kind = draw.random()
        if held and (len(held) > 40 or kind < 0.4):
            tensor, block = held.pop(draw.randrange(len(held)))
            del tensor
            model.free(block)
            block = None
        elif kind < 0.98:
            n_bytes, which = int(2 ** draw.uniform(0, 26)), draw.randrange(2)
            with module.stream(streams[which]):
                tensor = rig.bytes(n_bytes)
            held.append((tensor, model.allocate(n_bytes, 0.0, which)))
            del tensor
        else:
            rig.synchronize()
            module.empty_cache()
            model.empty_cache(0.0)
        real, modelled = module.memory_stats(rig.device), model.statistics(0.0)
        for name in (f"{each}.all.current" for each in _COUNTERS):
            seen = real[name], modelled[name]
            assert seen[0] == seen[1], f"operation {number}: {name} is {seen[0]}, not {seen[1]}"
    return {"operations": n_operations, "reserved_bytes": rig.reserved()}


@check()
def block_sizes(rig):
    """Blocks take what the plan says: sizes at each border of the rules, then random ones."""
    draw = random.Random(1)
    borders = [512, MIB, 10 * MIB, 20 * MIB, 22 * MIB]
    lists = [[size + more] for size in borders for more in (-1, 0, 1)]
    n_lists = range(40)
    lists += [[int(2 ** draw.uniform(0, 25)) for _ in range(draw.randint(1, 8))] for _ in n_lists]
    for sizes in lists:
        rig.module.empty_cache()
        before = rig.allocated(), rig.reserved()
        blocks = [rig.bytes(size) for size in sizes]
        taken = rig.allocated() - before[0], rig.reserved() - before[1]
        planned = taken_by(sizes, rig.device)
        assert taken == (planned.allocated_bytes, planned.reserved_bytes), (sizes, taken, planned)
        del blocks
    return {"lists": len(lists)}


@check()
def budget_on_fragments(rig):
    n_blocks = rig.pick(100, 20)
    blocks = [rig.bytes(4 * MIB) for _ in range(n_blocks)]
    kept = blocks[::5]
    del blocks
    reserved_bytes, made = rig.reserved(), []
    with memory_budget("8MiB", rig.device):
        for _ in range(100):
            try:
                made.append(rig.bytes(MIB))
            except torch.OutOfMemoryError:
                break
    assert len(made) == 8, f"{len(made)} MiB within 8 MiB"
    assert len(kept) == n_blocks // 5
    return {"reserved_bytes": reserved_bytes, "made_bytes": len(made) * MIB}


@check()
def budget_lets_through(rig):
    """An allocation that fits the budget succeeds, whatever segments it takes."""
    figures = {}
    for limit, n_bytes in (("12MiB", 2 * MIB), ("1MiB", 1024), ("21MiB", 21 * MIB)):
        rig.tidy()
        with memory_budget(limit, rig.device) as budget:
            kept = rig.bytes(n_bytes)
            figures[limit] = budget.live_bytes
            # up to so much is not split off
            assert kept.nbytes <= budget.live_bytes <= kept.nbytes + MIB
            del kept
    return figures


@check()
def batch_comes_down(rig):
    """A batch that does not fit becomes smaller until it does, and leaves nothing behind."""
    at_rest, seen = rig.allocated(), []

    @batch(initial_batchsize=256, cache_type=NoBatchsizeCache)
    def take(size):
        seen.append(size)
        return len([rig.bytes(MIB) for _ in range(size)])

    with rig.limited(100 * MIB):
        size = take()
    rig.tidy()
    assert 50 <= size <= 100, seen
    assert rig.allocated() == at_rest
    return {"sizes": seen}
