"""Classes with fields that are made without the dataclasses module, but work with it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
from epcache._fields import dataclass, field, replace


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 2
    names: list[str] = field(default_factory=list, repr=False, compare=False)


@dataclass
class Loose:
    x: int = 1
    none: Any = field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Theirs:
    x: int
    y: int = 2
    names: list[str] = dataclasses.field(default_factory=list, repr=False, compare=False)


def test_constructors_are_those_of_dataclasses() -> None:
    assert (Point(1).x, Point(1).y, Point(1).names) == (1, 2, [])
    assert Point(1).names is not Point(1).names
    assert vars(Point(1, names=["a"], y=3)) == {"x": 1, "y": 3, "names": ["a"]}
    assert repr(Point(1)) == repr(Theirs(1)).replace("Theirs", "Point")
    assert Point(1) == Point(1, names=["a"]) != Point(2) and Point(1) != Theirs(1)
    assert hash(Point(1)) == hash(Theirs(1))
    assert Loose() == Loose(none=3) and Loose.__hash__ is None
    assert inspect.signature(Point) == inspect.signature(Theirs).replace(
        return_annotation=inspect.signature(Point).return_annotation
    )


@pytest.mark.parametrize(
    "arguments",
    [((), {}), ((1, 2, [], 4), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((), {"y": 1})],
    ids=str,
)
def test_invalid_arguments_are_a_type_error(
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
) -> None:
    values, named = arguments
    with pytest.raises(TypeError):
        Theirs(*values, **named)
    with pytest.raises(TypeError, match="argument"):
        Point(*values, **named)


def test_frozen_instances_cannot_be_changed() -> None:
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        del point.x
    assert point.x == 1
    loose = Loose()
    loose.x = 5
    assert loose.x == 5


def test_instances_can_be_copied() -> None:
    point = Point(1, names=["a"])
    assert (
        vars(replace(point, x=4))
        == vars(dataclasses.replace(point, x=4))
        == {"x": 4, "y": 2, "names": ["a"]}
    )
    assert vars(copy.deepcopy(point)) == vars(pickle.loads(pickle.dumps(point))) == vars(point)
    with pytest.raises(TypeError):
        replace(point, z=1)


def test_functions_of_the_dataclasses_module_work() -> None:
    assert dataclasses.is_dataclass(Point) and dataclasses.is_dataclass(Point(1))
    assert dataclasses.asdict(Point(1, names=["a"])) == {"x": 1, "y": 2, "names": ["a"]}
    assert [one.name for one in dataclasses.fields(Point)] == ["x", "y", "names"]
    match Point(7, 8):
        case Point(x, y):
            assert (x, y) == (7, 8)
