"""What server and engine say to each other, and how it travels: frames of pickled records over a socket. No torch here.

Pickle is safe here because both ends are the same program: the socket is a private pair and never leaves the machine.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from astrai_core.types import FinishReason, Request, TokenLogprobs, Usage
from astrai_infer.metrics import Health

_LENGTH = struct.Struct(">Q")

AT_ONCE = 1 << 18
"""Bytes that are read in one turn of an event loop: some 3,000 pieces, which take it 10 ms."""


@dataclass(frozen=True)
class EngineInfo:
    """What does not change while an engine lives."""

    vocab_size: int
    max_seq_len: int
    """Longest prompt and completion together, in tokens."""
    max_num_seqs: int
    n_pages: int
    """Of the KV cache, over all groups of layers."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Name -> directory of those that are loaded from the start."""


@dataclass(frozen=True)
class Submit:
    """Complete a request; answered by :class:`Accepted` or :class:`Refused`, then by pieces."""

    key: int
    request: Request


@dataclass(frozen=True)
class Abort:
    """End a request; its choices end with reason "abort" unless they had ended."""

    key: int


@dataclass(frozen=True)
class Call:
    """Run one of the host's named calls; answered by :class:`Returned` or :class:`Refused`."""

    key: int
    name: str
    arguments: tuple[Any, ...]


class Ready(NamedTuple):
    """The engine is loaded."""

    info: EngineInfo


class Failed(NamedTuple):
    """The engine could not be made."""

    kind: str
    """Name of a class of :mod:`astrai_core.errors`."""
    message: str


class Accepted(NamedTuple):
    """The request is queued."""

    key: int


class Refused(NamedTuple):
    """The request or call failed."""

    key: int
    kind: str
    """Name of a class of :mod:`astrai_core.errors`."""
    message: str


class Returned(NamedTuple):
    """What a call returned."""

    key: int
    value: Any


class End(NamedTuple):
    """How a choice ended; see :class:`astrai_core.types.Completion`."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    weight_version: int
    error: str | None


class Piece(NamedTuple):
    """The next piece of a choice; see :class:`astrai_infer.task.Delta`."""

    key: int
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    end: End | None


Reply = Ready | Failed | Accepted | Refused | Returned | Piece


class Batch(NamedTuple):
    """All that an engine has to say since the last batch."""

    replies: list[Reply]
    health: Health | None


def request_id(key: int) -> str:
    """Return the engine's name for a request of the channel."""
    return f"wire-{key}"


def pack(message: object) -> bytes:
    """Return a message as a frame: its length in 8 bytes, and the pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def read_messages(channel: socket.socket) -> Iterator[Any]:
    """Yield messages from a blocking socket until the other end is gone."""
    with channel.makefile("rb") as file:
        while (head := _read(file, _LENGTH.size)) is not None:
            body = _read(file, *_LENGTH.unpack(head))
            if body is None:
                return
            yield pickle.loads(body)


def _read(file: BinaryIO, length: int) -> bytes | None:
    """Return so many bytes, or None if the other end is gone."""
    try:
        data = file.read(length)
    except ConnectionResetError:  # it left without reading all that it was sent
        return None
    return data if len(data) == length else None


class Receiver:
    """Reads messages from an asyncio stream: all that have come, so that one that is behind gets many at once."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._data = bytearray()

    async def receive(self) -> list[Any]:
        """Return the messages that have come, at least one.

        Raises
        ------
        EOFError
            If the other end is gone.
        """
        messages: list[Any] = []
        while not messages:
            data = await self._reader.read(AT_ONCE)
            if not data:
                raise EOFError("the other end is gone")
            self._data += data
            start = 0
            while len(self._data) >= (body := start + _LENGTH.size):
                end = body + _LENGTH.unpack_from(self._data, start)[0]
                if len(self._data) < end:
                    break
                messages.append(pickle.loads(self._data[body:end]))
                start = end
            del self._data[:start]
        return messages
