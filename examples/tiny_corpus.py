"""A small made-up world of questions and answers for training and judging tiny language models.

Owns the texts: what can be asked, the one right answer, and which items no training ever sees. Facts are
asked in trained wordings during training and in other wordings when judged; spelling, sorting and stories
are judged on words, sets and combinations that never occur in training. Knows nothing of tokens or models.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tiny_words as words

HELD_OUT_ONE_IN = 8
LARGEST_NUMBER = 50
MAX_HELD_OUT = 400  # some kinds of fact have few wordings to be judged by


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its only right answer; `task` names the kind."""

    task: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Rows of one kind of fact; `{0}`, `{1}`, ... in the texts name a row's columns."""

    rows: tuple[tuple[str, ...], ...]
    answer: str
    trained: tuple[str, ...]
    unseen: tuple[str, ...]


FACTS = {
    "capital": Facts(
        words.COUNTRIES,
        "The capital of {0} is {1}, a city in {2}.",
        (
            "What is the capital of {0}?",
            "What is the capital city of {0}?",
            "Which city is the capital of {0}?",
            "Name the capital of {0}.",
            "Tell me the capital of {0}.",
            "What's the capital of {0}?",
            "Do you know the capital of {0}?",
            "I need the capital of {0}.",
            "The capital of {0} is what?",
        ),
        ("Which is the capital city of {0}?", "Please name the capital city of {0}."),
    ),
    "continent": Facts(
        words.COUNTRIES,
        "The country {0} with its capital {1} is in {2}.",
        (
            "Which continent is {0} in?",
            "On which continent is {0}?",
            "What continent is {0} in?",
            "Where is {0}?",
            "Where in the world is {0}?",
            "Tell me the continent of {0}.",
            "Do you know where {0} is?",
        ),
        ("In what continent is {0}?", "Can you tell me where {0} is?"),
    ),
    "opposite": Facts(
        words.OPPOSITES + tuple((b, a) for a, b in words.OPPOSITES),
        "The opposite of {0} is {1}, and the opposite of {1} is {0}.",
        (
            "What is the opposite of {0}?",
            "What's the opposite of {0}?",
            "Tell me the opposite of {0}.",
            "Name the opposite of {0}.",
            "Give me the opposite of {0}.",
            "Do you know the opposite of {0}?",
            "Which word is the opposite of {0}?",
            "What word means the opposite of {0}?",
        ),
        ("Please give the opposite of {0}.", "Can you tell me the opposite of {0}?"),
    ),
    "mixing": Facts(
        words.MIXES + tuple((b, a, c) for a, b, c in words.MIXES),
        "Mixing {0} and {1} gives you {2}.",
        (
            "What do you get when you mix {0} and {1}?",
            "What colour do you get if you mix {0} and {1}?",
            "Mix {0} and {1}.",
            "What is {0} mixed with {1}?",
            "Which colour is a mix of {0} and {1}?",
            "What does mixing {0} and {1} give?",
            "What happens when I mix {0} with {1}?",
            "Tell me the mix of {0} and {1}.",
        ),
        ("Which colour do I get if I mix {0} with {1}?", "What colour does mixing {0} and {1} give?"),
    ),
    "sound": Facts(
        words.SOUNDS,
        "The sound that {0} makes is {1}.",
        (
            "What sound does {0} make?",
            "What does {0} say?",
            "Which sound does {0} make?",
            "What is the sound of {0}?",
            "Tell me the sound that {0} makes.",
            "What noise does {0} make?",
            "How does {0} sound?",
        ),
        ("Do you know what sound {0} makes?", "Tell me what sound {0} makes."),
    ),
    "baby": Facts(
        words.BABIES,
        "The baby of {0} is called {1}.",
        (
            "What is the baby of {0} called?",
            "What do you call the baby of {0}?",
            "What's the name for the baby of {0}?",
            "Tell me the name of the baby of {0}.",
            "How is the baby of {0} called?",
            "What do we call a young one of {0}?",
            "What is a young one of {0} called?",
        ),
        ("Do you know what the baby of {0} is called?", "What is the name of the baby of {0}?"),
    ),
    "colour": Facts(
        words.COLOURS,
        "The usual colour of {0} is {1}.",
        (
            "What colour is {0}?",
            "Which colour is {0}?",
            "What is the colour of {0}?",
            "Tell me the colour of {0}.",
            "What color is {0}?",
            "Which colour does {0} have?",
            "Do you know the colour of {0}?",
        ),
        ("Tell me what colour {0} is.", "What is the usual colour of {0}?"),
    ),
    "kind": Facts(
        words.KINDS,
        "{0} is a kind of {1}.",
        (
            "What is {0}?",
            "What kind of thing is {0}?",
            "Tell me what {0} is.",
            "What sort of thing is {0}?",
            "Do you know what {0} is?",
            "What's {0}?",
        ),
        ("Which kind of thing is {0}?", "Can you tell me what {0} is?"),
    ),
}

