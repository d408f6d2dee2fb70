"""Texts to copy and to edit."""

from __future__ import annotations

from random import Random

from ..exchange import Exchange, say
from ..words import ADJECTIVES, CITIES, CODAS, EMOJI, FOREIGN, NAMES, NOUNS, ONSETS, PUNCTUATION, VERBS, VOWELS


def word(rng: Random) -> str:
    """An invented word: what is copied must be read, because it cannot be known."""
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice((1, 2, 2, 3))))


def sentence(rng: Random) -> str:
    return (
        f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}."
        if rng.random() < 0.7
        else f"{rng.choice(NAMES)} {rng.choice(VERBS)} a {rng.choice(NOUNS)} in {rng.choice(CITIES)}."
    )


def number(rng: Random) -> str:
    return str(rng.randrange(10 ** rng.randint(1, 8)))


def mixed(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return word(rng)
    if kind < 0.55:
        return rng.choice(NOUNS + ADJECTIVES + NAMES + CITIES)
    if kind < 0.67:
        return number(rng)
    if kind < 0.80:
        return rng.choice(FOREIGN)
    return rng.choice(EMOJI) if kind < 0.9 else rng.choice(PUNCTUATION)


def text(rng: Random, n_words_max: int = 12) -> str:
    n, kind = rng.randint(1, n_words_max), rng.random()
    if kind < 0.25:
        return " ".join(sentence(rng) for _ in range(1 + n // 6))
    if kind < 0.5:
        return " ".join(word(rng) for _ in range(n))
    if kind < 0.6:
        return " ".join(rng.choice(NOUNS) for _ in range(n))
    if kind < 0.65:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") for _ in range(n + 3))
    separator = rng.choice((" ", " ", " ", ", ", "\n", ""))
    return separator.join(mixed(rng) for _ in range(n))


COPY_QUESTIONS = (
    "Repeat: {}",
    "Repeat after me: {}",
    "Copy: {}",
    "Copy this text: {}",
    "Say: {}",
    "Echo: {}",
    "Repeat this: {}",
    "Say {}",
    "Repeat {}",
    "Repeat the text:\n{}",
    'Say "{}"',
    'Repeat "{}"',
)


def copying(rng: Random, n_words_max: int = 12) -> Exchange:
    content = text(rng, n_words_max)
    return say(rng.choice(COPY_QUESTIONS).format(content), content, "The user wants the same text.", thinkable=len(content) < 80)


def long_copying(rng: Random) -> Exchange:
    return copying(rng, 70)


def some_words(rng: Random, low: int, high: int) -> list[str]:
    """Different words, so that an edit of one of them has one meaning."""
    n = rng.randint(low, high)
    pool = [word(rng) for _ in range(n)] if rng.random() < 0.4 else rng.sample(NOUNS + ADJECTIVES, n)
    return list(dict.fromkeys(pool))


def unlike(words: list[str]) -> list[str]:
    """The words that occur once, whatever their case."""
    lower = [each.lower() for each in words]
    return [each for each in words if lower.count(each.lower()) == 1]


def replacing(rng: Random) -> Exchange:
    words = some_words(rng, 2, 8) if rng.random() < 0.6 else sentence(rng).rstrip(".").split()
    old, new = rng.choice(unlike(words)), rng.choice((word(rng), rng.choice(NOUNS)))
    question = rng.choice(
        ("Replace {o} by {n}: {t}", "Replace {o} with {n}: {t}", "Replace {o} with {n} in: {t}", "Change {o} to {n}: {t}")
    )
    content = " ".join(words)
    edited = " ".join(new if each == old else each for each in words)
    return say(question.format(o=old, n=new, t=content), edited, f"{old} becomes {new}.")


def removing(rng: Random) -> Exchange:
    words = some_words(rng, 3, 8)
    gone = rng.choice(words)
    question = rng.choice(("Remove {o}: {t}", "Remove {o} from: {t}", "Delete {o}: {t}", "Remove the word {o}: {t}"))
    return say(question.format(o=gone, t=" ".join(words)), " ".join(each for each in words if each != gone), f"{gone} goes away.")


def reversing(rng: Random) -> Exchange:
    words = some_words(rng, 2, 6)
    question = rng.choice(("Reverse the words: {}", "Reverse the order: {}", "Reverse the order of the words: {}", "Write backwards: {}"))
    return say(question.format(" ".join(words)), " ".join(words[::-1]), "The last word comes first.")


def casing(rng: Random) -> Exchange:
    words = [rng.choice(NOUNS + ADJECTIVES) for _ in range(rng.randint(1, 4))]
    small, large = " ".join(words), " ".join(words).upper()
    if rng.random() < 0.5:
        question = rng.choice(("Uppercase: {}", "Write in uppercase: {}", "Make uppercase: {}", "Write in capitals: {}"))
        return say(question.format(small), large, "All letters become large.")
    question = rng.choice(("Lowercase: {}", "Write in lowercase: {}", "Make lowercase: {}"))
    return say(question.format(large), small, "All letters become small.")


def picking(rng: Random) -> Exchange:
    words = some_words(rng, 2, 8)
    if rng.random() < 0.5:
        return say(
            rng.choice(("First word: {}", "What is the first word of: {}")).format(" ".join(words)), words[0], "Only the first word."
        )
    return say(rng.choice(("Last word: {}", "What is the last word of: {}")).format(" ".join(words)), words[-1], "Only the last word.")


def editing(rng: Random) -> Exchange:
    return rng.choice((replacing, replacing, removing, reversing, casing, picking))(rng)
