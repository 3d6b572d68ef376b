"""Telling an out-of-memory error from any other: its chain, its type, its text, users' patterns."""

from ._info import OomInfo as OomInfo
from ._info import chain_of as chain_of
from ._info import is_oom as is_oom
from ._info import oom_info as oom_info
from ._info import oom_of_work as oom_of_work
from ._patterns import OomKind as OomKind
from ._patterns import OomRegistration as OomRegistration
from ._patterns import allowed_bytes_in as allowed_bytes_in
from ._patterns import free_bytes_in as free_bytes_in
from ._patterns import limit_bytes_in as limit_bytes_in
from ._patterns import own_bytes_in as own_bytes_in
from ._patterns import register_oom as register_oom
from ._patterns import unallocated_bytes_in as unallocated_bytes_in
