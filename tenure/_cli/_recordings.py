"""Files that the verbs of recordings read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tenure._errors import CommandError, ReportFormatError

if TYPE_CHECKING:
    from tenure.profiler import Recording


def loaded(path: str) -> Recording:
    """Read a file of ``tenure run``, or a snapshot of torch.

    Raises:
        CommandError: it can't be read, or is something else.
    """
    try:
        # a file that is missing is told before torch is imported, which takes seconds
        os.stat(path)
        from tenure.profiler import Recording

        return Recording.load(path)
    except OSError as error:
        raise CommandError(f"{path} can't be read: {error.strerror or error}.") from None
    except ReportFormatError as error:
        raise CommandError(str(error)) from None
