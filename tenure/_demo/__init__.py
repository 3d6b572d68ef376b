"""The story of ``tenure demo``: a loop that leaks, work that does not fit, and what tenure does."""

from __future__ import annotations

from ._settings import FULL as FULL
from ._settings import QUICK as QUICK
from ._settings import Settings


def tell(settings: Settings) -> None:
    """Say what comes, and then tell it: torch takes seconds to import, and is not what is shown."""
    from ._screen import Screen

    screen = Screen()
    screen.say(
        "tenure says where tensors end: it names what leaks, makes work fit that does not, and "
        "runs models larger than their memory. Each chapter shows its code, and then what that "
        "code did."
    )
    from ._chapters import tell_chapters

    tell_chapters(screen, settings)
