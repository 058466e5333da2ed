"""Stand-ins for tensors that aren't there yet: fetched at their first use, once, by unmodified code."""

from __future__ import annotations

import pytest
import torch

from genserve.t2i.models.lazy import LazyTensor, LazyTensors, map_tensors


def counted(tensors):
    fetched = []

    def fetch(index):
        fetched.append(index)
        return tensors[index]

    return LazyTensors(len(tensors), fetch), fetched


def test_a_sequence_fetches_what_is_indexed_and_only_once():
    tensors = [torch.full((2,), float(index)) for index in range(4)]
    lazy, fetched = counted(tensors)
    assert len(lazy) == 4 and bool(lazy) and fetched == []
    assert lazy[2] is tensors[2] and lazy[-2] is tensors[2] and fetched == [2]
    part = lazy[1:3]
    assert len(part) == 2 and fetched == [2]
    assert part[0] is tensors[1] and fetched == [2, 1]
    with pytest.raises(IndexError):
        lazy[4]
    assert [tensor[0].item() for tensor in lazy] == [0, 1, 2, 3] and fetched == [2, 1, 0, 3]


def test_a_change_is_made_when_the_tensor_is_fetched():
    lazy, fetched = counted([torch.ones(2), torch.ones(2) * 2])
    doubled = map_tensors(lazy, lambda tensor: tensor * 2)
    assert len(doubled) == 2 and fetched == []
    assert doubled[1].tolist() == [4, 4] and fetched == [1]
    assert map_tensors([torch.ones(1)], lambda tensor: tensor + 1)[0].item() == 2


OPERATIONS = {
    "left": lambda tensor, lazy: tensor + lazy,
    "right": lambda tensor, lazy: lazy + tensor,
    "less": lambda tensor, lazy: tensor - lazy,
    "from": lambda tensor, lazy: lazy - tensor,
    "times": lambda tensor, lazy: lazy * 2 + 3 * lazy,
    "over": lambda tensor, lazy: lazy / 2,
    "product": lambda tensor, lazy: lazy @ tensor,
    "function": lambda tensor, lazy: torch.cat([tensor, lazy], dim=0),
    "module": lambda tensor, lazy: torch.nn.functional.silu(lazy),
    "method": lambda tensor, lazy: lazy.to(torch.float64),
    "shape": lambda tensor, lazy: torch.zeros(lazy.shape),
    "index": lambda tensor, lazy: lazy[0],
    "in place": lambda tensor, lazy: tensor.clone().add_(lazy),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_lazy_tensor_is_fetched_by_its_first_operation(operation):
    tensor, other = torch.randn(3, 3), torch.randn(3, 3)
    times = []
    lazy = LazyTensor(lambda: times.append(1) or other)
    assert times == []
    assert torch.equal(operation(tensor, lazy), operation(tensor, other))
    operation(tensor, lazy)
    assert len(times) == 1


def test_what_fetching_raises_is_raised_at_the_use():
    def fail():
        raise ConnectionError("the producer is gone")

    lazy = LazyTensor(fail)
    with pytest.raises(ConnectionError, match="producer"):
        torch.ones(1) + lazy
