"""How tenure shows and keeps what it found: tables, drawings, reports, and these as plain data."""

from ._amounts import Amounts as Amounts
from ._drawn import BandChart as BandChart
from ._drawn import Fact as Fact
from ._drawn import Flame as Flame
from ._drawn import FlameRow as FlameRow
from ._drawn import Grid as Grid
from ._drawn import GridColumn as GridColumn
from ._drawn import Mark as Mark
from ._drawn import Section as Section
from ._drawn import Span as Span
from ._drawn import drawn_page as drawn_page
from ._page import page as page
from ._plain import plain as plain
from ._plain import restored as restored
from ._progress import progress as progress
from ._report import Report as Report
from ._report import Shown as Shown
from ._table import Bar as Bar
from ._table import Column as Column
from ._table import Paragraph as Paragraph
from ._table import Part as Part
from ._table import Table as Table
from ._table import Tinted as Tinted
from ._table import line_of as line_of
