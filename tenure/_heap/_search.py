"""A search from objects outwards to what keeps them alive, one level of holders at a time.

Every object that was met is held by one list, which the search leaves out of its answers; all else
it keeps is numbers and text. While it runs, an index may hold the whole heap.
"""

import gc
import sys
import types
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import torch

from tenure._storages import storage_key
from tenure._torch.counting import SOLE

from ._collector import tracked_objects
from ._graphs import is_node
from ._hidden import arrays_by_storage, hidden_objects
from ._image import Image
from ._index import Index, near_objects
from ._reading import (
    cpp_references,
    cpp_uses,
    is_kind,
    referents_of,
    storage_uses,
    take_out_emptied,
)
from ._roots import Roots
from ._slots import frame_of, slots_of
from ._words import FAR, Root, Step

_MAX_LEVELS = 24
_MAX_OBJECTS = 50_000
# As many are followed for each of the objects: each may have some containers of its own.
_MAX_OBJECTS_OF_EACH = 8
# An index of all references takes as long as a scan for 240 objects, and a scan for none as long as
# 16 objects more. So a search scans as long as that takes half of what an index takes.
_MOST_SCANNED, _EMPTY_SCAN = 128, 16
_SHARES = Step("", "numpy", anchor="numpy array", link=" ", whole=True, shares=True)
_NEVER_HIDDEN = (types.CellType, BaseException)
# the list of the search, and the variable that is asked about
_OWN_REFERENCES = 1 + SOLE


class Edge(NamedTuple):
    """A step together with the number of the object that it leaves."""

    holder: int
    step: Step


class Balance(NamedTuple):
    """The references to one object, and those that nothing found accounts for."""

    references: int
    unexplained: int


