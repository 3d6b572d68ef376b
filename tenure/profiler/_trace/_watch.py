"""A line profiler as a listener: what it looks at, and the book of each thread.

Invariant: the books of all threads are kept for as long as the watch lives.
"""

from __future__ import annotations

import torch

from ._booking import Book, Booking, Measured, Place, Visit
from ._listeners import Codes, Unread


class Watch:
    """What one profiler looks at: some codes, one device, and a book for each thread.

    Attributes:
        codes: the codes whose lines are booked, by identity.
        measured: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.codes: Codes = {}
        self.measured = Measured(device)
        self._bookings: list[Booking] = []
        self._unread: list[Unread] = []

    # --- as a Listener

    def begin(self) -> None:
        """Count peaks from what is live now, and no frame as running."""
        self.measured.begin()

    def on_thread(self, unread: Unread) -> Booking:
        """The booking of a thread that has none, and that has this left to tell."""
        booking = Booking(self.measured)
        self._bookings.append(booking)
        # After it can be found: a device that another thread sets meanwhile is seen here or there.
        if booking.device is not self.measured.device:
            booking.is_outdated = True
        self._unread.append(unread)
        return booking

    # --- for the profiler

    def measure(self, device: torch.device) -> None:
        """Measure another device, on each thread from its next line on."""
        if device is not self.measured.device:
            self.measured.device = device
            for booking in self._bookings:
                booking.is_outdated = True

    def books(self) -> list[Book]:
        """The book of each thread."""
        return [booking.book() for booking in self._bookings]

    def unread(self) -> set[Place]:
        """The lines that a thread has more to tell of, once it reads its session."""
        claims = [claim for unread in self._unread for claim in unread.claims()]
        return {claim.place for claim in claims if isinstance(claim, Visit)}

    def clear(self) -> None:
        """Begin new books."""
        for booking in self._bookings:
            booking.clear()
