"""Which children of a module its forward calls with one input, read from its source."""

from __future__ import annotations

from typing import Any

import pytest

from fastpack_trl.model.source import children_of_one_input

NAMES = frozenset("abc")


class InALine:
    def forward(self, x: Any) -> Any:
        a = self.a(x).view(-1)
        b = self.b(x)
        return a + b, self.c(x)


class Nested:
    def forward(self, x: Any) -> Any:
        return self.c(self.act(self.b(x)) * self.a(x))


class OfTwoInputs:
    def forward(self, x: Any, y: Any) -> Any:
        return self.a(x) + self.b(y) + self.c(x)


class InABranch:
    def forward(self, x: Any) -> Any:
        a = self.a(x)
        if self.shared:
            return a
        b = self.b(x)
        c = self.c(x)
        return a + b + c


class InBothBranches:
    def forward(self, x: Any) -> Any:
        out = self.a(x) if self.few else self.b(x)
        if self.many:
            b = self.c(x)
        else:
            b = out
        return out + b


class StoredBetween:
    def forward(self, x: Any) -> Any:
        x = self.a(x)
        return self.b(x) * self.c(x)


class AddedBetween:
    def forward(self, x: Any) -> Any:
        a = self.a(x)
        x += 1
        return a + self.b(x)


class LeavesBetween:
    def forward(self, x: Any) -> Any:
        a = self.a(x)
        raise ValueError(a)
        return self.b(x)


class CalledTwice:
    def forward(self, x: Any) -> Any:
        return self.a(x) + self.b(x) + self.a(x) + self.c(x)


class WithMore:
    def forward(self, x: Any) -> Any:
        return self.a(x) + self.b(x, scale=2) + self.c(x[0])


class Loops:
    def forward(self, x: Any) -> Any:
        for x in self.parts():
            out = self.a(x) + self.b(x)
        return out + self.c(x)


class NoSource:
    forward = len


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (InALine, (("a", "b", "c"),)),
        (Nested, (("b", "a"),)),
        (OfTwoInputs, (("a", "c"),)),
        (InABranch, ()),
        (InBothBranches, ()),
        (StoredBetween, ()),
        (AddedBetween, ()),
        (LeavesBetween, ()),
        (CalledTwice, (("b", "c"),)),
        (WithMore, ()),
        (Loops, (("a", "b"),)),
        (NoSource, ()),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_children_of_one_input(kind: Any, expected: Any) -> None:
    assert children_of_one_input(kind, NAMES) == expected


def test_only_the_children_that_are_asked_for() -> None:
    assert children_of_one_input(InALine, frozenset("ac")) == (("a", "c"),)
    assert children_of_one_input(InALine, frozenset("a")) == ()
