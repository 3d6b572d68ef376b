"""How tenure shows and keeps what it found: tables, drawings, reports, and these as plain data."""

from ._amounts import Amounts as Amounts
from ._amounts import ranked as ranked
from ._page import drawn_page as drawn_page
from ._part import Code as Code
from ._part import Paragraph as Paragraph
from ._part import Part as Part
from ._part import Together as Together
from ._part import in_html as in_html
from ._progress import progress as progress
from ._progress import steps as steps
from ._report import Report as Report
from ._report import Shown as Shown
from ._report import facts_of as facts_of
from ._report import plain as plain
from ._table import Amount as Amount
from ._table import Column as Column
from ._table import Row as Row
from ._table import Table as Table
from ._table import by_bytes as by_bytes
from ._table import bytes_column as bytes_column
from ._table import in_bytes as in_bytes
from ._table import note_on_shared as note_on_shared
from ._table import signed as signed
from ._table import storage_bytes as storage_bytes
