"""What the garbage collector need not walk. Law: only for what can be in no cycle, which its last reference frees.

A full collection looks at every object that may hold others, and at all that those hold: with a hundred thousand
records in hot it stopped a process for a third of a second. What holds only bytes and numbers Python leaves alone if it
is a tuple, and, before 3.14, a dict; instances of a class it always walks. The call is that by which every destructor
takes its object off the collector's list; nothing else is done to the object. What it refers to is to the collector as
if C code held it.

Design: section 7.
"""

from __future__ import annotations

import ctypes
from gc import is_tracked

# By index, for a function object of our own: as an attribute it is everybody's, and so would be what it takes.
_untrack = ctypes.pythonapi["PyObject_GC_UnTrack"]
_untrack.argtypes = (ctypes.py_object,)
_untrack.restype = None


def untrack(*objects: object) -> None:
    """Take objects off the list of what the collector walks; they must not lead back to themselves."""
    for each in objects:
        # Asked first: the call would write before the memory of one that has no place on any list, such as bytes.
        if is_tracked(each):
            _untrack(each)
