"""The public names of the package and their members, for tests of how they are described."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import distributed_state

PUBLIC = {name: getattr(distributed_state, name) for name in distributed_state.__all__}
# These have no class of their own to carry a docstring; what they are, the line above or below them in the source says.
VALUES = {"DEFAULT", "REASONING_MACHINE", "TASK_MACHINE", "TOOLBOX", "Policy"}


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The methods and properties of a class that the package defines, inherited ones too."""
    for name in dir(kind):
        owner = next((each for each in kind.__mro__ if name in vars(each)), object)
        each = vars(owner).get(name)
        each = getattr(each, "__func__", each)
        ours = owner.__module__.startswith("distributed_state") and not name.startswith(("_", "model_"))
        if ours and (callable(each) or isinstance(each, property)):
            yield name, each
