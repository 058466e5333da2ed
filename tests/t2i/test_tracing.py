"""Loops that cannot be one body, and how their authors are told."""

from __future__ import annotations

import re

import pytest

from genserve.core.errors import CompileError
from genserve.t2i.workflow import Workflow
from tests.t2i.arithmetic import Add, LatentsGenerator, Number, Step, Sum, TextEncoder


class Scene:
    """A workflow with an input `n`, a list `texts` and something to loop over."""

    def __init__(self):
        self.wf = Workflow("scene")
        self.n = self.wf.add_input("n", int)
        self.texts = self.wf.add_input("texts", list[str])
        self.latents = LatentsGenerator()(self.n)
        self.step, self.add, self.number = Step(), Add(), Number()

    def end(self, value):
        self.wf.add_output(value, "out")
        self.wf.to_graph()


def branches(s):
    for i in range(s.n):
        if i > 100:
            s.latents = s.step(s.latents, 0)
        s.latents = s.step(s.latents, i)


def branches_by_another_name(s):
    for i in range(s.n):
        j = k = i
        s.latents = s.step(s.latents, k)
        while j > 100:
            pass


def chooses(s):
    for i in range(s.n):
        s.latents = s.step(s.latents, 0 if i < 100 else 1)


def matches(s):
    for i in range(s.n):
        match i:
            case 100:
                break
        s.latents = s.step(s.latents)


def asserts(s):
    for i in range(s.n):
        assert i < 100
        s.latents = s.step(s.latents)


def computes(s):
    for i in range(s.n):
        s.latents = s.step(s.latents, i % 100)


def looks_up(s):
    table = list(range(10))
    for i in range(s.n):
        s.latents = s.step(s.latents, table[i])


def asks_a_function(s):
    def clipped(i):
        return min(i, 100)

    for i in range(s.n):
        s.latents = s.step(s.latents, clipped(i))


def assigns(s):
    for i in range(s.n):
        i = 3
        s.latents = s.step(s.latents, i)


def uses_the_index_later(s):
    for i in range(s.n):  # noqa: B007
        s.latents = s.step(s.latents)
    s.latents = s.step(s.latents, i, 1)


def breaks(s):
    for _ in range(s.n):
        s.latents = s.step(s.latents)
        break


def continues(s):
    for _ in range(s.n):
        s.latents = s.step(s.latents)
        continue


def returns(s):
    for _ in range(s.n):
        s.latents = s.step(s.latents)
        return


def counts(s):
    count = 0
    for _ in range(s.n):
        s.latents = s.step(s.latents)
        count += 1
    s.latents = s.step(s.latents, count, 0)


def counts_in_full(s):
    count = 0
    for _ in range(s.n):
        count = 1 + count
        s.latents = s.step(s.latents, 0) if count < 9 else s.latents


def enumerates(s):
    for i, _ in enumerate(range(s.n)):
        s.latents = s.step(s.latents, i)


def begins_later(s):
    for i in range(1, s.n):
        s.latents = s.step(s.latents, i)


def comprehends(s):
    s.latents = [s.step(s.latents, i) for i in range(s.n)][-1]


def keeps_the_range(s):
    steps = range(s.n)
    for i in steps:
        s.latents = s.step(s.latents, i)


@pytest.mark.parametrize(
    ("loop", "line", "message"),
    [
        (branches, 2, "'i', an index of `range`"),
        (branches_by_another_name, 4, "'j', an index of `range`"),
        (chooses, 2, "'i', an index"),
        (matches, 4, "`break` in a loop"),
        (asserts, 2, "'i', an index"),
        (computes, 2, "'i', an index"),
        (looks_up, 3, "'i', an index"),
        (asks_a_function, 5, "'i', an index"),
        (assigns, 2, "assigned in its body"),
        (uses_the_index_later, 3, "'i', the variable of a loop, is used after"),
        (breaks, 3, "`break` in a loop"),
        (continues, 3, "`continue` in a loop"),
        (returns, 3, "`return` in a loop"),
        (counts, 4, "`count += 1` in a loop"),
        (counts_in_full, 3, "`count = 1 + count` in a loop"),
        (enumerates, 1, "for i in range(...):"),
        (begins_later, 1, "for i in range(...):"),
        (comprehends, 1, "for i in range(...):"),
        (keeps_the_range, 1, "for i in range(...):"),
    ],
)
def test_a_range_that_cannot_be_rolled_is_refused_with_its_line_and_the_way_out(loop, line, message):
    with pytest.raises(CompileError) as error:
        loop(Scene())
    assert message in str(error.value)
    assert "for i in wf.loop(n):" in str(error.value)
    assert re.match(rf"test_tracing.py:{loop.__code__.co_firstlineno + line}: ", str(error.value))


def symbolic_if(s):
    for i in s.wf.loop(s.n):
        if i:
            pass


def symbolic_equal(s):
    for i in s.wf.loop(s.n):
        s.latents = s.step(s.latents, 1 if i == 0 else 2)


def symbolic_plus(s):
    for i in s.wf.loop(s.n):
        s.latents = s.step(s.latents, i + 1)


def symbolic_break(s):
    for _ in s.wf.loop(s.n):
        s.latents = s.step(s.latents)
        break


