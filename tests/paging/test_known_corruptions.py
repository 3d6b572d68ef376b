"""What other pagers computed wrongly is right here, and the same fault planted in ours is caught.

A fault is a line of the engine left out or turned around; the comparison, or the detector of races,
has to tell. A fault that nothing tells of would mean that its program proves nothing.
"""

import pytest
import torch

from tenure.paging._device import Engine
from tenure.paging._device._copies import Copies
from tenure.paging._device._memory import Fences
from tenure.paging._device._page import Page
from tenure.paging._device._room import Room
from tenure.paging._forward._binding import PagedDict
from tenure.paging._forward._pager import Pager
from tenure.paging._host import _file_store
from tenure.paging._link._link import Link
from tenure.paging._training import TrainingEngine
from tenure.paging._training._gradient_memory import _GradientBuffer
from tenure.paging._training._homeward import Homeward, _PageIn
from tenure.paging._training._saved import SavedTensors
from tenure.testing import RaceError

from .known_corruptions import PROGRAMS

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")

FAULTS = {}
"""For each program what plants a fault, given a monkeypatch."""


def fault_of(program):
    def keep(plant):
        FAULTS[program] = plant
        return plant

    return keep


def nothing(*_, **__):
    return None


@fault_of("a_folder_that_another_model_had_before")
def a_file_of_an_earlier_model_is_read(patch):
    earlier, write = [], _file_store._write

    def write_what_was_there(file, units):
        write(file, units)
        file.seek(0)
        earlier.append(file.read())
        file.seek(0)
        file.write(earlier[0])
        file.flush()

    patch.setattr(_file_store, "_write", write_what_was_there)


@fault_of("names_that_look_alike_in_one_folder")
def all_units_have_one_name(patch):
    places = _file_store._places
    patch.setattr(
        _file_store, "_places", lambda units: ((e, 0, start) for e, _, start in places(units))
    )


@fault_of("a_state_dict_of_a_model_on_a_disk")
def tensors_of_a_disk_are_empty(patch):
    patch.setattr(
        PagedDict, "_saved", lambda self: {k: torch.zeros_like(v) for k, v in dict.items(self)}
    )
    patch.setattr(PagedDict, "items", lambda self: self._saved().items())


@fault_of("a_state_dict_that_is_loaded_while_weights_stay")
def versions_are_not_looked_at(patch):
    patch.setattr(Page, "is_stale", lambda self, host: False)


@fault_of("an_adapter_fused_into_weights_that_stay")
def who_reads_a_weight_is_not_taken_to_write_it(patch):
    patch.setattr(Engine, "let_host_write", nothing)


@fault_of("a_schedule_that_a_run_changed")
def buffers_are_not_looked_at(patch):
    plain = Page.is_stale
    patch.setattr(Page, "is_stale", lambda self, host: plain(self, host) and not host.is_buffer)


@fault_of("meta_tensors_in_the_place_of_weights")
def weights_are_on_meta_while_nobody_uses_them(patch):
    plain = Pager.show

    def show(self, host):
        return plain(self, host) if self.is_inside else host.tensor.to("meta")

    patch.setattr(Pager, "show", show)


@fault_of("tied_weights_untied_while_they_are_paged")
def a_new_parameter_is_written_into_the_old_one(patch):
    def write_through(self, name, entry):
        with torch.no_grad():
            dict.__getitem__(self, name).set_(entry.detach())

    patch.setattr(PagedDict, "__setitem__", write_through)


@fault_of("tied_weights_with_a_mirror_each")
def each_name_has_a_mirror_of_its_own(patch):
    plain, mirrors = PagedDict._shown, {}

    def shown(self, name, entry):
        found = plain(self, name, entry)
        if found is entry:
            return found
        return mirrors.setdefault((id(self), name), found.detach().clone())

    patch.setattr(PagedDict, "_shown", shown)


@fault_of("blocks_that_the_ring_does_not_divide")
def the_ring_forgets_who_uses_its_bytes(patch):
    patch.setattr(Fences, "take", lambda self, start, end: [])


