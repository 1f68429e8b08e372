"""Which adapters an engine serves beside its base: their names, and where their factors stand."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from astrai_core.checkpoint.adapter import AdapterFiles, fitting_factors, read_adapter
from astrai_core.errors import AstraiError, ConfigError, RequestError
from astrai_core.model.adapter_slots import AdapterSlots
from astrai_core.model.transformer import CausalLM
from astrai_infer.config import DEFAULT_LORA_RANK, LORA_RANKS, EngineConfig


@dataclass(eq=False)
class Adapter:
    """One that was loaded. Requests hold on to it, also after it was unloaded."""

    name: str
    path: str
    slot: int
    number: int
    """No other has it, not even one of the same name: pages of the prefix cache are told apart by it."""
    unloaded: bool = False


@dataclass(frozen=True)
class PreparedAdapter:
    """One that was read and fits."""

    name: str
    files: AdapterFiles
    factors: Mapping[str, tuple[Tensor, Tensor]]
    """As :meth:`AdapterSlots.write` takes them."""


class AdapterTable:
    """The adapters of one engine, by name.

    Parameters
    ----------
    slots
        Where their factors stand; None: the engine has no room for any.

    Attributes
    ----------
    loaded
        Name -> adapter, for those that new requests can ask for.
    """

    def __init__(self, slots: AdapterSlots | None) -> None:
        self.slots = slots
        self.loaded: dict[str, Adapter] = {}
        self._numbers = itertools.count(1)

    def find(self, name: str) -> Adapter:
        """Return an adapter by its name.

        Raises
        ------
        RequestError
            If it is not loaded.
        """
        adapter = self.loaded.get(name)
        if adapter is None:
            there = f"there are {', '.join(self.loaded)}" if self.loaded else "none is"
            raise RequestError(f"adapter {name!r} is not loaded, {there}; load it, or leave it out for the base")
        return adapter

    def prepare(self, name: str, directory: str | Path | AdapterFiles) -> PreparedAdapter:
        """Read an adapter and check that it fits; nothing changes yet, and steps may run meanwhile.

        Raises
        ------
        CheckpointError, ConfigError
            If a file is missing or damaged, or the adapter does not fit the model or the room; one line that says how.
        """
        if self.slots is None:
            raise ConfigError("this engine has no room for adapters; set max_loras when it is made")
        if not name:
            raise ConfigError("the name of an adapter is empty; give it one")
        files = directory if isinstance(directory, AdapterFiles) else read_adapter(directory)
        return PreparedAdapter(name, files, fitting_factors(self.slots, files))

    def put(self, prepared: PreparedAdapter, in_use: Collection[Adapter]) -> Adapter:
        """Bring an adapter to a slot that nobody needs, and let new requests find it. No step may run meanwhile.

        Parameters
        ----------
        in_use
            The adapters of live requests.

        Raises
        ------
        RequestError
            If the name is taken, or every slot.
        """
        assert self.slots is not None, "the adapter was prepared for a slot"
        if prepared.name in self.loaded:
            raise RequestError(f"adapter {prepared.name!r} is loaded already; unload it first, or take another name")
        taken = {adapter.slot for adapter in (*self.loaded.values(), *in_use)}
        free = [slot for slot in range(self.slots.n_slots) if slot not in taken]
        if not free:
            n_leaving = len(taken) - len(self.loaded)
            leaving = f", {n_leaving} of them by requests of adapters that were unloaded" if n_leaving else ""
            raise RequestError(
                f"all {self.slots.n_slots} slots for adapters are taken{leaving}; unload one, or raise max_loras"
            )
        files = prepared.files
        self.slots.write(free[0], prepared.factors, files.config.scale)
        adapter = Adapter(prepared.name, str(files.path), free[0], next(self._numbers))
        self.loaded[adapter.name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Let no new request find an adapter; its slot is free when its last request has ended.

        Raises
        ------
        RequestError
            If it is not loaded.
        """
        self.find(name).unloaded = True
        del self.loaded[name]

    @contextmanager
    def applied(self, name: str | None, n_tokens: int) -> Iterator[None]:
        """Let the model compute so many tokens of one adapter inside, or of none. No step may run meanwhile.

        Raises
        ------
        RequestError
            If it is not loaded.
        """
        if name is None:
            yield
            return
        slot = self.find(name).slot
        assert self.slots is not None, "what is loaded stands in a slot"
        with self.slots.applied(torch.full((n_tokens,), slot, device=self.slots.model.device)):
            yield

    def close(self) -> None:
        """Give the model back as it was. Idempotent."""
        if self.slots is not None:
            self.slots.detach()


def read_adapters(adapters: Mapping[str, str | Path | AdapterFiles]) -> dict[str, AdapterFiles]:
    """Read the directories of adapters that are not read yet.

    Raises
    ------
    CheckpointError, ConfigError
        See :func:`astrai_core.checkpoint.adapter.read_adapter`.
    """
    return {name: given if isinstance(given, AdapterFiles) else read_adapter(given) for name, given in adapters.items()}


def open_adapters(model: CausalLM, config: EngineConfig, adapters: Mapping[str, AdapterFiles]) -> AdapterTable:
    """Make room for adapters on a model, and load those that are there from the start.

    Raises
    ------
    CheckpointError, ConfigError
        If one does not fit the model, or they do not fit into ``max_loras`` and ``max_lora_rank``; the model is then as
        it was.
    """
    n_slots = len(adapters) if config.max_loras is None else config.max_loras
    if n_slots < len(adapters):
        raise ConfigError(f"{len(adapters)} adapters are given, max_loras is {n_slots}; raise it")
    if n_slots == 0:
        return AdapterTable(None)
    table = AdapterTable(AdapterSlots(model, n_slots, config.max_lora_rank or _rank_of(adapters)))
    try:
        for name, files in adapters.items():
            table.put(table.prepare(name, files), ())
    except AstraiError:
        table.close()
        raise
    return table


def _rank_of(adapters: Mapping[str, AdapterFiles]) -> int:
    """Return the least legal rank that holds all of them."""
    largest = max((files.config.rank for files in adapters.values()), default=DEFAULT_LORA_RANK)
    return next((rank for rank in LORA_RANKS if rank >= largest), LORA_RANKS[-1])