def unequal_calls(s):
    models = iter([s.step, s.step, Step(other=1), s.step, s.step, s.step])
    for _ in s.wf.loop(s.n):
        s.latents = next(models)(s.latents)


def unequal_constants(s):
    numbers = iter([3, 1, 4, 1, 5, 9])
    for _ in s.wf.loop(s.n):
        s.latents = s.step(s.latents, next(numbers))


def unequal_numbers_of_calls(s):
    once = [s.latents]
    for _ in s.wf.loop(s.n):
        while once:
            s.latents = s.step(once.pop())
        s.latents = s.step(s.latents)


def unequal_patches(s):
    from tests.t2i.arithmetic import LoRA

    for _ in s.wf.loop(s.n):
        s.latents = s.step(s.latents)
        s.step.add_patch(LoRA("x"))


def growing(s):
    seen = []
    for _ in s.wf.loop(s.n):
        seen.append(s.number(1))
        Sum()(seen)


def collects(s):
    seen = []
    for _ in s.wf.loop(s.n):
        seen.append(s.number(1))
    s.wf.add_output(Sum()(seen), "sum")


def index_after(s):
    for i in s.wf.loop(s.n):
        s.latents = s.step(s.latents, i)
    s.step(s.latents, i, 1)


def enumerated_list(s):
    for i, text in enumerate(s.texts):
        s.latents = s.add(s.latents, TextEncoder()(text))
        s.step(s.latents, i)


def unpacked(s):
    a, b = s.latents
    return a, b


def output_inside(s):
    for _ in s.wf.loop(s.n):
        s.latents = s.step(s.latents)
        s.wf.add_output(s.latents, "inside")


def own_counter(s):
    numbers = iter(range(6))
    for _ in s.wf.loop(s.n, first=2):
        s.latents = s.step(s.latents, next(numbers))


def generates(s):
    def steps():
        for _ in range(s.n):
            yield

    for _ in steps():
        s.latents = s.step(s.latents)


def empty(s):
    marks = []
    for _ in range(s.n):
        marks.append(0)
    for _ in marks:
        s.latents = s.step(s.latents, 0, 0)


@pytest.mark.parametrize(
    ("loop", "line", "message"),
    [
        (own_counter, 3, "input 'step' of step follows no rule"),
        (generates, 2, "a generator's loop over a placeholder"),
        (empty, 2, "no model is called in this loop"),
        (symbolic_if, 2, "cannot branch on"),
        (symbolic_equal, 2, "cannot compare"),
        (symbolic_plus, 2, "no arithmetic on"),
        (symbolic_break, 3, "`break` in a loop"),
        (unequal_calls, 3, "with another model, patch or inputs"),
        (unequal_constants, 3, "input 'step' of step follows no rule"),
        (unequal_numbers_of_calls, 2, "different numbers of calls"),
        (unequal_patches, 4, "with another model, patch or inputs"),
        (growing, 4, "input 'terms' of sum follows no rule"),
        (collects, 4, "of an iteration before the last, is used after the loop"),
        (index_after, 3, "belongs to a loop and is used after it"),
        (enumerated_list, 1, "only a `for` statement"),
        (unpacked, 1, "cannot be iterated over or unpacked"),
        (output_inside, 3, "is declared inside a loop"),
    ],
)
def test_other_loops_that_cannot_be_rolled(loop, line, message):
    with pytest.raises(CompileError) as error:
        loop(Scene())
    assert message in str(error.value)
    assert ("Write `for i in wf.loop" in str(error.value)) == (loop in (generates,))
    assert re.match(rf"test_tracing.py:{loop.__code__.co_firstlineno + line}: ", str(error.value))


def test_a_loop_left_early_is_found_at_the_end():
    s = Scene()
    steps = s.wf.loop(s.n)
    namespace = {"s": s, "steps": steps}
    exec(
        "for i in steps:\n    s.latents = s.step(s.latents, i)\n    break", namespace
    )  # no source to look at
    with pytest.raises(CompileError, match=r"test_tracing.py:\d+: the loop was left before its end"):
        s.wf.to_graph()


def test_without_source_an_explicit_loop_is_needed():
    s = Scene()
    with pytest.raises(
        CompileError, match=r"source of this loop cannot be read. Write `for i in wf.loop\(n\)"
    ):
        exec("for i in range(s.n):\n    s.latents = s.step(s.latents, i)", {"s": s})
    s = Scene()
    exec("for i in s.wf.loop(s.n):\n    s.latents = s.step(s.latents, i)", {"s": s})
    exec("for t in s.texts:\n    s.latents = s.add(s.latents, e(t))", {"s": s, "e": TextEncoder()})
    s.end(s.latents)


@pytest.mark.parametrize(
    "use", [len, int, float, str, list, "{}".format, abs, lambda v: v[0], lambda v: 1 in v]
)
def test_placeholders_have_no_content(use):
    s = Scene()
    with pytest.raises(CompileError, match=r"test_tracing.py:\d+: "):
        use(s.n)


def test_placeholders_have_no_attributes():
    with pytest.raises(AttributeError, match="known only when a request runs"):
        _ = Scene().latents.shape
