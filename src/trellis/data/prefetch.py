"""An iterator that works ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Prefetched(Generic[T]):
    """Runs a generator in a thread, at most `depth` items ahead; its exceptions come through.

    `close` ends the thread; the generator is closed there.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while True:
            kind, value = self._queue.get()
            if kind == "item":
                yield value
            elif kind == "error":
                raise value
            else:
                return

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:  # the thread may be waiting for room
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def _run(self, items: Any) -> None:
        try:
            with closing(items):
                for item in items:
                    self._queue.put(("item", item))
                    if self._stop.is_set():
                        return
            self._queue.put(("end", None))
        except BaseException as error:  # handed to the thread that waits
            self._queue.put(("error", error))
