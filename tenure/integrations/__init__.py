"""The loops that people run: one module for each library, imported on demand.

None of them changes the global state of the library, and none is needed by the rest of tenure.
"""
