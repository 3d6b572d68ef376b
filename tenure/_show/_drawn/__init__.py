"""Drawings that answer to the pointer and to keys: bands over time, flames, tables to search.

They know nothing of what they show; `drawn_page` puts them on a page that needs no network.
"""

from ._band_chart import BandChart as BandChart
from ._band_chart import Mark as Mark
from ._band_chart import Span as Span
from ._drawn_page import Fact as Fact
from ._drawn_page import Section as Section
from ._drawn_page import drawn_page as drawn_page
from ._flame import Flame as Flame
from ._flame import FlameRow as FlameRow
from ._grid import Grid as Grid
from ._grid import GridColumn as GridColumn
