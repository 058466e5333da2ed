"""What happens when something is lost: tasks run again, and those that made what they need (lineage). No torch."""

from __future__ import annotations

from collections.abc import Iterable

from genserve.t2i.books import HOME, Books
from genserve.t2i.endings import Endings
from genserve.t2i.instance import Task, Value, reads
from genserve.t2i.ledger import ExecutorState, Flight, reachable
from genserve.t2i.messages import GIVE_UP, GiveUp, Key, Missed

_MAX_MISSES = 20


class Recovery:
    def __init__(self, books: Books, endings: Endings) -> None:
        self._books, self._endings = books, endings

    def missed(self, task: Task, flight: Flight, missed: Missed) -> None:
        if flight.executor.up:
            for _, key in flight.fetched:
                self._books.ledger.release_key(flight.executor.space, key)
        task.misses += 1
        if task.misses > _MAX_MISSES:
            task.errors.append(f"on {flight.executor.name}: {missed.reason}")
            self.give_up(task, "never found its inputs")
            return
        for key in missed.keys:
            value, space = flight.reads.get(key, (None, ""))
            if value is not None and space:
                self.unreachable(value, space, key)
        self.retry(task)

    def unreachable(self, value: Value, space: str, key: Key) -> None:
        """It couldn't be had there."""
        if value.places.get(space, (None,))[0] == key:
            self._books.ledger.forget_place(value, space)
            self._books.ledger.release_key(space, key)
            self.restore([value])

    def retry(self, task: Task) -> None:
        """The task is to run again. Who waits for it on an executor that it may need must not."""
        task.job.num_reruns += 1
        self._books.num["num_reruns"] += 1
        for consumer in task.consumers:
            flight: Flight | None = consumer.flight
            if (
                flight is not None
                and not flight.given_up
                and any(value.task is task for value in flight.awaits)
            ):
                flight.given_up = True
                self._books.aside(flight.executor.io_lane, GIVE_UP, GiveUp((flight.run_id,)))
            self._books.consider(consumer)
        self._books.consider(task)

    def give_up(self, task: Task, what: str) -> None:
        where = f" ({task.node.where})" if task.node.where else ""
        self._endings.end(
            task.job, "ExecutionFailed", f"{task.node.id}{where} {what}: {'; '.join(task.errors)}"
        )

    def lose(self, executor: ExecutorState) -> None:
        if not executor.up:
            return
        executor.lost()
        if executor.space == HOME or any(
            other.up and other.space == executor.space for other in self._books.executors.values()
        ):
            return
        self.restore(self._books.ledger.lose(executor.space))

    def restore(self, values: Iterable[Value]) -> None:
        """Have those made again that are needed and gone, and what they are made from (lineage)."""
        stack = list(values)
        again: list[Task] = []
        while stack:
            value = stack.pop()
            task = value.task
            if value.is_inline or task is None or task.state != "done" or task.job.ending:
                continue
            if value.places and not reachable(value, HOME):
                self._books.ledger.release(value)
            if value.places or not task.job.is_wanted(value):
                continue
            task.state = "waiting"
            task.job.num_undone += task.of_preview is None
            task.job.num_reruns += 1
            self._books.num["num_reruns"] += 1
            for read in reads(task):
                read.uses += 1
                stack.append(read)
            again.append(task)
        for task in again:
            self._books.consider(task)
            for consumer in task.consumers:
                self._books.consider(consumer)
