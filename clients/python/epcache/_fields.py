"""dataclass, field and replace as in the dataclasses module, but cheap at import.

That module generates and compiles up to seven methods for each class at import: a millisecond a
class on a slow machine, in total more than the daemon needs for a hit. The classes here share their
methods. Type checkers see the dataclasses module; dataclasses.asdict, fields, replace and
inspect.signature work, because a real dataclass is created when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
else:

    def dataclass(cls: Any = None, /, *, frozen: bool = False) -> Any:
        if cls is None:
            return lambda one: dataclass(one, frozen=frozen)
        shape = _Shape(cls, frozen)
        methods = {
            "__init__": _init,
            "__repr__": _repr,
            "__eq__": _eq,
            "__hash__": _hash if frozen else None,
            "__replace__": replace,
        }
        if frozen:
            methods.update(__setattr__=_raise_frozen, __delattr__=_raise_frozen)
        for name, method in methods.items():
            if name not in cls.__dict__:
                setattr(cls, name, method)
        cls.__match_args__ = shape.names
        cls._shape = shape
        cls.__dataclass_fields__ = _Lazy(lambda cls: cls.__dataclass_fields__)
        cls.__signature__ = _Lazy(_signature)
        return cls

    def field(
        *, default: Any = None, default_factory: Any = None, repr: bool = True, compare: bool = True
    ) -> Any:
        return _Field(default_factory or (lambda: default), repr, compare)

    def replace(one: Any, /, **changes: Any) -> Any:
        return type(one)(**{**{name: getattr(one, name) for name in one._shape.names}, **changes})


class _Field:
    __slots__ = ("compare", "factory", "repr")

    def __init__(self, factory: Any, repr: bool, compare: bool) -> None:
        self.factory, self.repr, self.compare = factory, repr, compare


class _Shape:
    """The fields of a class."""

    __slots__ = ("compared", "defaults", "factories", "frozen", "known", "names", "shown")

    def __init__(self, cls: Any, frozen: bool) -> None:
        self.frozen = frozen
        self.names = tuple(cls.__annotations__)
        self.known = frozenset(self.names)
        given = {name: cls.__dict__[name] for name in self.names if name in cls.__dict__}
        self.factories = {name: one for name, one in given.items() if isinstance(one, _Field)}
        self.defaults = {name: one for name, one in given.items() if name not in self.factories}
        for name in self.factories:
            delattr(cls, name)
        self.shown = tuple(
            name for name in self.names if name not in self.factories or self.factories[name].repr
        )
        self.compared = tuple(
            name
            for name in self.names
            if name not in self.factories or self.factories[name].compare
        )


def _init(self: Any, *values: Any, **named: Any) -> None:
    shape, fields = self._shape, self.__dict__
    fields.update(shape.defaults)
    fields.update(zip(shape.names, values))  # noqa: B905
    wrong = (
        len(values) > len(shape.names)
        or not named.keys() <= shape.known
        or not named.keys().isdisjoint(shape.names[: len(values)])
    )
    fields.update(named)
    for name, one in shape.factories.items():
        if name not in fields:
            fields[name] = one.factory()
    if wrong or len(fields) != len(shape.names):
        fields.clear()
        type(self).__signature__.bind(*values, **named)  # raises TypeError with the reason
        raise TypeError(f"{type(self).__name__}: the fields do not fit")


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shape.shown)
    return f"{type(self).__qualname__}({shown})"


def _values(one: Any) -> tuple[Any, ...]:
    return tuple(getattr(one, name) for name in one._shape.compared)


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _raise_frozen(self: Any, name: str, *_: Any) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


class _Lazy:
    """A class attribute that is computed at first use from the equivalent dataclass."""

    __slots__ = ("_made", "_of")

    def __init__(self, of: Any) -> None:
        self._of, self._made = of, None

    def __get__(self, _: Any, cls: Any) -> Any:
        if self._made is None:
            self._made = self._of(_dataclass(cls))
        return self._made


def _dataclass(cls: Any) -> Any:
    import dataclasses

    shape = cls._shape
    fields: dict[str, Any] = {
        name: dataclasses.field(default_factory=one.factory, repr=one.repr, compare=one.compare)
        for name, one in shape.factories.items()
    }
    body = {
        **shape.defaults,
        **fields,
        "__annotations__": cls.__annotations__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return dataclasses.dataclass(frozen=shape.frozen)(type(cls.__name__, (), body))


def _signature(cls: Any) -> Any:
    import inspect

    return inspect.signature(cls)
