"""Language models as nodes: text in, text out, through the library's own client or a server's API.

    rewrite = LanguageModel(model_path="smollm2", instruction="Describe this scene in one sentence.")
    picture_prompt = rewrite(prompt)

Owns the wording of what is asked. Answers are greedy, so that a workflow's images depend on its inputs alone.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from genserve.core.errors import ConfigError, ExecutionFailed
from genserve.t2i.model import Model

_OPTIONS = {"kv_pool": "64MiB", "max_running": 8}
_TIMEOUT_S = 600.0


class LanguageModel(Model):
    """An AR or diffusion language model that answers one prompt.

    Parameters, all JSON:
    model_path   as `genserve.LLM` takes it: a built-in name, a folder, a hub id; it runs where the node runs.
    base_url     or a server with an OpenAI-compatible API instead, at which `served_model` is asked. Its key is that
                 of the environment: GENSERVE_API_KEY.
    instruction  what is to be done with the prompt, as the system's message.
    chat         False completes the plain text instead: `instruction`, then the prompt.
    max_tokens   of an answer. Answers that reach it are used as they are.
    options      of `genserve.LLM`, such as {"kv_pool": "1GiB"}.
    """

    weights = ("",)

    def setup_io(self) -> None:
        params = self.params
        known = ("model_path", "base_url", "served_model", "instruction", "chat", "max_tokens", "options")
        unknown = [name for name in params if name not in known]
        if unknown:
            raise ConfigError(f"LanguageModel has no parameter {unknown[0]!r}; there are: {', '.join(known)}")
        if bool(params.get("model_path")) == bool(params.get("base_url")):
            raise ConfigError("LanguageModel takes either model_path or base_url")
        if params.get("base_url") and not params.get("served_model"):
            raise ConfigError("LanguageModel with base_url needs served_model, the name of the model there")
        self.add_input("prompt", str)
        self.add_input("seed", int, default=0)
        self.add_output("text", str)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        if model_path is not None:
            options = {**_OPTIONS, "device": device.partition(":")[0], **self.params.get("options", {})}
            return {"writer": _Local(model_path, options)}
        return {"writer": _Remote(self.params["base_url"], self.params["served_model"])}

    def execute(self, model_components: dict[str, Any], *, prompt: str, seed: int) -> dict[str, Any]:
        writer: _Writer = model_components["writer"]
        instruction = self.params.get("instruction", "")
        limits = {"max_tokens": int(self.params.get("max_tokens", 64)), "seed": int(seed)}
        if not self.params.get("chat", True):
            return {"text": writer.complete(f"{instruction}{prompt}", **limits).strip()}
        messages = [{"role": "user", "content": prompt}]
        if instruction:
            messages.insert(0, {"role": "system", "content": instruction})
        return {"text": writer.answer(messages, **limits).strip()}


class _Writer(Protocol):
    def answer(self, messages: list[dict[str, str]], max_tokens: int, seed: int) -> str: ...

    def complete(self, prompt: str, max_tokens: int, seed: int) -> str: ...


class _Local:
    """A model in this process, freed with the object."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from genserve.llm import LLM

        self._llm = LLM(model, **options)
        weakref.finalize(self, self._llm.close).atexit = False  # its threads end with the process

    def answer(self, messages: list[dict[str, str]], max_tokens: int, seed: int) -> str:
        return str(self._llm.chat(messages, max_tokens=max_tokens, temperature=0, seed=seed).text)

    def complete(self, prompt: str, max_tokens: int, seed: int) -> str:
        return str(self._llm.generate(prompt, max_tokens=max_tokens, temperature=0, seed=seed).text)


class _Remote:
    """A model behind HTTP."""

    def __init__(self, base_url: str, model: str) -> None:
        from openai import OpenAI

        key = os.environ.get("GENSERVE_API_KEY") or "none"
        self._client = OpenAI(base_url=base_url, api_key=key, timeout=_TIMEOUT_S)
        self._model = model
        weakref.finalize(self, self._client.close).atexit = False

    def answer(self, messages: list[dict[str, str]], max_tokens: int, seed: int) -> str:
        from openai import OpenAIError

        try:
            answer = self._client.chat.completions.create(
                model=self._model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=max_tokens,
                temperature=0,
                seed=seed,
            )
        except OpenAIError as error:
            raise ExecutionFailed(f"{self._client.base_url}: {error}") from error
        return answer.choices[0].message.content or ""

    def complete(self, prompt: str, max_tokens: int, seed: int) -> str:
        from openai import OpenAIError

        try:
            answer = self._client.completions.create(
                model=self._model, prompt=prompt, max_tokens=max_tokens, temperature=0, seed=seed
            )
        except OpenAIError as error:
            raise ExecutionFailed(f"{self._client.base_url}: {error}") from error
        return answer.choices[0].text