@fault_of("blocks_and_no_layer_outside_of_them")
def only_what_was_fetched_ahead_is_waited_for(patch):
    plain = Copies.let_compute

    def let_compute(self, page, *, may_retry=False):
        if may_retry:
            plain(self, page, may_retry=True)

    patch.setattr(Copies, "let_compute", let_compute)


@fault_of("a_load_stream_and_one_that_computes")
def kernels_wait_for_no_copy(patch):
    patch.setattr(Link, "_let_wait", nothing)


@fault_of("a_weight_that_is_read_on_a_stream_of_its_own")
def memory_is_kept_for_the_stream_that_is_current(patch):
    patch.setattr(Copies, "marks_of", lambda self, page: [self._link.mark(self._link.current())])


@fault_of("a_model_that_is_warm")
def what_was_evicted_counts_as_resident(patch):
    def drop(self, page):
        self.idle.discard(page)
        self._ring.free(page.start)

    patch.setattr(Room, "drop", drop)


@fault_of("a_model_that_gave_memory_back")
def memory_goes_before_its_last_use_is_over(patch):
    patch.setattr(Copies, "uses_of", lambda self, page: [])
    patch.setattr(Copies, "marks_of", lambda self, page: [])


@fault_of("a_model_that_was_evicted_and_loaded_again")
def what_is_loaded_again_is_a_slice_beside(patch):
    seen, plain = set(), Copies.fill

    def fill(self, page, after):
        plain(self, page, after)
        if page.unit in seen:
            there = page.bytes_of(0, page.unit.n_bytes)
            there.copy_(there.roll(256))
        seen.add(page.unit)

    patch.setattr(Copies, "fill", fill)


@fault_of("buffers_that_a_pass_in_training_mode_counts")
def only_versions_tell_of_writes(patch):
    plain = Page.written
    patch.setattr(Page, "written", lambda self, *, with_buffers: plain(self, with_buffers=False))


@fault_of("values_that_are_read_as_soon_as_they_are_home")
def the_host_waits_for_no_copy_home(patch):
    patch.setattr(Copies, "let_host_look", nothing)
    patch.setattr(Copies, "let_host_read", nothing)


@fault_of("gradients_of_a_model_that_is_paged")
def gradients_go_nowhere(patch):
    patch.setattr(_PageIn, "backward", staticmethod(lambda ctx, gradient: (None, None, None)))


@fault_of("a_backward_pass_behind_a_ring")
def a_graph_keeps_places_that_others_get(patch):
    patch.setattr(SavedTensors, "packed_weight", lambda self, tensor: None)
    patch.setattr(Page, "is_held", lambda self: False)


@fault_of("a_checkpoint_that_stops_as_soon_as_it_can")
def the_end_of_what_is_recomputed_is_not_noted(patch):
    patch.setattr(Copies, "uses_of", lambda self, page: [])


@fault_of("steps_that_follow_one_another")
def what_a_step_writes_is_fetched_before_it(patch):
    patch.setattr(TrainingEngine, "end", Engine.end)
    patch.setattr(Copies, "wait_for_all_copies", nothing)


@fault_of("gradients_that_are_kept")
def memory_of_gradients_is_given_out_again_at_once(patch):
    patch.setattr(_GradientBuffer, "is_free", True)


@fault_of("gradients_that_are_read_as_soon_as_they_are_there")
def gradients_are_not_waited_for(patch):
    patch.setattr(Homeward, "wait", nothing)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_went_wrong_elsewhere_is_right(sim, tmp_path, name):
    PROGRAMS[name](sim, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_fault_in_ours_is_caught(sim, tmp_path, monkeypatch, name):
    FAULTS[name](monkeypatch)
    with pytest.raises((RaceError, AssertionError)):
        run_to_its_end(sim, tmp_path, name)
    sim.take_faults()


def run_to_its_end(sim, folder, name):
    PROGRAMS[name](sim, folder)
    sim.finish()
