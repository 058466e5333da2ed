from genserve.core.control import Done, Failed, Message, Timer
from genserve.core.dispatch import Dispatch


class Listener:
    def __init__(self):
        self.heard = []
        self.num_decisions = 0

    def observe(self, event, now):
        self.heard.append(event)

    def decide(self, now):
        self.num_decisions += 1
        return []


def test_one_instant_is_one_decision_in_a_fixed_order():
    listener = Listener()
    dispatch = Dispatch({"a": listener})
    dispatch.message("a", "z", 1)
    dispatch.event("a", Failed("lane1", 4, "no"))
    dispatch.message("a", "b", 2)
    dispatch.event("a", Done("lane0", 7, None))
    dispatch.message("a", "z", 3)
    dispatch.event("a", Timer("t"))
    dispatch.event("a", Done("lane1", 3, None))
    dispatch.deliver(0.0)
    assert listener.num_decisions == 1
    assert listener.heard == [
        Timer("t"),
        Done("lane0", 7, None),
        Done("lane1", 3, None),
        Failed("lane1", 4, "no"),
        Message("b", 2),
        Message("z", 1),
        Message("z", 3),
    ]
    assert not dispatch.pending
