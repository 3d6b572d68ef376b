"""What ran and what it allocated: sessions, threads, and the lines that were reached."""

from ._booking import Book as Book
from ._booking import Figures as Figures
from ._engine import the_hub as the_hub
from ._watches import Watch as Watch
