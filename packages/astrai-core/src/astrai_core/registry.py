"""One factory for every open set of named components (models, backends, optimizers, schedules, ...).

class ShapeFactory(BaseFactory[Shape]):
    '''Shapes by name.'''

@ShapeFactory.register("circle")
class Circle(Shape): ...

ShapeFactory.register("round", Circle)                   # an alias
ShapeFactory.register("hexagon", "my_shapes:Hexagon")    # imported at first use
ShapeFactory.create("circle", radius=2.0)
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, overload

from astrai_core.errors import RegistryError

T = TypeVar("T")
C = TypeVar("C", bound=type)


def closest(name: str, known: typing.Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name nearest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


class BaseFactory(Generic[T]):
    """A registry of the subclasses of one base type, created by name.

    Subclass it with the base type: ``class XFactory(BaseFactory[X])``. The type may be given as a string if that
    name is defined in the factory's module. Each subclass owns its own table.
    """

    _component_base: ClassVar[type]
    _entries: ClassVar[dict[str, type | str]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._component_base = _resolve_base(cls)
        cls._entries = {}

    @overload
    @classmethod
    def register(cls, name: str) -> Callable[[C], C]: ...
    @overload
    @classmethod
    def register(cls, name: str, target: C) -> C: ...
    @overload
    @classmethod
    def register(cls, name: str, target: str) -> str: ...
    @classmethod
    def register(cls, name: str, target: Any = None) -> Any:
        """Register `target` (a class, or a lazy ``"module:attr"``) under `name`; without it, act as a decorator.

        Returns
        -------
        The class or string that was registered, unchanged.

        Raises
        ------
        RegistryError
            If the name is taken, or the class does not derive from the factory's base type.
        """
        if target is None:
            return lambda component: cls.register(name, component)
        if name in cls._entries:
            raise RegistryError(f"{cls.__name__}: {name!r} is already registered; choose another name")
        if isinstance(target, str):
            if target.count(":") != 1:
                raise RegistryError(f"{cls.__name__}: lazy entry {target!r} must be written 'module:attribute'")
        else:
            cls._check(name, target)
        cls._entries[name] = target
        return target

    @classmethod
    def names(cls) -> list[str]:
        """Return the registered names, sorted."""
        return sorted(cls._entries)

    @classmethod
    def get(cls, name: str) -> type[T]:
        """Return the class registered under `name`, importing it first if its entry is lazy.

        Raises
        ------
        RegistryError
            If the name is unknown; the message lists the names there are.
        """
        entry = cls._entries.get(name)
        if entry is None:
            raise RegistryError(
                f"{cls.__name__}: unknown name {name!r}{closest(name, cls._entries)}; "
                f"choose one of {', '.join(cls.names()) or '(nothing is registered)'}"
            )
        if isinstance(entry, str):
            module, attribute = entry.split(":")
            component = getattr(importlib.import_module(module), attribute)
            cls._check(name, component)
            cls._entries[name] = entry = component
        return typing.cast("type[T]", entry)

    @classmethod
    def create(cls, name: str, /, *args: Any, **kwargs: Any) -> T:
        """Construct the component registered under `name`.

        Raises
        ------
        RegistryError
            If the name is unknown or the constructor does not take these arguments.
        """
        component = cls.get(name)
        try:
            inspect.signature(component).bind(*args, **kwargs)
        except TypeError as error:
            accepted = ", ".join(inspect.signature(component).parameters) or "no arguments"
            raise RegistryError(f"{cls.__name__}: {name!r}: {error}; it accepts {accepted}") from None
        return component(*args, **kwargs)

    @classmethod
    def _check(cls, name: str, component: object) -> None:
        if not (inspect.isclass(component) and issubclass(component, cls._component_base)):
            raise RegistryError(
                f"{cls.__name__}: {name!r} must be a subclass of {cls._component_base.__name__}, got {component!r}"
            )


def _resolve_base(factory: type) -> type:
    """Find X in ``class Factory(BaseFactory[X])``; a string X is looked up in the factory's module."""
    for base in getattr(factory, "__orig_bases__", ()):
        if isinstance(origin := typing.get_origin(base), type) and issubclass(origin, BaseFactory):
            (argument,) = typing.get_args(base)
            holder = type("_Holder", (), {"__annotations__": {"base": argument}})
            namespace = vars(sys.modules[factory.__module__])
            try:
                resolved = typing.get_type_hints(holder, globalns=namespace)["base"]
            except NameError as error:
                raise TypeError(f"{factory.__name__}: base type {argument!r} is not defined: {error}") from None
            if inspect.isclass(resolved):
                return resolved
    raise TypeError(f"{factory.__name__} must name its base type: class {factory.__name__}(BaseFactory[Base])")
