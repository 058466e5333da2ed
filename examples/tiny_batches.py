"""Training batches for the tiny models: conversations as token ids, and which positions are masked and judged.

Everything drawn here is a function of (seed, step), so a training that is interrupted and resumed sees the
same batches as one that is not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tiny_corpus
import torch
from tiny_folders import ASSISTANT, SYSTEM, USER
from torch import Tensor

BATCHES_A_POOL = 8
WIDTH_MULTIPLE, JUDGED_MULTIPLE = 8, 128  # few different shapes: the CPU kernels are made anew for each
BLOCK_LENGTH = 32  # of serving; training copies its block-by-block states
SHORTEST_CANVAS, LONGEST_CANVAS = 16, 96
LONG_POOL_ONE_IN, LONG_POOL_CANVAS = (
    16,
    256,
)  # some small batches with much more room, as clients often ask for
TYPICAL_ANSWER = 12  # tokens
RAMP_STEPS = 400  # until all shares of masks occur
FILL_WEIGHT = 0.1  # of an end-of-sequence token after the first one, which is easy to learn
SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "Answer in one sentence.",
    "Be brief.",
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rows [rows, tokens]: what the network reads, what it should say, and each position's loss weight."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    lengths: Tensor

    def judged(self) -> Tensor:
        """Flat places [num] of all positions with weight; places without weight fill up to a round number."""
        flat = self.weights.flatten()
        num = min(len(flat), _round_up(int(flat.count_nonzero()), JUDGED_MULTIPLE))
        return flat.topk(num).indices.sort().values


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and its answer with the end-of-sequence token; `canvas` is the answer's room in tokens."""

    prompt: list[int]
    answer: list[int]
    canvas: int


class Encoder:
    """Items to rows of token ids; what it writes for a chat is what the tokenizer's chat template writes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bos, self.eos, self.mask = (
            int(tokenizer.bos_token_id),
            int(tokenizer.eos_token_id),
            int(tokenizer.mask_token_id),
        )
        self._role = {
            role: int(tokenizer.convert_tokens_to_ids(token))
            for role, token in (("system", SYSTEM), ("user", USER), ("assistant", ASSISTANT))
        }

    def text(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added."""
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def chat_prompt(self, *turns: tuple[str, str]) -> list[int]:
        """Token ids of `(role, text)` turns, up to where the next answer begins."""
        ids = [self.bos]
        for role, text in turns:
            ids += [self._role[role], *self.text(text)]
            if role == "assistant":
                ids.append(self.eos)
        return [*ids, self._role["assistant"]]

    def training_row(self, rng: random.Random, longest_canvas: int) -> Row:
        """One item in one of the forms that a server gets it: a chat, or plain text to be continued."""
        item = tiny_corpus.training_item(rng)
        if rng.random() < 0.06:
            begin = [self.bos] if rng.random() < 0.5 else []
            spaces = [index for index, letter in enumerate(item.answer) if letter == " "]
            cut = rng.choice(spaces) if spaces else len(item.answer) // 2
            prompt, answer = [*begin, *self.text(item.answer[:cut])], self.text(item.answer[cut:])
        else:
            turns = [("user", item.question)]
            if rng.random() < 0.07:
                before = tiny_corpus.training_item(rng)
                while before.task in ("story", "talk"):  # long ones would only cost time
                    before = tiny_corpus.training_item(rng)
                turns = [("user", before.question), ("assistant", before.answer), *turns]
            if rng.random() < 0.08:
                turns = [("system", rng.choice(SYSTEM_TEXTS)), *turns]
            prompt, answer = self.chat_prompt(*turns), self.text(item.answer)
        answer = [*answer, self.eos]
        return Row(prompt, answer, _canvas(rng, len(answer), longest_canvas))


