"""What a grid is: a test of a peer's as a table of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable, Optional


@dataclass(frozen=True)
class Grid:
    """All combinations of the values of its axes.

    Attributes:
        name: what pytest calls it.
        peer: the test that has these parameters.
        axes: by field, or by several fields that go together: a list is an axis, all else is one value of the field.
        tolerance: that of the peer's test.
        check: `check(runner, case, tolerance)` runs a combination and returns how many runs it was; attention if None.
        refused_on: a device that Folio refuses these problems on, or None.
    """

    name: str
    peer: str
    axes: dict[Any, Any]
    tolerance: Any = None
    check: Optional[Callable[..., int]] = None
    refused_on: Optional[str] = None

    def cases(self) -> Iterator[dict[str, Any]]:
        values = [axis if isinstance(axis, list) else [axis] for axis in self.axes.values()]
        for combination in itertools.product(*values):
            case = {}
            for fields, value in zip(self.axes, combination):
                case.update(zip(fields, value) if isinstance(fields, tuple) else [(fields, value)])
            yield case
