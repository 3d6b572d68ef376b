"""The story of ``tenure demo``: a transformer trained in scopes, a leak planted in its loop."""