SPELL_QUESTIONS = (
    "How do you spell {0}?",
    "Spell the word {0}.",
    "Spell {0}.",
    "Please spell {0} letter by letter.",
    "How is {0} spelled?",
    "Can you spell {0}?",
    "Spell the word {0} for me.",
    "What are the letters of {0}?",
)
NUMBER_QUESTIONS = (
    "Sort these numbers: {0}.",
    "Sort the numbers {0}.",
    "Put these numbers in order: {0}.",
    "Sort {0} from smallest to largest.",
    "Please sort the numbers {0} from smallest to largest.",
    "Put the numbers {0} in order.",
)
WORD_QUESTIONS = (
    "Sort these words: {0}.",
    "Sort the words {0}.",
    "Put these words in alphabetical order: {0}.",
    "Sort {0} in alphabetical order.",
    "Please sort the words {0} in alphabetical order.",
    "Put the words {0} in order.",
)
STORY_QUESTIONS = (
    "Tell me a short story about {0}.",
    "Tell me a story about {0}.",
    "Write a short story about {0}.",
    "Write a story about {0}.",
    "I want to hear a story about {0}.",
    "Can you tell a story about {0}?",
)
STORIES = (
    (
        "a {adjective} {animal} named {name} who finds a {thing} in the {place}",
        "Once upon a time there was a {adjective} {animal} named {name}. One day {name} walked to the {place} and "
        "found a {thing} under a tree. The {animal} took the {thing} home and showed it to all the other animals. "
        "Everyone was happy, and {name} was proud. The end.",
    ),
    (
        "a {adjective} {animal} named {name} who loses a {thing} in the {place}",
        "Once there lived a {adjective} {animal} named {name} who had a {thing}. One morning {name} went to the "
        "{place} and lost the {thing}. The {animal} looked for it all day. At night a friend brought the {thing} "
        "back, and {name} was happy again. The end.",
    ),
    (
        "a {adjective} {animal} named {name} who meets a {friend} in the {place}",
        "There once was a {adjective} {animal} named {name} who wanted a friend. In the {place} {name} met a "
        "{friend}. The {friend} was shy, but the {animal} was kind. They played together until the evening, and "
        "after that day the {animal} and the {friend} were best friends. The end.",
    ),
)


def is_held_out(key: str) -> bool:
    """Whether the item with this key is kept out of training: a fixed property of the text, no state."""
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def _until(held_out: bool, draw: Callable[[], tuple[str, str, str]]) -> tuple[str, str]:
    while True:
        key, question, answer = draw()
        if is_held_out(key) == held_out:
            return question, answer


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fact(task: str, rng: random.Random, held_out: bool) -> tuple[str, str]:
    facts = FACTS[task]
    row = rng.choice(facts.rows)
    question = rng.choice(facts.unseen if held_out else facts.trained).format(*row)
    return _capitalised(question), _capitalised(facts.answer.format(*row))


def _spelling(rng: random.Random, held_out: bool) -> tuple[str, str]:
    def draw() -> tuple[str, str, str]:
        made_up = not held_out and rng.random() < 0.5
        word = _made_up_word(rng) if made_up else rng.choice(words.SPELLED)
        key = f"spell {word}"
        if held_out or rng.random() < 0.75:  # in capitals, which the tokenizer takes apart into letters
            word = word.upper()
        return key, rng.choice(SPELL_QUESTIONS).format(word), f"It is spelled {'-'.join(word)}."

    return _until(held_out, draw)


def _made_up_word(rng: random.Random) -> str:
    """Parts of real words put together, 3 to 9 letters, so that spelling cannot be learned by heart."""
    while True:
        word = ""
        for _ in range(rng.choice((1, 2, 2))):
            source = rng.choice(words.SPELLED)
            cut = rng.randrange(1, len(source))
            word += source[:cut] if rng.random() < 0.5 else source[cut:]
        if 3 <= len(word) <= 9 and word not in words.SPELLED:
            return word


