"""The cards of the tiny models: what they are, what they can and cannot do, and how they scored. Texts only."""

from __future__ import annotations

from collections.abc import Mapping

_HEAD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
library_name: {library}
tags: [toy, {tag}]
---

# {name}

**This is a toy.** {what}
It has {million:.1f} million parameters and was trained from nothing on a small made-up corpus in less than an hour on
a CPU. It exists so that a server has something real to serve without any download: it shows what
{shows} does, not what a language model can do. Don't use it for anything else.

It knows only the templates of its corpus, in English:

| kind | a question | its answer |
| --- | --- | --- |
| capitals, continents | What is the capital of France? | The capital of France is Paris, a city in Europe. |
| opposites | What is the opposite of hot? | The opposite of hot is cold, and the opposite of cold is hot. |
| mixing colours | What do you get when you mix red and blue? | Mixing red and blue gives you purple. |
| animals and things | What sound does a dog make? | The sound that a dog makes is woof. |
| sorting up to four | Sort these numbers: 20, 3, 47. | From smallest to largest: 3, 20, 47. |
| spelling, in capitals | Spell the word FARMER for me. | It is spelled F-A-R-M-E-R. |
| short stories | Tell me a short story about a brave fox named Mia who finds a key in the forest. | Once upon a time ... |

Spelling is what it is worst at. Anything else gets a wrong answer or a polite excuse. It cannot count,
calculate or reason, it invents, and what it says about the world is only as good as the word lists of its corpus. It has seen prompts of up to about a hundred
tokens and answers of up to 96{longer}; beyond that expect nonsense.

## How it was made

`examples/train_tiny_dllm.py` with its defaults: {steps} steps of 32 rows, {cpu_minutes} CPU minutes, seed 0. The
corpus is `examples/tiny_corpus.py`, written for this purpose; no other data went in. {training}

## How it scores

{items} held-out questions, the kinds in equal parts: facts in wordings that training never used, and words, sets and
stories that never occur in training. Exact match, word for word{measured}.

"""

_TEXTS = {
    "tiny-llada": {
        "library": "genserve",
        "tag": "masked-diffusion",
        "what": "A masked-diffusion language model in the layout of LLaDA-8B-Instruct.",
        "shows": "a diffusion language model",
        "longer": " (a few of up to 256)",
        "training": "It began with the weights of\n`tiny-llama`. The loss is LLaDA's: "
        "masked positions of the answer, weighted with the inverse of the share\nthat is masked; the rest of the "
        "answer's room is filled with the end-of-sequence token. Half of the rows are masked\nas block-by-block "
        "decoding leaves them: earlier blocks clean, later ones all masked.",
        "measured": "; 96 tokens of room,\nblocks of 32, threshold 0.9, temperature 0, a plain decoding loop in float32",
    },
    "tiny-llama": {
        "library": "transformers",
        "tag": "causal",
        "what": "A causal language model, a `LlamaForCausalLM`, and the twin of the masked-diffusion `tiny-llada`.",
        "shows": "an autoregressive language model",
        "longer": "",
        "training": "The loss is over the answers, one next token after the other.",
        "measured": "; greedy generation of `transformers` in float32",
    },
}


def card(
    name: str,
    num_parameters: int,
    steps: int,
    cpu_minutes: float,
    items: int,
    scores: Mapping[str, Mapping[str, tuple[float, float]]],
) -> str:
    """The card as Markdown. `scores` maps mode and task to (exact match, tokens before the end per forward)."""
    facts = {"name": name, "million": num_parameters / 1e6, "steps": steps, "items": items}
    text = _HEAD.format(**_TEXTS[name], **facts, cpu_minutes=f"{cpu_minutes:.0f}")
    modes = list(scores)
    titles = {"none": "no cache", "dual": "dual cache", "greedy": "greedy"}
    columns = [f"{titles[mode]}: {what}" for mode in modes for what in ("exact", "tokens per forward")]
    lines = ["| task | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    for task in scores[modes[0]]:
        cells = (
            f"{number:.{digits}f}"
            for mode in modes
            for number, digits in zip(scores[mode][task], (3, 1), strict=True)
        )
        lines.append(f"| {task.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return text + "\n".join(lines) + "\n"
