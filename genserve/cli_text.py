"""`genserve generate` and `genserve chat`: text from a model in this process, or from a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from genserve import cli_options as opt

_ANSWER_TOKENS = 512
_CHAT_TEMPERATURE = 0.7

# What answers a conversation, piece by piece.
Answer = Callable[[list[dict[str, str]]], Iterator[str]]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from stdin.")],
    model: opt.Model = "tiny-llama",
    chat: Annotated[bool, typer.Option("--chat", help="Ask it through the model's chat template.")] = False,
    max_tokens: opt.MaxTokens = 128,
    temperature: opt.ModelTemperature = None,
    top_p: opt.TopP = 1.0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    regex: Annotated[str | None, typer.Option(help="The text must match it.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file with the JSON schema that the text must follow.")
    ] = None,
    dtype: opt.Dtype = None,
    kv_pool: opt.KvPool = None,
    num_threads: opt.NumThreads = None,
    executor: opt.Executor = None,
    family_options: opt.Options = None,
    as_json: opt.Json = False,
) -> None:
    """Generate from one prompt in this process, printed as it comes."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "top_p": top_p}
    options |= opt.given(temperature=temperature, seed=seed, regex=regex, json_schema=_read(json_schema))
    options["stop"] = stop or ()
    options["options"] = opt.parsed(family_options) or None
    if prompt == "-":
        prompt = sys.stdin.read()
    engine_options = opt.given(dtype=dtype, kv_pool=kv_pool, num_threads=num_threads, executor=executor)
    _check(options)
    with _loaded(model, engine_options) as llm:
        start_s = time.monotonic()
        messages = [{"role": "user", "content": prompt}]
        deltas = llm.stream_chat(messages, **options) if chat else llm.stream(prompt, **options)
        text, num_tokens, first_s, reason = "", 0, None, None
        for delta in deltas:
            first_s = first_s or time.monotonic()
            num_tokens += len(delta.token_ids)
            reason = delta.finish_reason or reason
            text += delta.text
            if not as_json:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        took_s, ttft_s = time.monotonic() - start_s, (first_s or start_s) - start_s
    if as_json:
        import json

        figures = {"num_output_tokens": num_tokens, "ttft_s": ttft_s, "duration_s": took_s}
        typer.echo(json.dumps({"model": model, "text": text, "finish_reason": reason, **figures}))
        return
    sys.stdout.write("\n")
    typer.echo(
        f"[{num_tokens} tokens, {reason}; TTFT {ttft_s:.2f} s, {num_tokens / took_s:.1f} tokens/s]", err=True
    )


