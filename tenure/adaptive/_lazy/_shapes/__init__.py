"""What a call gives, known without running it: shapes, types, and where the samples are."""

from ._call import NORMALIZATIONS as NORMALIZATIONS
from ._call import Call as Call
from ._fakes import with_tensors as with_tensors
from ._meta import Meta as Meta
from ._meta import meta_of as meta_of
from ._shape import HOOK as HOOK
from ._shape import Shape as Shape
from ._templates import Out as Out
from ._templates import numbers_in as numbers_in
from ._templates import rebuilt as rebuilt
from ._templates import template_of as template_of
