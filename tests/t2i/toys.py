"""Models of a few tensor operations, to run workflows in microseconds; and graphs of them."""

from __future__ import annotations

import threading
import time

import torch

from genserve.t2i.model import Model
from genserve.t2i.ports import IMAGE, LOOP_COUNT, LOOP_INDEX, tensor, tensors
from genserve.t2i.workflow import Workflow

T = tensor()


class Draw(Model):
    def setup_io(self):
        self.add_input("seed", int)
        self.add_input("size", int, default=4)
        self.add_output("latents", T)

    def execute(self, model_components, seed, size):
        return {"latents": torch.randn(size, size, generator=torch.Generator().manual_seed(seed))}


class Encode(Model):
    def setup_io(self):
        self.add_input("prompt", str)
        self.add_output("embeds", T)

    def execute(self, model_components, prompt):
        return {"embeds": torch.tensor([float(ord(letter)) for letter in prompt]).mean() / 100}


class Control(Model):
    """Residuals; `sleep_s` lets it take long. `log` names a list that notes when it ran."""

    def setup_io(self):
        self.add_input("latents", T)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_output("residuals", tensors(2))

    def execute(self, model_components, latents, step):
        note(self.params.get("log"), "control begins", step)
        time.sleep(self.params.get("sleep_s", 0))
        note(self.params.get("log"), "control ends", step)
        return {"residuals": [latents.sin(), latents.cos() + step]}


class Predict(Model):
    def setup_io(self):
        self.add_input("latents", T)
        self.add_input("embeds", T)
        self.add_input("residuals", tensors(2), deferred=True, default=None)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_output("noise", T)

    def load(self, model_path, device):
        return {"weight": torch.full((1,), self.params.get("weight", 0.3))}

    def execute(self, model_components, latents, embeds, residuals, step):
        note(self.params.get("log"), "predict begins", step)
        time.sleep(self.params.get("sleep_s", 0))
        noise = latents * model_components["weight"] + embeds
        note(self.params.get("log"), "predict asks", step)
        for residual in residuals or ():
            noise = noise + residual / 10
        return {"noise": noise}


class Solve(Model):
    def setup_io(self):
        self.add_input("noise", T)
        self.add_input("latents", T)
        self.add_input("count", int, default=LOOP_COUNT)
        self.add_output("latents", T)

    def execute(self, model_components, noise, latents, count):
        return {"latents": latents - noise / count}


class Decode(Model):
    def setup_io(self):
        self.add_input("latents", T)
        self.add_output("image", IMAGE)

    def execute(self, model_components, latents):
        return {
            "image": (latents.sigmoid() * 255).to(torch.uint8)[..., None].expand(*latents.shape, 3).clone()
        }


class Fail(Model):
    """Hands latents on; fails as often as `FAILURES[name]` says."""

    def setup_io(self):
        self.add_input("latents", T)
        self.add_output("latents", T)

    def execute(self, model_components, latents):
        name = self.params["name"]
        if FAILURES.get(name, 0) > 0:
            FAILURES[name] -= 1
            raise RuntimeError("made to fail")
        return {"latents": latents + 1}


class Slow(Model):
    def setup_io(self):
        self.add_input("latents", T)
        self.add_output("latents", T)

    def execute(self, model_components, latents):
        note(self.params.get("log"), "slow", None)
        time.sleep(self.params["sleep_s"])
        return {"latents": latents + 1}


class Project(Model):
    """A linear layer of fixed weights that takes adapters."""

    takes_loras = True

    def setup_io(self):
        self.add_input("latents", T)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_output("latents", T)

    def load(self, model_path, device):
        layer = torch.nn.Linear(4, 4, bias=False)
        layer.weight.data.copy_(torch.eye(4) / 3 + 0.1)
        return {"transformer": torch.nn.ModuleDict({"proj": layer})}

    def execute(self, model_components, latents, step):
        return {"latents": model_components["transformer"]["proj"](latents)}


def projection(name="project", steps=4):
    with Workflow(name) as wf:
        latents = Draw()(wf.add_input("seed", int))
        project = Project()
        for _ in wf.loop(wf.add_input("steps", int, steps)):
            latents = project(latents)
        wf.add_output(latents, "latents")
    return wf


def adapter_file(folder, seed, rank=2):
    """A LoRA of `Project`, as diffusers write them."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    path = folder / f"adapter-{seed}.safetensors"
    save_file(
        {
            "transformer.proj.lora_A.weight": torch.randn(rank, 4, generator=generator) / 4,
            "transformer.proj.lora_B.weight": torch.randn(4, rank, generator=generator) / 4,
        },
        str(path),
    )
    return str(path)


class Length(Model):
    def setup_io(self):
        self.add_input("prompt", str)
        self.add_output("length", int)

    def execute(self, model_components, prompt):
        return {"length": len(prompt)}


class Shrink(Model):
    """The mean colour of a picture, as latents."""

    def setup_io(self):
        self.add_input("image", IMAGE)
        self.add_input("latents", T)
        self.add_output("latents", T)

    def execute(self, model_components, image, latents):
        return {"latents": latents + image.float().mean() / 255}


FAILURES: dict[str, int] = {}
LOGS: dict[str, list] = {}
_lock = threading.Lock()


def note(log, what, step):
    if log is not None:
        with _lock:
            LOGS.setdefault(log, []).append((what, step, time.monotonic()))


def diffusion(name="toy", control=False, **params) -> Workflow:
    """Text to image, as the paper's Figure 7."""
    with Workflow(name) as wf:
        prompt = wf.add_input("prompt", str)
        seed = wf.add_input("seed", int)
        steps = wf.add_input("steps", int, 4)
        size = wf.add_input("size", int, 4)
        embeds = Encode()(prompt)
        latents = Draw()(seed, size)
        controlnet, predict, solve = Control(**params), Predict(**params), Solve()
        for _ in wf.loop(steps):
            residuals = controlnet(latents) if control else None
            noise = predict(latents, embeds, residuals)
            latents = solve(noise, latents)
        wf.add_output(Decode()(latents), "image")
    return wf
