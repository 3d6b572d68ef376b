"""How tenure shows what it found: tables for a terminal, for rich and for a notebook."""

from ._tables import Column as Column
from ._tables import html_table as html_table
from ._tables import rich_table as rich_table
from ._tables import text_table as text_table
