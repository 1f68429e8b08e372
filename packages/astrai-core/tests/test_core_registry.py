"""Row F1: one factory for every open set of named components."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from astrai_core.errors import RegistryError
from astrai_core.registry import BaseFactory


class Shape:
    def __init__(self, size: float = 1.0) -> None:
        self.size = size


class ShapeFactory(BaseFactory[Shape]):
    """By class."""


class Named(Shape):
    """A base type that is named by a string below."""


class NamedFactory(BaseFactory["Named"]):
    """By a string that names a class of this module."""


@pytest.fixture
def factory():
    class Fresh(BaseFactory[Shape]):
        """A table of its own for each test."""

    return Fresh


def test_register_returns_the_class_and_create_builds_it(factory):
    @factory.register("round")
    class Round(Shape):
        """A circle."""

    assert Round.__name__ == "Round"
    assert factory.register("circle", Round) is Round
    assert isinstance(factory.create("circle", size=2.0), Round)
    assert factory.names() == ["circle", "round"]


def test_duplicates_are_refused(factory):
    factory.register("a", Shape)
    with pytest.raises(RegistryError, match="'a' is already registered"):
        factory.register("a", Shape)


def test_unknown_name_lists_the_choices(factory):
    factory.register("square", Shape)
    with pytest.raises(RegistryError, match=r"unknown name 'sqare' \(did you mean 'square'\?\); choose one of square"):
        factory.create("sqare")


def test_unknown_keyword_is_refused(factory):
    factory.register("square", Shape)
    with pytest.raises(RegistryError, match="'sise'.*it accepts size"):
        factory.create("square", sise=3)


def test_an_error_inside_the_constructor_is_not_disguised(factory):
    @factory.register("broken")
    class Broken(Shape):
        def __init__(self) -> None:
            raise TypeError("from inside")

    with pytest.raises(TypeError, match="from inside") as caught:
        factory.create("broken")
    assert not isinstance(caught.value, RegistryError)


def test_wrong_base_type_is_refused(factory):
    with pytest.raises(RegistryError, match="must be a subclass of Shape"):
        factory.register("dict", dict)


def test_lazy_entries_import_at_first_use(factory, monkeypatch):
    module = ModuleType("lazy_shapes")
    module.Hexagon = type("Hexagon", (Shape,), {})
    module.NotAShape = dict
    factory.register("hexagon", "lazy_shapes:Hexagon")
    factory.register("wrong", "lazy_shapes:NotAShape")
    assert factory.names() == ["hexagon", "wrong"], "listing names imports nothing"
    monkeypatch.setitem(sys.modules, "lazy_shapes", module)
    assert factory.get("hexagon") is module.Hexagon
    with pytest.raises(RegistryError, match="must be a subclass of Shape"):
        factory.get("wrong")
    with pytest.raises(RegistryError, match="must be written 'module:attribute'"):
        factory.register("bad", "lazy_shapes.Hexagon")


def test_each_factory_has_its_own_table(factory):
    factory.register("only-here", Shape)
    assert "only-here" not in ShapeFactory.names()
    assert factory._component_base is ShapeFactory._component_base is Shape


def test_the_base_type_must_be_named_and_known():
    with pytest.raises(TypeError, match="must name its base type"):
        type("Nameless", (BaseFactory,), {})
    with pytest.raises(TypeError, match="base type .*Nowhere.* is not defined"):

        class Dangling(BaseFactory["Nowhere"]):
            """Its forward reference resolves to nothing."""


def test_forward_reference_resolves_in_the_factorys_module():
    NamedFactory.register("named", Named)
    assert NamedFactory._component_base is Named
    with pytest.raises(RegistryError, match="must be a subclass of Named"):
        NamedFactory.register("shape", Shape)
