"""The engine's end of the channel: one thread reads what is asked, the engine's own steps, one sends what it says.

The thread that steps only appends to a queue. Pickling and sending happen beside it, while it waits for the device.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from astrai_core.checkpoint.source import open_source
from astrai_core.errors import AstraiError, ModelNotFoundError
from astrai_infer.embedding import embed
from astrai_infer.engine import InferenceEngine
from astrai_infer.task import Delta
from astrai_infer.wire import (
    Abort,
    Accepted,
    Batch,
    Call,
    End,
    EngineInfo,
    Failed,
    Piece,
    Ready,
    Refused,
    Reply,
    Returned,
    Submit,
    pack,
    read_messages,
    request_id,
)

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
"""An engine that has nothing to say says how it is this often."""

LOAD_ERRORS = (AstraiError, OSError, RuntimeError, ValueError, MemoryError)
"""What building an engine can raise: files, memory, devices."""


def _pause(engine: InferenceEngine) -> dict[str, Any]:
    engine.pause()
    return _state(engine)


def _resume(engine: InferenceEngine) -> dict[str, Any]:
    engine.resume()
    return _state(engine)


def _sleep(engine: InferenceEngine) -> dict[str, Any]:
    engine.sleep()
    return _state(engine)


def _update_weights(engine: InferenceEngine, path: str, version: int) -> dict[str, Any]:
    if not Path(path).exists():  # a name must not start a download
        raise ModelNotFoundError(f"path {path}: there is no such file or directory on the server")
    engine.update_weights(open_source(path).tensors(), version)
    return _state(engine)


def _state(engine: InferenceEngine) -> dict[str, Any]:
    health = engine.health()
    return {"status": health.status, "weight_version": health.weight_version}


CALLS: dict[str, Callable[..., Any]] = {
    "embed": embed,
    "pause": _pause,
    "resume": _resume,
    "sleep": _sleep,
    "update_weights": _update_weights,
    "load_adapter": InferenceEngine.load_adapter,
    "unload_adapter": InferenceEngine.unload_adapter,
}
"""Name -> function of the engine and the call's arguments, run beside the steps."""


class EngineHost:
    """Serves one engine to one client, until the client is gone or the engine stops."""

    def __init__(self, engine: InferenceEngine, channel: socket.socket) -> None:
        self._engine = engine
        self._channel = channel
        self._outbox: deque[Reply] = deque()
        self._wake = threading.Event()
        self._done = False
        # Grammars do not wait for embeddings, nor a pause for a few of them.
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="astrai-compile")
        self._callers = ThreadPoolExecutor(4, thread_name_prefix="astrai-call")
        self._compiling: set[int] = set()
        """Keys of requests whose grammar is being compiled; an abort takes them out."""

    def run(self) -> None:
        """Serve; returns when it is over. The engine is left to its owner."""
        engine, pool = self._engine, self._engine.pool
        self._say(
            Ready(
                EngineInfo(
                    vocab_size=engine.model.config.vocab_size,
                    max_seq_len=min(engine.max_seq_len, pool.capacity),
                    max_num_seqs=engine.config.max_num_seqs,
                    n_pages=pool.n_free + pool.n_cached + pool.n_used,
                    adapters={name: adapter.path for name, adapter in engine.adapters.loaded.items()},
                )
            )
        )
        sender = threading.Thread(target=self._send, name="astrai-sender")
        sender.start()
        try:
            for message in read_messages(self._channel):
                self._handle(message)
        finally:
            self._done = True
            self._wake.set()
            sender.join()
            self._compilers.shutdown(cancel_futures=True)
            self._callers.shutdown(cancel_futures=True)

    def _handle(self, message: Submit | Abort | Call) -> None:
        if isinstance(message, Abort):
            self._compiling.discard(message.key)
            self._engine.abort(request_id(message.key))
        elif isinstance(message, Call):
            self._run_beside(self._callers, self._call, message)
        elif message.request.params.structured is not None:  # compiling may take a second
            self._compiling.add(message.key)
            self._run_beside(self._compilers, self._submit, message)
        else:
            self._submit(message)

    def _run_beside(self, pool: ThreadPoolExecutor, work: Callable[[Any], None], message: Submit | Call) -> None:
        def check(future: Future[None]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                what = message.name if isinstance(message, Call) else request_id(message.key)
                logger.error("%s failed", what, exc_info=error)
                said = f"{what} failed: {type(error).__name__}; the server's log says more"
                self._say(Refused(message.key, "EngineError", said))  # its waiter would wait for ever

        pool.submit(work, message).add_done_callback(check)

    def _submit(self, message: Submit) -> None:
        key, params = message.key, message.request.params
        try:
            self._engine.submit(message.request, self._deliver(key))
            if params.structured is not None and key not in self._compiling:  # aborted before it was queued
                self._engine.abort(message.request.request_id)
        except AstraiError as error:
            self._say(Refused(key, type(error).__name__, str(error)))
            return
        finally:
            self._compiling.discard(key)
        self._say(Accepted(key))

    def _deliver(self, key: int) -> Callable[[Delta], None]:
        def deliver(delta: Delta) -> None:
            done = delta.completion
            end = None
            if done is not None:
                end = End(
                    done.finish_reason,
                    done.stop_reason,
                    done.usage,
                    done.prompt_logprobs,
                    done.weight_version,
                    done.error,
                )
            self._say(Piece(key, delta.choice, delta.text, delta.token_ids, delta.logprobs, end))

        return deliver

    def _call(self, message: Call) -> None:
        try:
            value = CALLS[message.name](self._engine, *message.arguments)
        except (AstraiError, RuntimeError, MemoryError) as error:
            kind = type(error).__name__ if isinstance(error, AstraiError) else "EngineError"
            self._say(Refused(message.key, kind, str(error).partition("\n")[0]))
            return
        self._say(Returned(message.key, value))

    def _say(self, reply: Reply) -> None:
        self._outbox.append(reply)
        if not self._wake.is_set():
            self._wake.set()

    def _send(self) -> None:
        """Send everything that is there as one batch, so that a busy engine makes few of them."""
        outbox = self._outbox
        with contextlib.suppress(OSError):  # the client is gone, which the reader sees as well
            try:
                while not self._done:
                    self._wake.wait(HEARTBEAT_S)
                    self._wake.clear()
                    health = self._engine.health()
                    self._channel.sendall(pack(Batch([outbox.popleft() for _ in range(len(outbox))], health)))
                    if health.status == "stopped":
                        return
            finally:  # however it ends: a client that hears nothing more must not wait
                self._channel.shutdown(socket.SHUT_RDWR)


def host_main(make_engine: Callable[[], InferenceEngine], channel: socket.socket) -> None:
    """Run an engine's process: build it, serve it, end when the client is gone.

    Signals of the terminal or of a service manager reach the whole group; the server alone answers them, by draining.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    load_and_serve(make_engine, channel)


def load_and_serve(make_engine: Callable[[], InferenceEngine], channel: socket.socket) -> None:
    """Build an engine and serve it until the client is gone; tell the client if it cannot be built."""
    with channel:
        try:
            engine = make_engine()
        except LOAD_ERRORS as error:
            kind = type(error).__name__ if isinstance(error, AstraiError) else "EngineError"
            failed = Failed(kind, " ".join(str(error).split()) or type(error).__name__)
            channel.sendall(pack(Batch([failed], None)))
            return
        with engine:
            EngineHost(engine, channel).run()