def _canvas(rng: random.Random, num_answer: int, longest: int) -> int:
    shortest = max(SHORTEST_CANVAS, num_answer)
    luck = rng.random()
    if luck < 0.04 and num_answer > SHORTEST_CANVAS:
        return rng.randrange(SHORTEST_CANVAS, num_answer)  # too short: the answer is cut
    if luck < 0.8:
        return rng.randint(shortest, max(shortest, min(longest, num_answer + BLOCK_LENGTH // 2)))
    return rng.randint(shortest, max(shortest, longest))


def _rows(encoder: Encoder, seed: int, step: int, num_rows: int, causal: bool) -> list[Row]:
    """This step's rows: a pool for several steps is cut into batches of like length to save padding."""
    pool, place = divmod(step, BATCHES_A_POOL)
    rng = random.Random(f"rows {seed} {pool}")
    longest = LONGEST_CANVAS
    if not causal and pool % LONG_POOL_ONE_IN == LONG_POOL_ONE_IN - 1:
        num_rows, longest = max(1, num_rows // 4), LONG_POOL_CANVAS
    rows = [encoder.training_row(rng, longest) for _ in range(num_rows * BATCHES_A_POOL)]
    rows.sort(key=lambda row: len(row.prompt) + (len(row.answer) if causal else row.canvas))
    order = rng.sample(range(BATCHES_A_POOL), BATCHES_A_POOL)
    return rows[order[place] * num_rows :][:num_rows]


def _round_up(num: int, multiple: int) -> int:
    return -(-num // multiple) * multiple


def causal_batch(encoder: Encoder, seed: int, step: int, num_rows: int) -> Batch:
    """Next-token batch: the loss is over the answer, or over the whole text where there is no question."""
    rows = _rows(encoder, seed, step, num_rows, causal=True)
    width = _round_up(max(len(row.prompt) + len(row.answer) for row in rows) - 1, WIDTH_MULTIPLE)
    ids = torch.full((num_rows, width), encoder.eos)
    targets, weights = ids.clone(), torch.zeros(num_rows, width)
    lengths = []
    for index, row in enumerate(rows):
        tokens = torch.tensor([*row.prompt, *row.answer])
        length = len(tokens) - 1
        ids[index, :length], targets[index, :length] = tokens[:-1], tokens[1:]
        weights[index, len(row.prompt) - 1 : length] = 1.0 / (num_rows * len(row.answer))
        lengths.append(length)
    return Batch(ids, targets, weights, torch.tensor(lengths))


def masked_batch(encoder: Encoder, seed: int, step: int, num_rows: int) -> Batch:
    """Masked batch: parts of the answers' canvases are masked and to be restored from all the rest."""
    rows = _rows(encoder, seed, step, num_rows, causal=False)
    num_rows = len(rows)
    rng = random.Random(f"masks {seed} {step}")
    noise = torch.Generator().manual_seed(rng.getrandbits(62))
    width = _round_up(max(len(row.prompt) + row.canvas for row in rows), WIDTH_MULTIPLE)
    ids = torch.full((num_rows, width), encoder.eos)
    targets, weights = ids.clone(), torch.zeros(num_rows, width)
    for index, (row, ratio) in enumerate(zip(rows, _mask_ratios(rng, num_rows, step), strict=True)):
        answer = torch.tensor(row.answer)[: row.canvas]
        canvas = torch.full((row.canvas,), encoder.eos)
        canvas[: len(answer)] = answer
        worth = torch.full((row.canvas,), FILL_WEIGHT)
        worth[: len(answer)] = 1.0
        masked, judged, scale = _masks(rng, noise, ratio, row.canvas, len(answer))
        begin, end = len(row.prompt), len(row.prompt) + row.canvas
        ids[index, :begin] = torch.tensor(row.prompt)
        ids[index, begin:end] = torch.where(masked, encoder.mask, canvas)
        targets[index, begin:end] = canvas
        # Between a mean over the row and a sum: the few telling words of a long answer must not drown.
        share = (worth * judged).sum().item() ** -0.5 * TYPICAL_ANSWER**-0.5
        weights[index, begin:end] = worth * (judged & masked) * (scale * share / num_rows)
    return Batch(ids, targets, weights, torch.tensor([len(row.prompt) + row.canvas for row in rows]))


def _mask_ratios(rng: random.Random, num: int, step: int) -> Iterator[float]:
    """Shares to mask, uniform in (0, highest] and spread evenly over the batch, in random order.

    The highest share rises to 1: with few masks the network first finds its way from what it learned causally.
    """
    highest = min(1.0, 0.25 + 0.75 * step / RAMP_STEPS)
    shift = rng.random()
    ratios = [max(0.02, 1.0 - (place + shift) / num) for place in range(num)]
    rng.shuffle(ratios)
    return iter([max(0.02, ratio * highest) for ratio in ratios])


def _masks(
    rng: random.Random, noise: torch.Generator, ratio: float, canvas: int, num_answer: int
) -> tuple[Tensor, Tensor, float]:
    """Which positions of a canvas are masked, which region the loss is over, and the scale 1 / ratio."""
    drawn = torch.rand(canvas, generator=noise) < ratio
    place = torch.arange(canvas)
    everywhere = torch.ones(canvas, dtype=torch.bool)
    kind = rng.random()
    if kind < 0.4:
        return drawn, everywhere, 1.0 / ratio
    if kind < 0.92:  # as served: earlier blocks are done, later ones are all masked
        begin = rng.randrange((num_answer + BLOCK_LENGTH - 1) // BLOCK_LENGTH) * BLOCK_LENGTH
        current = (place >= begin) & (place < begin + BLOCK_LENGTH)
        if rng.random() < 0.3:
            drawn, ratio = everywhere, 1.0
        return (drawn & current) | (place >= begin + BLOCK_LENGTH), current, 1.0 / ratio
    begin = rng.randrange(num_answer)  # a gap to fill in
    gap = (place >= begin) & (place < begin + rng.randint(1, BLOCK_LENGTH))
    return gap, gap, 1.0


def attention_bias(lengths: Tensor, width: int, causal: bool) -> Tensor | None:
    """What to add to attention scores so that padding (and the future, if `causal`) is not seen."""
    if causal:
        return torch.full((width, width), -torch.inf).triu(1)[None, None]
    hidden = torch.arange(width)[None] >= lengths[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None] if hidden.any() else None
