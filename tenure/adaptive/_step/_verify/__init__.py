"""What `step` checks by itself when it splits: a few samples, whole and in parts."""

from ._verification import Verification as Verification
