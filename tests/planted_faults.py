"""Faults planted in tenure, one changed line each: the tests must notice every one of them.

``python -m tests.planted_faults`` plants each fault in a copy of the repository, runs the tests
that the fault names, and prints whether one of them failed. Give part of a file's name to plant
only its faults: ``python -m tests.planted_faults scopes/``. The exit code is 1 if a fault went
unnoticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parent.parent
# of pytest
_ALL_PASSED, _SOME_FAILED, _NONE_OF_THIS_KIND = 0, 1, 5
_COPIED = ("tenure", "tests", "benchmarks", "conftest.py", "pyproject.toml")


class Fault(NamedTuple):
    """One line of tenure that is changed.

    Attributes:
        file: below ``tenure/``.
        line: what stands there once, without its indentation.
        planted: what stands there instead.
        tests: a file or a folder below ``tests/`` that notices it.
    """

    file: str
    line: str
    planted: str
    tests: str


FAULTS = (
    Fault(
        "_byte_sizes.py",
        "return share if 0 < share <= 1 else 0.0",
        "return share if 0 < share < 1 else 0.0",
        "test_text.py",
    ),
    Fault(
        "_byte_sizes.py",
        "while power < len(_SHOWN) and abs(round(value, 1)) >= _STEP:",
        "while power < len(_SHOWN) and abs(value) >= _STEP:",
        "test_text.py",
    ),
    Fault(
        "_cli/_fitting.py",
        "if budget_bytes is not None and found.needed_bytes > budget_bytes:",
        "if budget_bytes is not None:",
        "cli/test_fit.py",
    ),
    Fault(
        "_cli/_fleet/_answer.py",
        "remedy = None if fits else next(_remedies(peaks, setup, n_bytes), None)",
        "remedy = None",
        "cli/test_fit_models.py",
    ),
    Fault(
        "_cli/_verb.py",
        "if not text.isdecimal() or int(text) < minimum:",
        "if not text.isdecimal():",
        "cli/test_cli.py",
    ),
    Fault(
        "_containers.py",
        "if id(type(value)) in SINGLE or id(value) in seen:",
        "if id(type(value)) in SINGLE:",
        "scopes/test_trees.py",
    ),
    Fault(
        "_cuda_blocks.py",
        "return up_to(n_bytes, BLOCK_BYTES if n_bytes < OWN_SEGMENT_BYTES else SEGMENT_STEP_BYTES)",
        "return up_to(n_bytes, BLOCK_BYTES)",
        "test_cuda_blocks.py",
    ),
    Fault(
        "_heap/_graphs.py",
        "self._meet(unpack_hook, place, is_packed=True)",
        "pass",
        "profiler/owners/test_saved.py",
    ),
    Fault(
        "_heap/_hidden.py",
        'return "n_sequence_fields" in class_attributes(cls)',
        "return False",
        "heap/test_holders.py",
    ),
    Fault(
        "_heap/_holders.py",
        "found.sort(key=_rank)",
        "found.reverse()",
        "heap/test_holders.py",
    ),
    Fault(
        "_heap/_image.py",
        "self._by_storage[saved.key].append((owner, step._replace(shares=True)))",
        "pass",
        "heap/test_holders.py",
    ),
    Fault(
        "_heap/_search.py",
        "self._add_arrays(n, n in without)",
        "pass",
        "heap/test_holders.py",
    ),
    Fault(
        "_heap/_search.py",
        "self._add_tensor_holders(n, held)  # type: ignore[arg-type]",
        "pass",
        "heap/test_holders.py",
    ),
    Fault(
        "_host_memory.py",
        "return max(0, min([int(psutil.virtual_memory().available), *free, *left]))",
        "return max(0, min([int(psutil.virtual_memory().available), *free]))",
        "test_host_memory.py",
    ),
    Fault(
        "_oom/_info.py",
        "if told is not None and told[0] < _LITTLE_BYTES:",
        "if told is not None:",
        "oom/test_oom.py",
    ),
    Fault(
        "_oom/_info.py",
        'return found if found is not None and found.kind == "device" else _DEVICE',
        "return found or _DEVICE",
        "oom/test_oom.py",
    ),
    Fault(
        "_oom/_patterns.py",
        'index = None if device in (None, "cpu", "mps") else _INDEX.search(text)',
        "index = _INDEX.search(text)",
        "oom/test_oom.py",
    ),
    Fault(
        "_pytest/_growth.py",
        "if grown <= most_bytes:",
        "if grown < most_bytes:",
        "pytest_plugin/test_plugin.py",
    ),
    Fault(
        "_report_files.py",
        "if is_no_file(path):",
        "if False:",
        "test_report_files.py",
    ),
    Fault(
        "_show/_amounts.py",
        'rows.append(row("budget", self.limit_bytes))',
        "pass",
        "show/test_amounts.py",
    ),
    Fault(
        "_show/_report.py",
        "if type(version) is not int or not 1 <= version <= cls._version:",
        "if type(version) is not int or not 1 <= version:",
        "show/test_reports.py",
    ),
    Fault(
        "_torch/storages.py",
        "return first * n_bytes, (first + int(reach) + 1) * n_bytes",
        "return first * n_bytes, (first + int(reach)) * n_bytes",
        "torch/test_memory.py",
    ),
    Fault(
        "_stream/_modes.py",
        "sums(args[0].untyped_storage(), total.untyped_storage())",
        "pass",
        "profiler/test_together.py",
    ),
    Fault(
        "_text.py",
        'return f"{shown}{before}and {n_more} more" if n_more > 0 else shown',
        'return f"{shown}{before}and {n_more} more"',
        "test_text.py",
    ),
    Fault(
        "_torch/modes.py",
        "push(top)",
        "pass",
        "torch/test_self_tests.py",
    ),
    Fault(
        "_torch/swap.py",
        "TENSOR_BASE.requires_grad_(tensor, requires_grad)",
        "pass",
        "torch/test_self_tests.py",
    ),
    Fault(
        "_torch/writes.py",
        "return bool(_address(tensor) == _address(copy))",
        "return False",
        "torch/test_self_tests.py",
    ),
    Fault(
        "adaptive/_lazy/_tape.py",
        "if self.is_joined:",
        "if False:",
        "adaptive/lazy/test_origins.py",
    ),
    Fault(
        "adaptive/_lazy/_tape.py",
        "given[value] = given[value].clone()",
        "pass",
        "adaptive/lazy/test_writes.py",
    ),
    Fault(
        "adaptive/_lazy/_tape.py",
        "others.update(entry.made)",
        "pass",
        "adaptive/lazy/test_writes.py",
    ),
    Fault(
        "adaptive/_lazy/_tape.py",
        "value.is_spent |= value.meta.requires_grad",
        "pass",
        "adaptive/lazy/test_backward.py",
    ),
    Fault(
        "adaptive/_lazy/_split.py",
        "run(entries, env, stay, length, graphs=torch.is_grad_enabled())",
        "run(entries, env, stay, length)",
        "adaptive/lazy/test_losses.py",
    ),
    Fault(
        "adaptive/_lazy/_tape.py",
        "self.written[old.root] = -1 if old.root in self.written else new.root",
        "pass",
        "adaptive/lazy/test_writes.py",
    ),
    Fault(
        "adaptive/_lazy/_split.py",
        "if self._slopes_at({v: self._whole[v] for v in self._terms}) != self._slopes:",
        "if False:",
        "adaptive/lazy/test_losses.py",
    ),
    Fault(
        "adaptive/_memory/_counting.py",
        "self._earlier_peak_bytes = self.peak_bytes",
        "pass",
        "adaptive/memory/test_memory_meter.py",
    ),
    Fault(
        "adaptive/_predict/_blocks.py",
        'and (event.block.category == "optimizer state" or event.block.is_of_library)',
        "and event.block.is_of_library",
        "adaptive/predict/test_predict.py",
    ),
    Fault(
        "adaptive/_predict/_blocks.py",
        "if live_bytes > most_bytes:",
        "if live_bytes < most_bytes:",
        "adaptive/predict/test_predict.py",
    ),
    Fault(
        "adaptive/_predict/_observer.py",
        "if block is not None and n_bytes != block.n_bytes:",
        "if False:",
        "adaptive/predict/test_predict.py",
    ),
    Fault(
        "adaptive/_predict/_observer.py",
        "self.unforeseen.setdefault(id(tensor), (tensor, True, tensor.grad))",
        "pass",
        "adaptive/predict/test_no_trace.py",
    ),
    Fault(
        "adaptive/_predict/_work.py",
        "stack.callback(_put_back, containers_below(holders))",
        "pass",
        "adaptive/predict/test_no_trace.py",
    ),
    Fault(
        "adaptive/_predict/_device.py",
        "self._multiplying.add(thread)",
        "pass",
        "adaptive/predict/test_accelerator.py",
    ),
    Fault(
        "adaptive/_sizes/_search.py",
        "return size // self.align * self.align or size",
        "return size // self.align * self.align",
        "adaptive/sizes/test_search.py",
    ),
    Fault(
        "adaptive/_sizes/_model.py",
        "self.bad, self.other = size, Measured(size, needed_bytes)",
        "self.bad = size",
        "adaptive/test_find_batch_size.py",
    ),
    Fault(
        "adaptive/_undo/_module_state.py",
        "if hooks.keys() != before.keys():",
        "if False:",
        "adaptive/step/test_step_state.py",
    ),
    Fault(
        "adaptive/_undo/_module_state.py",
        "if module.training != training:",
        "if False:",
        "adaptive/step/test_step_state.py",
    ),
    Fault(
        "adaptive/_undo/_module_state.py",
        "if parameter.requires_grad != requires_grad:",
        "if False:",
        "adaptive/step/test_step_state.py",
    ),
    Fault(
        "integrations/_joined.py",
        'if kind == "sum" or self.count_samples(values):',
        'if kind == "sum":',
        "integrations/test_lightning.py",
    ),
    Fault(
        "integrations/_lightning/_deferred.py",
        "gradient.mul_(factors[gradient.device])",
        "pass",
        "integrations/test_lightning.py",
    ),
    Fault(
        "integrations/_lightning/_metrics.py",
        "variable.set(before)",
        "pass",
        "integrations/test_lightning.py",
    ),
    Fault(
        "paging/_engine.py",
        "page.ready = self._copy_in(unit, [pair], after)",
        "page.ready = self._copy_in(unit, [pair], [])",
        "paging/test_known_corruptions.py",
    ),
    Fault(
        "paging/_engine.py",
        "after = self.room.marks_of(page) if page.users else self.room.uses_of(page)",
        "after = []",
        "paging/test_races.py",
    ),
    Fault(
        "paging/_engine.py",
        "event = self._link.page_out(pairs, self.room.marks_of(page))",
        "event = self._link.page_out(pairs, [])",
        "paging/test_races.py",
    ),
    Fault(
        "paging/_engine.py",
        "self._link.let_compute(stream, page.ready)",
        "pass",
        "paging/test_known_corruptions.py",
    ),
    Fault(
        "paging/_engine.py",
        "self._link.let_host(copied)",
        "pass",
        "paging/test_races.py",
    ),
    Fault(
        "paging/_engine.py",
        "self._link.let_host(written)",
        "pass",
        "paging/test_races.py",
    ),
    Fault(
        "paging/_engine.py",
        "self._link.let_host(copied[-1][1])",
        "pass",
        "paging/test_races.py",
    ),
    Fault(
        "paging/_room.py",
        "streams = {**page.streams, **page.recorded_streams}",
        "streams = {0: self._link.current()}",
        "paging/test_known_corruptions.py",
    ),
    Fault(
        "paging/_page.py",
        "return host.touched or host.version != self.host_versions.get(host) or host.has_left",
        "return host.has_left",
        "paging/test_known_corruptions.py",
    ),
    Fault(
        "paging/_page.py",
        "is_unseen = unseen or (with_buffers and host.is_buffer and tensor.dim() == 1)",
        "is_unseen = unseen",
        "paging/test_known_corruptions.py",
    ),
    Fault(
        "paging/_room.py",
        "self._fences.add(0, ring_bytes, self.mark_new())",
        "pass",
        "paging/test_races.py",
    ),
    Fault(
        "paging/_room.py",
        "self._fences.add(page.start, end, event)",
        "pass",
        "paging/test_known_corruptions.py",
    ),
    Fault(
        "paging/_pager.py",
        "self.engine.let_host_write(host)",
        "pass",
        "paging/test_known_corruptions.py",
    ),
    Fault(
        "paging/_file_link.py",
        "self._in.wait_event(event)",
        "pass",
        "paging/link/test_disk_link.py",
    ),
    Fault(
        "paging/_file_link.py",
        "self.let_host(copied)",
        "pass",
        "paging/link/test_disk_link.py",
    ),
    Fault(
        "paging/_link.py",
        "self._out.wait_event(event)",
        "pass",
        "paging/link/test_disk_link.py",
    ),
    Fault(
        "paging/_file_link.py",
        "stream.wait_event(event.inner if isinstance(event, FileEvent) else event)",
        "pass",
        "paging/link/test_disk_link.py",
    ),
    Fault(
        "paging/_activations.py",
        "self._link.let_compute(kept.stream, kept.pending)",
        "pass",
        "paging/test_races.py",
    ),
    Fault(
        "paging/_training.py",
        "self._link.let_host(event)",
        "pass",
        "paging/test_known_corruptions.py",
    ),
    Fault(
        "paging/_training.py",
        "event = self._link.page_out([(there, gradient)], [self._link.mark(stream)])",
        "event = self._link.page_out([(there, gradient)], [])",
        "paging/test_races.py",
    ),
    Fault(
        "paging/_activations.py",
        "slab.ring.free(start)",
        "pass",
        "paging/training/test_activations.py",
    ),
    Fault(
        "paging/_training.py",
        '_refuse(" or ".join(repr(host.name) for host in hosts), n_writes, expected)',
        "pass",
        "paging/training/test_saved.py",
    ),
    Fault(
        "paging/_files.py",
        "if self.trouble is not None:",
        "if False:",
        "paging/link/test_disk_values.py",
    ),
    Fault(
        "paging/_division.py",
        "if uses[id(extent)] > 1:",
        "if False:",
        "paging/model/test_cut.py",
    ),
    Fault(
        "profiler/_allocator.py",
        'in_use = (b for blocks in all_blocks for b in blocks if b["state"] == _IN_USE)',
        "in_use = (b for blocks in all_blocks for b in blocks)",
        "profiler/test_allocator.py",
    ),
    Fault(
        "profiler/_lines/_book.py",
        "allocated, freed = (b - a if b >= a else b for a, b in pairs)",
        "allocated, freed = (b - a for a, b in pairs)",
        "profiler/lines/test_meters.py",
    ),
    Fault(
        "profiler/_owners/_saved.py",
        "unsure.add(key)",
        "pass",
        "profiler/owners/test_saved.py",
    ),
    Fault(
        "profiler/_recording/_torch_snapshots.py",
        'if not isinstance(found, dict) or not isinstance(found.get("segments"), list):',
        "if not isinstance(found, dict):",
        "profiler/recording/test_torch_snapshots.py",
    ),
    Fault(
        "profiler/_timeline/_account.py",
        "if self._earlier_peak_bytes <= highest:",
        "if self._earlier_peak_bytes >= highest:",
        "profiler/timeline/test_timeline.py",
    ),
    Fault(
        "scopes/_disposal.py",
        "if tensor is not None and not belongs_to_graph(tensor):",
        "if False:",
        "scopes/test_block.py",
    ),
    Fault(
        "scopes/_disposal.py",
        "is_held = id(tensor) in held and not owns(thread.chosen, tensor)",
        "is_held = id(tensor) in held",
        "scopes/test_library_objects.py",
    ),
    Fault(
        "scopes/_disposal.py",
        "return bool(inner) and all(map(is_disposed, inner))",
        "return bool(inner)",
        "scopes/test_kinds.py",
    ),
    Fault(
        "scopes/_functions.py",
        '_detach(trees, "move_to")',
        "pass",
        "scopes/test_functions.py",
    ),
    Fault(
        "scopes/_leaks.py",
        'return [holder for holder in lasting if holder.kind != "unknown"]',
        "return lasting",
        "scopes/test_leaks.py",
    ),
    Fault(
        "scopes/_ledger.py",
        "return reference is not None and reference() is tensor",
        "return reference is not None",
        "scopes/test_kinds.py",
    ),
    Fault(
        "scopes/_scope.py",
        'check_open(self, "dispose_everything_but")',
        "pass",
        "scopes/test_scope.py",
    ),
    Fault(
        "testing/_allocator/_memory.py",
        "self._count(taken, requested_bytes=-taken.requested_bytes)",
        "pass",
        "testing/test_memory.py",
    ),
    Fault(
        "testing/_device/_machine.py",
        "torch.set_rng_state(host_state)",
        "pass",
        "testing/test_machine_random.py",
    ),
    Fault(
        "testing/_device/_streams.py",
        "merge_clocks(self.seen, event.seen)",
        "pass",
        "testing/test_streams.py",
    ),
    Fault(
        "testing/_operators/_transfers.py",
        "_copy_within(source, destination)",
        "pass",
        "testing/test_tensors.py",
    ),
    Fault(
        "_account.py",
        "_this_thread.open = [each for each in _this_thread.open if each is not limit]",
        "pass",
        "test_account.py",
    ),
    Fault(
        "_callers.py",
        "while frame.f_back and is_internal(frame):",
        "while False:",
        "test_callers.py",
    ),
    Fault(
        "_containers.py",
        "if seen[key]:",
        "if False:",
        "test_containers.py",
    ),
    Fault(
        "_devices.py",
        "free_bytes = min(free_bytes, max(0, total_bytes - reserved_bytes))",
        "pass",
        "test_devices.py",
    ),
    Fault(
        "_host_memory.py",
        "return GroupMemory(limit_bytes, limit_bytes - max(0, used_bytes - cache_bytes))",
        "return GroupMemory(limit_bytes, limit_bytes - used_bytes)",
        "test_host_memory.py",
    ),
    Fault(
        "_pytest/_markers.py",
        "_log.removeFilter(_is_no_leak)",
        "pass",
        "pytest_plugin/test_plugin.py",
    ),
    Fault(
        "_registries.py",
        "self._members.pop(id(member), None)",
        "pass",
        "adaptive/attempt/test_lenders.py",
    ),
    Fault(
        "_stream/_process.py",
        "return own if gradient is None else own + _host_storages(gradient)",
        "return own",
        "profiler/lines/test_lines.py",
    ),
    Fault(
        "_stream/_stream.py",
        "return running_task() != self._task",
        "return False",
        "profiler/lines/test_backward.py",
    ),
    Fault(
        "_torch/lending.py",
        "lent.is_aliased = True",
        "pass",
        "paging/forward/test_unseen_writes.py",
    ),
    Fault(
        "_torch/optimizers.py",
        "torch.get_device_module(source).current_stream(source).synchronize()",
        "pass",
        "paging/training/test_scalers.py",
    ),
    Fault(
        "adaptive/_attempt/_attempts.py",
        "if info is None or not info.retry_safe or accelerator_is_capturing():",
        "if info is None or accelerator_is_capturing():",
        "adaptive/attempt/test_attempts.py",
    ),
    Fault(
        "adaptive/_attempt/_attempts.py",
        "release(failure.error, self._outside)",
        "pass",
        "adaptive/attempt/test_attempts.py",
    ),
    Fault(
        "adaptive/_attempt/_attempts.py",
        "self._is_noted = True",
        "pass",
        "adaptive/attempt/test_attempts.py",
    ),
    Fault(
        "adaptive/_attempt/_attempts.py",
        "self._scope.move_to_outer(made)",
        "pass",
        "adaptive/attempt/test_attempts.py",
    ),
    Fault(
        "adaptive/_attempt/_attempts.py",
        "if frame.f_code.co_flags & _CAN_BE_SUSPENDED and not _has_ended(frame):",
        "if False:",
        "adaptive/attempt/test_release.py",
    ),
    Fault(
        "adaptive/_memory/_budget.py",
        "if not in_order and (exc is None or isinstance(exc, GeneratorExit)):",
        "if not in_order:",
        "adaptive/memory/test_budget.py",
    ),
    Fault(
        "adaptive/_memory/_meter.py",
        "return self._mode.recent_peak_bytes - self._base_bytes",
        "return self._mode.recent_peak_bytes",
        "adaptive/memory/test_memory_meter.py",
    ),
    Fault(
        "adaptive/_memory/_meter.py",
        "return told[0] + held.spare_bytes",
        "return told[0]",
        "adaptive/memory/test_memory_meter.py",
    ),
    Fault(
        "adaptive/_plan/_plan.py",
        "return int(parse_bytes(budget) * (1 - margin))",
        "return int(parse_bytes(budget))",
        "adaptive/plan/test_plan.py",
    ),
    Fault(
        "adaptive/_step/_loss.py",
        "return [weight / total for weight in weights] if total else []",
        "return [weight / (2 * total) for weight in weights] if total else []",
        "adaptive/step/test_loss_shares.py",
    ),
    Fault(
        "adaptive/_undo/_module_state.py",
        "delattr(module, name)",
        "pass",
        "adaptive/undo",
    ),
    Fault(
        "adaptive/_undo/_notes.py",
        "self.kind.base.clear(self.container)",
        "pass",
        "adaptive/undo",
    ),
    Fault(
        "adaptive/_undo/_notes.py",
        "write_back(self.tensor, self.copy, self.version)",
        "pass",
        "adaptive/undo",
    ),
    Fault(
        "adaptive/_undo/_rollback.py",
        "write(state)",
        "pass",
        "adaptive/undo",
    ),
    Fault(
        "integrations/_memory_watch.py",
        "self._told.add(each.name)",
        "pass",
        "integrations/test_memory_watch.py",
    ),
    Fault(
        "integrations/accelerate.py",
        "if (getattr(parallel, size, None) or 1) > 1:",
        "if False:",
        "integrations/test_accelerate.py",
    ),
    Fault(
        "integrations/accelerate.py",
        'named = {"per_rank": True, **options}',
        "named = {**options}",
        "integrations/test_ranks.py",
    ),
    Fault(
        "paging/_engine.py",
        "after = [*after, self.room.written.pop(unit)]",
        "pass",
        "paging/test_races.py",
    ),
    Fault(
        "paging/_page.py",
        "self._lent.is_aliased = self.is_held()",
        "self._lent.is_aliased = False",
        "paging/forward/test_unseen_writes.py",
    ),
    Fault(
        "paging/_file_link.py",
        "error = raised.with_traceback(None)",
        "error = raised",
        "paging/host/test_reader.py",
    ),
    Fault(
        "paging/_activations.py",
        "after = [self._link.mark(stream), *on_host.after]",
        "after = [*on_host.after]",
        "paging/training/test_activations.py",
    ),
    Fault(
        "paging/_handle.py",
        'group["params"] = params',
        "pass",
        "paging/training/test_stepping.py",
    ),
    Fault(
        "paging/_handle.py",
        "stepped.update(together)",
        "pass",
        "paging/training/test_stepping.py",
    ),
    Fault(
        "profiler/_courtesy/_inventory.py",
        "uses[id(held)] += 1",
        "pass",
        "profiler/courtesy/test_inventory.py",
    ),
    Fault(
        "profiler/_owners/_census.py",
        "if n_bytes and not members and not is_hollow(storage):",
        "if n_bytes and not members:",
        "profiler/reports/test_snapshot.py",
    ),
    Fault(
        "profiler/_timeline/_recorder.py",
        "if packet in _RESIZERS or any(argument.is_out for argument in schema.arguments):",
        "if packet in _RESIZERS:",
        "profiler/timeline/test_timeline.py",
    ),
    Fault(
        "scopes/_disposal.py",
        "if opener is not None and code is opener[0] and id(frame) == opener[2]:",
        "if opener is not None and code is opener[0]:",
        "scopes/test_loudness.py",
    ),
    Fault(
        "scopes/_scope.py",
        'check_thread(value, "move_to")',
        "pass",
        "scopes/test_scope.py",
    ),
    Fault(
        "scopes/_thread.py",
        "return take(self.handed_out, tensor) or ref(tensor)",
        "return ref(tensor)",
        "scopes/test_statistics.py",
    ),
    Fault(
        "scopes/_tracker.py",
        "if _counts(outs) != _ALL_SOLE or any(type(out) is not Tensor for out in outs):",
        "if _counts(outs) != _ALL_SOLE:",
        "scopes/test_kinds.py",
    ),
    Fault(
        "scopes/_tracker.py",
        "return not is_library_code(module_of(maker), maker.f_code.co_qualname)",
        "return True",
        "scopes/test_library_objects.py",
    ),
    Fault(
        "testing/_device/_clock.py",
        "start_s = max(self.host_s, queue.ready_s, self._engine_ready_s[worker])",
        "start_s = max(self.host_s, queue.ready_s)",
        "testing/test_clock.py",
    ),
    Fault(
        "testing/_device/_races.py",
        "return not old.is_write and old.stream_id == new.stream_id and new.covers(old)",
        "return new.covers(old)",
        "testing/test_races.py",
    ),
)


def is_noticed(fault: Fault, copy: Path) -> bool:
    """Plant one fault in a copy, run its tests, and take it back."""
    path = copy / "tenure" / fault.file
    text = path.read_text("utf-8")
    path.write_text(text.replace(fault.line, fault.planted), "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    try:
        # tests on the simulated device need a process of their own
        for which in ("not simdevice", "simdevice"):
            run = subprocess.run(
                [*command, "-m", which, f"tests/{fault.tests}"],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode == _SOME_FAILED:
                return True
            if run.returncode not in (_ALL_PASSED, _NONE_OF_THIS_KIND):
                raise RuntimeError(f"{fault.tests} can't be run:\n{run.stdout}{run.stderr}")
    finally:
        path.write_text(text, "utf-8")
    return False


def main(part: str = "") -> int:
    """Plant the faults of some files; say how many went unnoticed."""
    chosen = [fault for fault in FAULTS if part in fault.file]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in _COPIED:
            source = _ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for fault in chosen:
            began = time.monotonic()
            noticed = is_noticed(fault, copy)
            unnoticed += not noticed
            state = "noticed" if noticed else "UNNOTICED"
            seconds = time.monotonic() - began
            print(f"{state:9} {seconds:4.0f} s  {fault.file}: {fault.planted}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
