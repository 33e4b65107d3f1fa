"""Earlier names of parameters, which callers may still use."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def renamed_parameter(earlier: str, name: str) -> Callable[[F], F]:
    """Returns a decorator that accepts the parameter also by its earlier name, with a warning."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if earlier in named:
                text = f"{function.__name__}(): the parameter {earlier} is now named {name}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                named[name] = named.pop(earlier)
            return function(*args, **named)

        return call  # type: ignore[return-value]

    return decorate
