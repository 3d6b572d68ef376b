"""What one run of a program told, as a report, as a file, and beside another run."""

from ._difference import Change as Change
from ._difference import RecordedRanks as RecordedRanks
from ._difference import RecordingDiff as RecordingDiff
from ._growth import Growth as Growth
from ._growth_watch import GrowthWatch as GrowthWatch
from ._recording import RecordedLeaks as RecordedLeaks
from ._recording import Recording as Recording
from ._tree import Branch as Branch
from ._tree import RecordedTree as RecordedTree
