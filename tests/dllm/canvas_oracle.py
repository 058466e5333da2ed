"""DiffusionGemma's own `generate`, with its random numbers replaced by ours; and requests to compare it on."""

import functools

import torch
from torch.overrides import TorchFunctionMode

from genserve.core.models.distribution import draw_over_vocabulary
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.types import SamplingParams, Submit
from genserve.dllm.models.diffusion_gemma import take_over
from genserve.dllm.models.interface import NO_MASK, LoadedDiffusionModel
from genserve.dllm.models.tiny_canvas import CANVAS_TOKENS, make_tiny_diffusion_gemma
from genserve.dllm.renoise import canvas_noise
from genserve.dllm.request import DiffusionParams, Unmasking

EOS = (2, 33, 150, 77, 260)


class Injected(TorchFunctionMode):
    """Replaces the draws of `generate` at batch size 1: random tokens, then proposals and tokens a step."""

    def __init__(self, seed):
        self.seed, self.canvas, self.step, self.drew = seed, -1, 0, False

    def _uniforms(self, kind):
        return torch.from_numpy(canvas_noise(self.seed, self.canvas, self.step, CANVAS_TOKENS)[kind].copy())

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.multinomial:
            self.step += 1
            self.drew = True
            return draw_over_vocabulary(args[0], self._uniforms(0))[:, None]
        if func is torch.randint:
            if not self.drew:
                self.canvas, self.step = self.canvas + 1, 0
            self.drew = False
            return (self._uniforms(1) * kwargs["high"]).long()[None]
        return func(*args, **kwargs)


@functools.cache
def oracle():
    model = make_tiny_diffusion_gemma()
    model.set_experts_implementation("eager")  # several times faster on so few
    return model


@functools.cache
def served():
    model = make_tiny_diffusion_gemma()
    built = take_over(model, "tiny", ThreadTeam())
    return LoadedDiffusionModel(
        model=built.model,
        family=built.family,
        name="tiny",
        shift=0,
        mask_token_id=NO_MASK,
        eos_token_ids=EOS,
        max_context_tokens=built.max_context_tokens,
        vocab_size=built.vocab_size,
        num_valid_tokens=built.num_ids,
        default_block_length=built.default_block_length,
        dtype=model.dtype,
        device=model.device,
        canvas=built.canvas,
    )


def generated(submit, eos=EOS):
    """What `generate` answers, cut behind the first EOS and at `max_tokens`; and its passes over canvases."""
    prompt, sampling = submit.prompt_token_ids, submit.sampling
    with Injected(sampling.seed) as mode:
        result = oracle().generate(
            torch.tensor([prompt]), eos_token_id=list(eos), max_new_tokens=sampling.max_tokens
        )
    tokens = result.sequences[0, len(prompt) :].tolist()
    stop = next((at + 1 for at, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: min(stop, sampling.max_tokens)], mode


def request(name, num_prompt, max_tokens, seed, temperature=1.0, **params):
    generator = torch.Generator().manual_seed(1000 + seed)
    prompt = tuple(torch.randint(3, 299, (num_prompt,), generator=generator).tolist())
    defaults = served().canvas
    params = {
        "cache": "canvas",
        "block_length": CANVAS_TOKENS,
        "unmasking": Unmasking(
            "entropy_bound", threshold=defaults.confidence, entropy_bound=defaults.entropy_bound
        ),
        **params,
    }
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    return Submit(name, prompt, sampling, options=DiffusionParams(**params))
