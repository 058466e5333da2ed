"""One request as the coordinator sees it: its tasks, when its adapters came, what is kept for a fall. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from genserve.t2i.instance import Instance, Outline, Source, Task, Value
from genserve.t2i.messages import Arrive, HeldInput, Key


class Job:
    """State of one request. `order` is that of its arrival."""

    def __init__(
        self, order: int, request: Arrive, outline: Outline, home: str, ids: Iterator[int], place: Any
    ) -> None:
        self.order, self.request, self.outline = order, request, outline
        self.given: list[Value] = []
        inputs = {name: self._take(name, value, home, place) for name, value in request.inputs.items()}
        self.instance = Instance(outline, inputs, request.num_images, ids)
        self.flights: set[int] = set()  # runs at hand, of executors and of the coordinator's own store
        self.num_undone = 0
        self.num_runs = 0
        self.num_reruns = 0
        self.ending = False
        self.finished = False
        self.outputs: tuple[dict[str, Source], ...] | None = None
        self.held: dict[Key, Value] = {}  # told to the gateway, not yet taken
        self.preview_ends: dict[Task, list[tuple[int, int]]] = {}
        self.previewed: set[tuple[int, int]] = set()
        self.preview_tasks: list[Task] = []
        self.previews: list[Task] = []  # their last tasks, until they are shown
        self.cache_hits: dict[Task, Any] = {}  # what a cache said of its hit; a rerun says it anew
        self.decided: set[Task] = set()  # tasks whose outputs said how often loops run
        self.warnings: dict[str, None] = {}
        self.used: dict[str, dict[str, int]] = {}  # node -> executor -> runs
        self._arrival: dict[int | None, int] = {}  # image -> first step with its adapters
        self._late: dict[int | None, int] = {}  # image -> last step without
        self._kept: dict[tuple[Any, ...], dict[int, dict[str, Value]]] = {}

    def _take(self, name: str, value: Any, home: str, place: Any) -> Any:
        if isinstance(value, HeldInput):
            made = Value(None, name)
            made.uses = 1
            place(made, home, value.key, value.stored.refs, value.stored.nbytes)
            self.given.append(made)
            return made
        if isinstance(value, list | tuple) and any(isinstance(item, HeldInput) for item in value):
            return [self._take(name, item, home, place) for item in value]
        return value

    def advance(self) -> list[Task]:
        """Tasks that have become known, enrolled."""
        tasks = self.instance.advance()
        for task in tasks:
            task.job = self
        self.num_undone += len(tasks)
        if self.instance.is_complete and self.outputs is None:
            self.outputs = tuple(self.instance.outputs(image) for image in range(self.request.num_images))
            for image in self.outputs:
                for value in image.values():
                    if type(value) is Value:
                        value.uses += 1
            if self.request.preview_every_steps:
                self.preview_ends = self.instance.preview_ends(self.request.preview_every_steps)
        return tasks

    def previews_of(self, task: Task) -> list[Task]:
        """Tasks of the previews that `task`'s end makes possible."""
        made: list[Task] = []
        for at in self.preview_ends.get(task, ()):
            if at not in self.previewed:
                self.previewed.add(at)
                made += self.instance.preview(*at)
        for new in made:
            new.job = self
            for value in new.values.values():
                last = new.node is self.outline.cone[-1]
                value.uses += last
                if last:
                    self.previews.append(new)
        self.preview_tasks += made
        return made

    def is_wanted(self, value: Value) -> bool:
        """Whether somebody reads it, or a part of the graph that isn't unrolled yet may."""
        if value.uses > 0:
            return True
        return (
            not self.instance.is_complete
            and value.task is not None
            and (value.task.node.id, value.port) in self.instance.wanted
        )

    def all_tasks(self) -> Iterator[Task]:
        yield from self.instance.tasks
        yield from self.preview_tasks

    # -- adapters --------------------------------------------------------------------------------------

    def adapters_on(self, task: Task) -> bool | None:
        """Whether the task runs with its late adapters if it is dispatched now; None: it has to wait."""
        there = all(
            adapter[0].task.state == "done" for adapter in task.adapters if adapter[0].task is not None
        )
        wanted = self._wants_adapters(task, there)
        return False if wanted is False else (True if there else None)

    def _wants_adapters(self, task: Task, there: bool) -> bool:
        if task.arrived is not None or not task.steps:
            return task.arrived is not False
        step, request = task.steps[0], self.request
        if request.lora_arrival_steps is not None:
            return step >= request.lora_arrival_steps[task.image or 0]
        if step <= self._late.get(task.image, -1):
            return False
        if task.image in self._arrival:
            return True
        return there or step >= request.lora_max_late_steps

    def record_adapters(self, task: Task, on: bool) -> None:
        """The task is dispatched with or without: all of its step do the same."""
        task.arrived = on
        if not task.steps:
            return
        step = task.steps[0]
        if on:
            self._arrival.setdefault(task.image, step)
        else:
            self._late[task.image] = max(step, self._late.get(task.image, -1))

    def lora_arrival_steps(self) -> list[int] | None:
        """The first step with adapters, of each image; None if the request has none in its loops."""
        if not self._arrival and not self._late:
            return None
        shared = self._arrival.get(None)
        return [
            found
            if (found := self._arrival.get(image, shared)) is not None
            else self._late.get(image, -1) + 1
            for image in range(self.request.num_images)
        ]

    # -- what is kept ----------------------------------------------------------------------------------

    def kept(self, value: Value) -> list[Value]:
        """A copy of a carried value is in the coordinator's own store: the older ones that can go now.

        They go once a later iteration is complete, so that it can always be gone on from one of them.
        """
        task = value.task
        assert task is not None
        loop, name = self.outline.carriers[task.node.id, value.port]
        group = self._kept.setdefault((loop, task.image, task.steps[:-1]), {})
        step = task.steps[-1]
        before = group.setdefault(step, {}).get(name)
        group[step][name] = value
        gone = [] if before is None else [before]
        names = {
            carried
            for (of, carried) in self.outline.carriers.values()
            if of == loop and self._same_images(of, carried, task.image)
        }
        if names <= group[step].keys():
            for older in [index for index in group if index < step]:
                gone += group.pop(older).values()
        return gone

    def _same_images(self, loop: str, name: str, image: int | None) -> bool:
        return self.outline.varies(self.outline.carried[loop, name].next) == (image is not None)