class Search:
    """What was found about the holders of some objects, by number; the objects come first.

    Args:
        objects: the objects.
        ignore: containers that are no holders.
        found_roots: what is alive by itself, with the frames whose local variables count.
        image: one of this moment, if there is one; it is no holder.

    Attributes:
        targets: the numbers of the given objects, in their order.
        alive: the objects by number.
        parents: by number, the edges from each known holder.
        roots: by number, the roots that an object is.
        unasked: objects whose holders a limit kept it from looking for.
    """

    def __init__(
        self,
        objects: Iterable[object],
        ignore: Iterable[object],
        found_roots: Roots,
        image: Image | None = None,
    ) -> None:
        self.alive: list[object] = []
        self.parents: list[list[Edge]] = []
        self.roots: list[list[Root]] = []
        self.unasked: frozenset[int] = frozenset()
        self._children: list[list[int]] = []
        self._number: dict[int, int] = {}
        # objects that a root holds which will last; that are a variable; that a variable lends on
        self._resolved: set[int] = set()
        self._in_variable: set[int] = set()
        self._lending: set[int] = set()
        self._explained: defaultdict[int, int] = defaultdict(int)
        # of these, references from what the caller said to ignore
        self._ours: defaultdict[int, int] = defaultdict(int)
        self._owned_in_cpp: set[int] = set()
        self._roots = found_roots
        self._image: Image | None = None
        self._indexes: list[Index] = []
        self._n_scanned = 0
        self._ignored = {id(self.alive), id(found_roots.errors)}
        if image is not None:
            self._set_image(image)
        self.targets = [self._add(found, is_target=True) for found in objects]
        # the memory of these matters, and of others only their handles
        self._target_numbers = frozenset(self.targets)
        self._ignore(ignore)
        try:
            # with the exception in flight, if its functions have one
            self._run(list(range(len(self.alive))))
        finally:
            for index in self._indexes:
                index.close()

    def unexplained(self, n: int) -> int:
        """Return the references that no object, local variable or owner in C++ accounts for."""
        in_cpp = n in self._owned_in_cpp
        return max(0, self._references(n) - in_cpp - self._explained[n])

    def balance(self, n: int) -> Balance:
        """Return the references to an object except tenure's own, and how many have no name."""
        in_variables = self._roots.named[id(self.alive[n])]
        in_cpp = min(n in self._owned_in_cpp, cpp_references(self.alive[n]))
        named = in_variables + in_cpp + self._explained[n] - self._ours[n]
        return Balance(named + self.unexplained(n), self.unexplained(n))

    def is_silent(self, n: int) -> bool:
        """Return whether an object is a root of tenure's own and of nobody else."""
        return bool(self.roots[n]) and all(root.silent for root in self.roots[n])

    def _references(self, n: int) -> int:
        """Return the references that are not from this search or from running frames."""
        found = self.alive[n]
        own = _OWN_REFERENCES + self._roots.references[id(found)]
        own += self._image is not None and found in self._image
        own += sum(found is error for error in self._roots.errors)
        for index in self._indexes:
            own += found in index
        return sys.getrefcount(found) - own

    def _run(self, level: list[int]) -> None:
        most = _MAX_OBJECTS + _MAX_OBJECTS_OF_EACH * len(level)
        for _ in range(_MAX_LEVELS):
            if not level or len(self.alive) > most:
                break
            level = self._expand(level)
        self.unasked = frozenset(level)

    def _expand(self, level: list[int]) -> list[int]:
        """Find the holders of one level; those that no lasting root is known to hold are next."""
        before = len(self.alive)
        wanted = {id(self.alive[n]): n for n in level}
        for n in level:
            self._add_cpp_holders(n)
        # what all holders are known of is not asked about again, as counting takes most of the time
        if missing := [n for n in level if self._misses_holders(n)]:
            missing = self._ask_near(missing, wanted)
        met: set[int] = set()
        if missing:
            self._ask(self._in_heap(missing), wanted, met)
            missing = [n for n in missing if self._misses_holders(n)]
        # a running frame has the cells of its captured variables and the interpreter the exception
        # in flight, and no array has either
        if any(not is_kind(type(self.alive[n]), *_NEVER_HIDDEN) for n in missing):
            self._ask(self._hidden.of(wanted), wanted, met)
            missing = [n for n in missing if self._misses_holders(n)]
        without = frozenset(missing)
        for n in level:
            self._add_arrays(n, n in without)
        return [n for n in range(before, len(self.alive)) if self._is_open(n)]

    def _is_open(self, n: int) -> bool:
        """Return whether further holders of an object could change what is said of the tensors."""
        if n in self._resolved:
            return False
        return n not in self._in_variable or n in self._lending

    def _misses_holders(self, n: int) -> bool:
        """Return whether an object has references that something other than C++ must hold."""
        return self._left(n) > 0

    def _left(self, n: int) -> int:
        """Return the references to an object that neither the holders found nor C++ account for."""
        left = self._references(n) - self._explained[n]
        # to ask C++ takes longer than all else here
        return left - cpp_references(self.alive[n]) if left > 0 else left

    @cached_property
    def _near(self) -> Index:
        return self._note(Index(near_objects()))

    @cached_property
    def _heap(self) -> Index:
        heap = tracked_objects()
        # who reads one of these counts its references
        take_out_emptied(heap)
        return self._note(Index(heap))

    @cached_property
    def _hidden(self) -> Index:
        return self._note(Index(hidden_objects(), referents_of))

    @cached_property
    def _arrays(self) -> dict[int | None, list[int]]:
        return arrays_by_storage(self._hidden.objects)

    def _note(self, index: Index) -> Index:
        self._ignored.add(id(index.objects))
        self._indexes.append(index)
        return index

    def _ask_near(self, missing: list[int], wanted: dict[int, int]) -> list[int]:
        """Link what is near to the variables; return what that does not account for."""
        near = self._near
        # before anything of this function refers to one of them
        left = {n: self._left(n) for n in missing}
        asked = {id(self.alive[n]): n for n in missing}
        found = [
            (holder, asked[identity], step)
            for holder in near.of(asked)
            if not self._is_own(holder)
            for identity, step in slots_of(holder, asked)
        ]
        for _, n, _ in found:
            left[n] -= 1
        for holder, n, step in found:
            if not left[n]:
                self._explained[n] += 1
                self._link(self._add(holder), n, step)
                wanted.pop(id(self.alive[n]), None)
        return [n for n in missing if left[n]]

    def _in_heap(self, missing: list[int]) -> list[object]:
        """Return what refers to some objects among all that the collector tracks."""
        self._n_scanned += _EMPTY_SCAN + len(missing)
        if self._n_scanned > _MOST_SCANNED:
            return self._heap.of([id(self.alive[n]) for n in missing])
        # the collector shows nothing that is frozen
        gc.unfreeze()
        return gc.get_referrers(*map(self.alive.__getitem__, missing))

    def _ask(self, holders: Iterable[object], wanted: dict[int, int], met: set[int]) -> None:
        for holder in holders:
            if id(holder) not in met and not self._is_own(holder):
                met.add(id(holder))
                self._add_holder(holder, wanted)

    def _add_holder(self, holder: object, wanted: dict[int, int]) -> None:
        number = self._add(holder)
        for identity, step in slots_of(holder, wanted):
            self._explained[wanted[identity]] += 1
            self._link(number, wanted[identity], step)

    def _is_own(self, holder: object) -> bool:
        frame = frame_of(holder) or holder
        return id(holder) in self._ignored or id(frame) in self._roots.ids

    def _ignore(self, ignore: Iterable[object]) -> None:
        # a container that was given twice has no more references than one
        for container in {id(found): found for found in ignore}.values():
            self._ignored.add(id(container))
            for held in gc.get_referents(container):
                if id(held) in self._number:
                    self._explained[self._number[id(held)]] += 1
                    self._ours[self._number[id(held)]] += 1

    def _add(self, found: object, *, is_target: bool = False) -> int:
        if id(found) in self._number:
            return self._number[id(found)]
        number = self._number[id(found)] = len(self.alive)
        self.alive.append(found)
        self.parents.append([])
        self._children.append([])
        self.roots.append(self._roots.of(found))
        for root in self.roots[number]:
            # of what is asked about, a variable of torch's is no name to end the search with
            # and something may keep the exception in flight
            if root.silent or root.passing or (is_target and root.cost >= FAR):
                continue
            if root.running:
                self._in_variable.add(number)
            else:
                self._resolve(number)
        for error, step in self._roots.of_errors.get(id(found), ()):
            self._link(self._add(self._roots.errors[error]), number, step)
        return number

    def _link(self, holder: int, held: int, step: Step) -> None:
        self.parents[held].append(Edge(holder, step))
        if step.borrows:
            self._lending.add(holder)
        if step.shares:
            return
        self._children[holder].append(held)
        if holder in self._resolved or (holder in self._in_variable and not step.borrows):
            self._resolve(held)

    def _resolve(self, number: int) -> None:
        stack = [number]
        while stack:
            n = stack.pop()
            if n not in self._resolved:
                self._resolved.add(n)
                stack.extend(self._children[n])

    def _add_cpp_holders(self, n: int) -> None:
        held = self.alive[n]
        if is_kind(type(held), torch.Tensor):
            self._add_tensor_holders(n, held)  # type: ignore[arg-type]
        elif is_node(held):
            self._add_owners(n, held)

    def _add_tensor_holders(self, n: int, t: torch.Tensor) -> None:
        if cpp_uses(t) > 1:
            self._add_owners(n, t)
        if n in self._target_numbers and storage_uses(t) > 1:
            for owner, step in self._the_image().sharers_of(t):
                self._link(self._add(owner), n, step)

    def _add_owners(self, n: int, held: object) -> None:
        for owner, step in self._the_image().owners_of(held):
            self._owned_in_cpp.add(n)
            self._link(self._add(owner), n, step)

    def _the_image(self) -> Image:
        return self._image or self._set_image(Image(self._indexes))

    def _set_image(self, image: Image) -> Image:
        self._image = image
        self._ignored.update(map(id, image.lists))
        return image

    def _add_arrays(self, n: int, misses_holders: bool) -> None:
        is_tensor = n in self._target_numbers and is_kind(type(self.alive[n]), torch.Tensor)
        # an array keeps the handle, or another one
        if is_tensor and (misses_holders or self._may_be_an_array(n)):
            key = storage_key(self.alive[n])  # type: ignore[arg-type]
            for position in self._arrays.get(key, ()):
                self._link(self._add(self._hidden.objects[position]), n, _SHARES)

    def _may_be_an_array(self, n: int) -> bool:
        """Return whether nothing known holds another handle."""
        t: torch.Tensor = self.alive[n]  # type: ignore[assignment]
        if storage_uses(t) <= 1:
            return False
        others = [self._number.get(id(other)) for other in self._the_image().handles_over(t)]
        return any(number is None or self._misses_holders(number) for number in others)
