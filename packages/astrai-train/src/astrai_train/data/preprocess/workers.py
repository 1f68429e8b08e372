"""Worker processes that make parts.

A worker gets the job once and then pieces, as places in files: it reads its own input and writes its own output, so the
first process neither holds nor passes on a row. It is an interpreter of its own rather than one of
`multiprocessing`, which would import the caller's main module again in each (with torch: 2 s and 200 MB).
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Self

from astrai_core.errors import AstraiError, DataError
from astrai_train.data.preprocess.encode import Encoder
from astrai_train.data.preprocess.files import Piece
from astrai_train.data.preprocess.part import Job, Summary, make_part

MAX_WORKERS = 16
"""Processes that are started unasked. Each takes 60 to 90 MB of its own: more of them would pass 2 GB. Further cores
become threads of the tokenizer."""

_START = "import sys; sys.path[:] = sys.argv[1:]; from astrai_train.data.preprocess.workers import main; main()"


class _Worker:
    """The first process's end of one worker."""

    def __init__(self, job: bytes, n_threads: int) -> None:
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "true" if n_threads > 1 else "false",
            "RAYON_NUM_THREADS": str(n_threads),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", _START, *sys.path]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._job: bytes | None = job

    def make(self, number: int, piece: Piece) -> Summary:
        """Have a part made."""
        assert self.process.stdin is not None, "opened as a pipe"
        assert self.process.stdout is not None, "opened as a pipe"
        try:
            if self._job is not None:
                self.process.stdin.write(self._job)
                self._job = None
            pickle.dump((number, piece), self.process.stdin)
            self.process.stdin.flush()
            answer = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self.process.wait()
            how = f"signal {-code}, out of memory?" if code < 0 else f"exit status {code}"
            raise DataError(
                f"{piece.file}: a worker process died of it ({how}); lower workers or chunk_bytes and run again, what is "
                "finished is kept"
            ) from None
        if isinstance(answer, Summary):
            return answer
        raise answer

    def end(self) -> None:
        """End it at once; what it has not finished is made again by another run."""
        self.process.kill()

    def close(self) -> None:
        """Wait for its end, once no thread talks to it."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None, "opened as a pipe"
            try:
                pipe.close()
            except BrokenPipeError:  # bytes that the worker did not read any more
                continue


class WorkerPool:
    """Worker processes, each started with its first piece; a context manager, at whose end they are gone.

    Parameters
    ----------
    job
        What all pieces share.
    n_workers
        Processes at most.
    n_threads
        Threads of the tokenizer in each.
    """

    def __init__(self, job: Job, n_workers: int, n_threads: int) -> None:
        self._job, self._n_threads = pickle.dumps(job), n_threads
        self._threads = ThreadPoolExecutor(n_workers)
        self._mine = threading.local()
        self._workers: list[_Worker] = []
        self._lock, self._ended = threading.Lock(), False

    def submit(self, number: int, piece: Piece) -> Future[Summary]:
        """Have a part made by the next worker that is free.

        Raises
        ------
        DataError
            Of the result: that of `make_part`, or a worker died.
        """
        return self._threads.submit(self._make, number, piece)

    def _make(self, number: int, piece: Piece) -> Summary:
        worker: _Worker | None = getattr(self._mine, "worker", None)
        if worker is None:
            with self._lock:
                if self._ended:
                    raise DataError("the run was stopped; start it again, what is finished is kept")
                worker = self._mine.worker = _Worker(self._job, self._n_threads)
                self._workers.append(worker)
        return worker.make(number, piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._ended = True
        for worker in self._workers:
            worker.end()
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()


def main() -> None:
    """Be a worker: the job and pieces from standard input, summaries or errors to standard output, both pickled."""
    # Ctrl-C reaches every process of the group; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(os.fdopen(os.dup(0), "rb"), requests), daemon=True).start()
    job: Job = requests.get()
    encoder = Encoder(job.config, job.tokenizer)
    for number, piece in iter(requests.get, None):
        answer: Summary | AstraiError | OSError
        try:
            answer = make_part(job, encoder, number, piece)
        except (AstraiError, OSError) as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def _listen(stream: BinaryIO, requests: queue.SimpleQueue[Any]) -> None:
    """Pass requests on; end this process, whatever it does, when the one that started it is gone."""
    try:
        while True:
            requests.put(pickle.load(stream))
    except (EOFError, pickle.UnpicklingError):
        os._exit(1)
    finally:
        requests.put(None)
