"""A step that splits compares itself with the whole, on a few samples, before it delivers."""

from ._verification import Verification as Verification