def chat(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="In this process: what to load [default: tiny-llama]. On a server: its name there.",
        ),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Talk to this OpenAI-compatible server instead of loading a model.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="GENSERVE_API_KEY", help="For the server.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, help="Output tokens at most [default: 512, or half the context].")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy [default: 0.7, of diffusion models 0].")
    ] = None,
    top_p: opt.TopP = 0.95,
    seed: opt.Seed = None,
    dtype: opt.Dtype = None,
    kv_pool: opt.KvPool = None,
    num_threads: opt.NumThreads = None,
    family_options: opt.Options = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, /new starts over, Ctrl-D or /quit leaves."""
    options: dict[str, Any] = {"top_p": top_p}
    options |= opt.given(temperature=temperature, seed=seed, max_tokens=max_tokens)
    extra = opt.parsed(family_options)
    _check(options)
    if base_url is not None:
        _converse(_server_answer(base_url, api_key, model, options, extra), system)
        return
    options["options"] = extra or None
    with _loaded(
        model or "tiny-llama", opt.given(dtype=dtype, kv_pool=kv_pool, num_threads=num_threads)
    ) as llm:
        _fill_in(options, llm.info.family, llm.info.max_context_tokens)
        _converse(lambda messages: (d.text for d in llm.stream_chat(messages, **options)), system)


def _fill_in(options: dict[str, Any], family: Any, max_context_tokens: Any) -> None:
    """Defaults of a chat with a model; servers unlike this one tell neither family nor context."""
    context = max_context_tokens if isinstance(max_context_tokens, int) else 2 * _ANSWER_TOKENS
    options.setdefault("max_tokens", min(_ANSWER_TOKENS, context // 2))
    if family != "dllm":
        options.setdefault("temperature", _CHAT_TEMPERATURE)


def _converse(answer: Answer, system: str | None) -> None:
    from genserve.core.errors import GenserveError

    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (editing and history of input lines)

        typer.echo("Ctrl-C stops an answer, /new starts over, Ctrl-D or /quit leaves.", err=True)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            said = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("", err=True)
            return
        if not interactive and said:
            sys.stdout.write(f"> {said}\n")  # what a terminal shows by itself
            sys.stdout.flush()
        if said == "/quit":
            return
        if said in ("/new", "/reset"):
            messages = list(opening)
        elif said.startswith("/"):
            typer.echo(f"Error: no command {said.split()[0]}; there are: /new (or /reset), /quit", err=True)
        if not said or said.startswith("/"):
            continue
        messages.append({"role": "user", "content": said})
        pieces: list[str] = []
        try:
            for piece in answer(messages):
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            typer.echo(" [stopped]", err=True, nl=False)
        except GenserveError as error:
            if not interactive:
                raise
            messages.pop()
            typer.echo(f"Error: {error} (/new starts over)", err=True)
            continue
        sys.stdout.write("\n")
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _check(options: dict[str, Any]) -> None:
    """`InvalidRequest` for options that no model would take: loading one takes long."""
    from genserve.core.runtime.completion import check_stop
    from genserve.core.runtime.request_options import completion_request
    from genserve.core.runtime.sampling_limits import validate_sampling

    request = completion_request("", (), **options)
    validate_sampling(request.sampling, sys.maxsize)
    check_stop(request.stop)
    if request.sampling.grammar is not None:
        from genserve.core.models.grammar import validate_grammar

        validate_grammar(request.sampling.grammar, request.sampling.grammar.kind)


@contextmanager
def _loaded(model: str, options: dict[str, Any]) -> Iterator[Any]:
    from genserve import LLM
    from genserve.cli_progress import LoadProgress

    with LoadProgress() as progress:
        progress.begin(model)
        llm = LLM(model, on_progress=progress.on_progress, **options)
    with llm:
        yield llm


def _server_answer(
    base_url: str, api_key: str | None, model: str | None, options: dict[str, Any], extra: dict[str, Any]
) -> Answer:
    import openai

    from genserve.core.errors import ConfigError, GenserveError

    url = base_url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"base-url: {base_url!r} is not a URL (http://...)")
    client = openai.OpenAI(base_url=url if url.endswith("/v1") else url + "/v1", api_key=api_key or "none")

    def explained(error: openai.OpenAIError) -> GenserveError:
        if isinstance(error, openai.APIConnectionError):
            return ConfigError(f"base-url: {base_url} cannot be reached")
        # `body` is the server's own error object; `message` puts "Error code: 400 - " before it.
        body = getattr(error, "body", None)
        said = body.get("message") if isinstance(body, dict) else None
        return GenserveError(said if isinstance(said, str) else str(error))

    try:
        served = {model.id: model for model in client.models.list()}
    except openai.OpenAIError as error:
        raise explained(error) from error
    if model is None and len(served) != 1:
        raise ConfigError(f"model: the server has {', '.join(served) or 'none'}; name one with --model")
    name = model or next(iter(served))
    told = served.get(name)
    _fill_in(options, getattr(told, "family", None), getattr(told, "max_context_tokens", None))

    def answer(messages: list[dict[str, str]]) -> Iterator[str]:
        try:
            create: Any = client.chat.completions.create
            stream = create(
                model=name,
                messages=messages,
                stream=True,
                extra_body=extra or None,
                **options,
            )
            with stream:
                for chunk in stream:
                    if chunk.choices and chunk.choices[0].delta.content:
                        yield chunk.choices[0].delta.content
        except openai.OpenAIError as error:
            raise explained(error) from error

    return answer


def _read(path: Path | None) -> str | None:
    from genserve.core.errors import ConfigError

    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
