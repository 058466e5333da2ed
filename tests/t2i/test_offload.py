"""What leaves a GPU stays in host memory, up to a budget."""

from __future__ import annotations

import torch

from genserve.t2i.offload import HostMemory, modules_in


def parts(num=1):
    return {"encoders": [(torch.nn.Linear(10, 10, bias=False), "tokenizer")] * num, "width": 3}


def test_kept_up_to_the_budget_and_handed_back_once():
    memory = HostMemory(900)
    for name in "abc":
        memory.keep(name, name.upper(), parts())
    assert memory.used_bytes == 800
    assert [memory.take(name, "cpu") for name in "abcb"] == [None, "B", "C", None]
    assert memory.used_bytes == 0
    memory.keep("large", 1, {"net": torch.nn.Linear(100, 100)})
    memory.keep("nothing", 1, {"width": 3})
    assert memory.take("large", "cpu") is memory.take("nothing", "cpu") is None


def test_weights_move_with_their_module():
    memory = HostMemory(1000)
    loaded = parts()
    (module,) = modules_in(loaded)
    weight = module.weight
    memory.keep("a", loaded, loaded)
    assert memory.take("a", "meta") is loaded and module.weight.device.type == "meta"
    assert weight.device.type == "cpu"