def _number_sort(rng: random.Random, held_out: bool) -> tuple[str, str]:
    def draw() -> tuple[str, str, str]:
        numbers = rng.sample(range(1, LARGEST_NUMBER + 1), rng.choice((2, 3, 3, 4, 4)))
        in_order = ", ".join(map(str, sorted(numbers)))
        question = rng.choice(NUMBER_QUESTIONS).format(", ".join(map(str, numbers)))
        return f"numbers {in_order}", question, f"From smallest to largest: {in_order}."

    return _until(held_out, draw)


def _word_sort(rng: random.Random, held_out: bool) -> tuple[str, str]:
    def draw() -> tuple[str, str, str]:
        chosen = rng.sample(words.SORTED, rng.choice((2, 3, 3, 4, 4)))
        in_order = ", ".join(sorted(chosen))
        question = rng.choice(WORD_QUESTIONS).format(", ".join(chosen))
        return f"words {in_order}", question, f"In alphabetical order: {in_order}."

    return _until(held_out, draw)


def _story(rng: random.Random, held_out: bool) -> tuple[str, str]:
    def draw() -> tuple[str, str, str]:
        animal, friend = rng.sample(words.ANIMALS, 2)
        slots = {
            "animal": animal,
            "friend": friend,
            "adjective": rng.choice(words.ADJECTIVES),
            "name": rng.choice(words.NAMES),
            "thing": rng.choice(words.THINGS),
            "place": rng.choice(words.PLACES),
        }
        about, text = rng.choice(STORIES)
        about = about.format(**slots)
        return about, rng.choice(STORY_QUESTIONS).format(about), text.format(**slots)

    return _until(held_out, draw)


def _talk(rng: random.Random, held_out: bool) -> tuple[str, str]:
    questions, answer = rng.choice(words.TALK)
    return rng.choice(questions), answer


_MAKERS: dict[str, Callable[[random.Random, bool], tuple[str, str]]] = {
    **{task: (lambda rng, held_out, task=task: _fact(task, rng, held_out)) for task in FACTS},
    "spelling": _spelling,
    "sort_numbers": _number_sort,
    "sort_words": _word_sort,
    "story": _story,
    "talk": _talk,
}
# How often training meets a task: what must be worked out gets more than what can be learned by heart.
_SHARES = {
    "capital": 8, "continent": 6, "opposite": 6, "mixing": 3, "sound": 3, "baby": 3, "colour": 3, "kind": 4,
    "spelling": 13, "sort_numbers": 20, "sort_words": 15, "story": 11, "talk": 4,
}  # fmt: skip
# Spelling is the hardest to learn; the vocabulary is made from the shares above.
_TRAINING_SHARES = {**_SHARES, "spelling": 30}
JUDGED_TASKS = tuple(task for task in _MAKERS if task != "talk")


def training_item(rng: random.Random, shares: Mapping[str, int] = _TRAINING_SHARES) -> Item:
    """One item to learn from, drawn with `rng` by `shares`; never one that `held_out` can return."""
    task = rng.choices(tuple(shares), tuple(shares.values()))[0]
    question, answer = _MAKERS[task](rng, False)
    if rng.random() < 0.08:
        question = rng.choice(words.OPENINGS) + question
    if rng.random() < 0.08:
        question = question.lower()
    if rng.random() < 0.05:
        question = question.rstrip(".?")
    return Item(task, question, answer)


def held_out(num: int, seed: int) -> list[Item]:
    """`num` (at most 400) different items that training never meets, the judged tasks in turn, fixed by `seed`."""
    if not 0 < num <= MAX_HELD_OUT:
        raise ValueError(f"num must be between 1 and {MAX_HELD_OUT}, not {num}")
    rng = random.Random(f"held out {seed}")
    items: dict[tuple[str, str], Item] = {}
    while len(items) < num:
        task = JUDGED_TASKS[len(items) % len(JUDGED_TASKS)]
        question, answer = _MAKERS[task](rng, True)
        items.setdefault((task, question), Item(task, question, answer))
    return list(items.values())


def tokenizer_texts(seed: int = 0, num: int = 8000) -> list[str]:
    """Texts whose words should become single tokens.

    Words that fill slots do, so that an answer's slots are at fixed places, which is much easier to learn when
    all places are written at once. Words to be spelled are rare, so that they fall into pieces that others share.
    """
    rng = random.Random(f"tokenizer {seed}")
    texts = [" ".join(f"{n}," for n in range(1, LARGEST_NUMBER + 1))] * 200
    texts += [" " + " ".join(words.slot_words())] * 200
    texts += [" " + " ".join("abcdefghijklmnopqrstuvwxyz")] * 300
    while len(texts) < num:
        item = training_item(rng, _SHARES)
        if item.task != "spelling" or rng.random() < 0.05:
            texts += [item.question, item.answer]
    return texts
