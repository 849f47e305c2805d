"""A table of named factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from atas.errors import unknown

Factory = TypeVar("Factory", bound=Callable[..., object])


class Registry(Generic[Factory]):
    """Names in the order in which they were registered."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._factories: dict[str, Factory] = {}

    def register(self, name: str) -> Callable[[Factory], Factory]:
        """Decorate a factory to make it known as `name`."""

        def enter(factory: Factory) -> Factory:
            self._factories[name] = factory
            return factory

        return enter

    def names(self) -> list[str]:
        """All registered names."""
        return list(self._factories)

    def get(self, name: str) -> Factory:
        """The factory of that name, or an error that names the nearest one."""
        if name not in self._factories:
            raise unknown(self._kind, name, self._factories)
        return self._factories[name]
