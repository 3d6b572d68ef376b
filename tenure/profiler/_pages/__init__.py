"""Pages of HTML on which a recording draws itself: memory over time, the peak, leaks, lines."""

from ._peaks import largest_of as largest_of
from ._recording_page import recording_page as recording_page
from ._timeline_page import timeline_page as timeline_page
from ._timeline_sections import TimelineFacts as TimelineFacts
