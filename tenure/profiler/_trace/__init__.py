"""What ran and what it allocated: sessions, their listeners, and the lines that were reached."""

from ._booking import Book as Book
from ._booking import Watch as Watch
from ._figures import Figures as Figures
from ._lines_by_monitoring import the_trace as the_trace
from ._meters import Usage as Usage
from ._meters import allocated_on as allocated_on
from ._sessions import BlockSizes as BlockSizes
