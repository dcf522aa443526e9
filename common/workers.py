# SPDX-License-Identifier: Apache-2.0
"""Run tasks in fresh processes with a deadline each.

Interpreted kernels can wait for ever (an exception on one virtual device leaves the others in a barrier), and one
interpreter uses one core. So tasks go to spawned processes, one at a time each; a process that misses the deadline or
dies costs its task, is killed, and is replaced.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any


class TaskFailed(Exception):
    """A task that gave no result: it missed its deadline or its process died."""


# The state that `make_handler` built in this worker is kept between its tasks.
Handler = Callable[[Any], Any]


def _serve(connection: Connection, make_handler: Callable[..., Handler], arguments: tuple[Any, ...]) -> None:
    """A worker's life: build the handler, then answer tasks until the parent closes the pipe."""
    handler = make_handler(*arguments)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(handler(task))


class _Worker:
    def __init__(self, make_handler: Callable[..., Handler], arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make_handler, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.task: int | None = None
        self.deadline = 0.0

    def give(self, index: int, task: Any, timeout: float) -> None:
        self.task, self.deadline = index, time.monotonic() + timeout
        self.connection.send(task)

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def run_tasks(
    tasks: Sequence[Any],
    make_handler: Callable[..., Handler],
    arguments: tuple[Any, ...],
    *,
    count: int,
    timeout: float,
) -> Iterator[tuple[int, Any]]:
    """Yield ``(index, result)`` of each task as it is done; a `TaskFailed` stands for a missing result.

    Args:
      tasks: picklable.
      make_handler: importable; called once a worker with `arguments`, returns what answers a task. The handler
        must turn its own exceptions into results.
      count: worker processes.
      timeout: seconds a task may take, the worker's start included.
    """
    workers: list[_Worker] = []
    queue = list(enumerate(tasks))[::-1]
    try:
        for _ in range(min(count, len(tasks))):
            workers.append(_Worker(make_handler, arguments))
            workers[-1].give(*queue.pop(), timeout)
        while any(worker.task is not None for worker in workers):
            busy = {worker.connection: i for i, worker in enumerate(workers) if worker.task is not None}
            patience = max(0.0, min(workers[i].deadline for i in busy.values()) - time.monotonic())
            ready = {busy[c] for c in wait(list(busy), patience)}  # type: ignore[index]
            for i in busy.values():
                worker = workers[i]
                index, result = worker.task, None
                if i in ready:
                    try:
                        result = worker.connection.recv()
                    except (EOFError, OSError):
                        result = TaskFailed(f"its process ended with code {_exit_code(worker)}")
                elif time.monotonic() >= worker.deadline:
                    result = TaskFailed(f"no result within {timeout:.0f} s")
                else:
                    continue
                if isinstance(result, TaskFailed):
                    worker.stop()
                    workers[i] = worker = _Worker(make_handler, arguments)
                worker.task = None
                if queue:
                    worker.give(*queue.pop(), timeout)
                yield index, result  # type: ignore[misc]
    finally:
        for worker in workers:
            worker.stop()


def _exit_code(worker: _Worker) -> int | None:
    worker.process.join(5)
    return worker.process.exitcode
