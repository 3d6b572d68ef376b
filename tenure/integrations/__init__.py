"""The loops that people run: a module for each library, which is imported on demand.

None of them changes the global state of the library, and none is needed by the rest of tenure.
"""
