"""What the values of a decision inherit from.

A decision makes some of them for every candidate: structs of msgspec take a tenth of the time of frozen dataclasses,
and none can be part of a circle that the garbage collector would have to find. That is set in this base because mypyc,
which may compile them, knows bases and no keywords of a class; `frozen=True` is said again by each class, since type
checkers do not inherit it.

Where both sides of `==` are declared as one struct of a compiled module, mypyc takes it for `is`: declare one of them
as an object.

What is written, or read far more often than made, is a class with slots: interpreted it costs as much, and compiled its
attributes are read in a tenth of the time.
"""

from __future__ import annotations

import msgspec


class FrozenStruct(msgspec.Struct, frozen=True, gc=False):
    """A value between two stages."""
