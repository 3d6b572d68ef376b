"""``tenure demo``: a small transformer, trained in scopes, with a leak planted in its loop."""

from ._verb import Demo as Demo
