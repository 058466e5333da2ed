"""Models whose values are numbers and texts: what a graph computes can be checked by hand."""

from __future__ import annotations

from genserve.t2i.model import Model, ModelPatch
from genserve.t2i.ports import LOOP_COUNT, LOOP_INDEX, port_type, tensor, tensors

TENSOR = port_type(type("Tensor", (), {}))
IMAGE = port_type(type("Image", (), {}))


class LatentsGenerator(Model):
    def setup_io(self):
        self.add_input("seed", int)
        self.add_output("latents", TENSOR)

    def execute(self, model_components, seed):
        return {"latents": float(seed)}


class TextEncoder(Model):
    def setup_io(self):
        self.add_input("prompt", str)
        self.add_output("prompt_embeds", TENSOR)

    def execute(self, model_components, prompt):
        return {"prompt_embeds": float(len(prompt))}


class ControlNet(Model):
    def setup_io(self):
        self.add_input("latents", TENSOR)
        self.add_input("prompt_embeds", TENSOR)
        self.add_input("image", TENSOR, default=None)
        self.add_output("residuals", tensors(2))

    def execute(self, model_components, latents, prompt_embeds, image):
        return {"residuals": [latents / 2, prompt_embeds + (image or 0)]}


class Flux(Model):
    def setup_io(self):
        self.add_input("latents", TENSOR)
        self.add_input("prompt_embeds", TENSOR)
        self.add_input("controlnet_inputs", tensors(), deferred=True, default=None)
        self.add_output("noise_pred", TENSOR)

    def execute(self, model_components, latents, prompt_embeds, controlnet_inputs):
        return {"noise_pred": latents * 0.5 + prompt_embeds + sum(controlnet_inputs or [])}


class Denoise(Model):
    def setup_io(self):
        self.add_input("noise_pred", TENSOR)
        self.add_input("latents", TENSOR)
        self.add_output("latents", TENSOR)

    def execute(self, model_components, noise_pred, latents):
        return {"latents": latents - 0.125 * noise_pred}


class FluxVAE(Model):
    def setup_io(self):
        self.add_input("latents", TENSOR, default=None)
        self.add_input("image", IMAGE, default=None)
        self.add_input("mode", str)
        self.add_output("out", TENSOR)

    def execute(self, model_components, latents, image, mode):
        return {"out": -latents if mode == "decode" else image * 2.0}


class LoRA(ModelPatch):
    pass


class Step(Model):
    """Remembers what it was told: latents * 2 + index + count / 100."""

    def setup_io(self):
        self.add_input("latents", TENSOR)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_input("num_steps", int, default=LOOP_COUNT)
        self.add_output("latents", TENSOR)

    def execute(self, model_components, latents, step, num_steps):
        return {"latents": latents * 2 + step + num_steps / 100}


class Multistep(Model):
    """A solver with a history that is absent at first."""

    def setup_io(self):
        self.add_input("latents", TENSOR)
        self.add_input("history", TENSOR, default=None)
        self.add_output("latents", TENSOR)
        self.add_output("history", TENSOR)

    def execute(self, model_components, latents, history):
        return {"latents": latents + 1 + (history or 0) / 2, "history": latents}


class Add(Model):
    def setup_io(self):
        self.add_input("a", TENSOR)
        self.add_input("b", TENSOR)
        self.add_output("sum", TENSOR)

    def execute(self, model_components, a, b):
        return {"sum": a + b}


class Sum(Model):
    def setup_io(self):
        self.add_input("terms", list[int])
        self.add_output("sum", int)

    def execute(self, model_components, terms):
        return {"sum": sum(terms)}


class Half(Model):
    """How many of the steps to skip: a number that a node makes."""

    foldable = True

    def setup_io(self):
        self.add_input("n", int)
        self.add_output("half", int)

    def execute(self, model_components, n):
        return {"half": n // 2}


class Number(Model):
    def setup_io(self):
        self.add_input("value", int, default=self.params.get("default", 3))
        self.add_output("value", int)

    def execute(self, model_components, value):
        return {"value": value}


class Shaped(Model):
    """One input and one output of the shapes and dtypes that the constructor says."""

    def setup_io(self):
        for name, (dtype, shape) in self.params["ins"].items():
            self.add_input(name, tensor(dtype, None if shape is None else tuple(shape)))
        dtype, shape = self.params["out"]
        self.add_output("out", tensor(dtype, None if shape is None else tuple(shape)))

    def execute(self, model_components, **inputs):
        return {"out": sum(inputs.values())}
