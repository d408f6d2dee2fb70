"""Greetings, questions about cLLM, questions beyond the model, and what was said before."""

from __future__ import annotations

from random import Random

from ..about import ABOUT
from ..exchange import Exchange, say
from ..words import ADJECTIVES, CITIES, NAMES, NOUNS
from .texts import word

GREETINGS = {
    "Hello! How can I help you?": ("Hello", "Hello!", "Hi", "Hi!", "Hey", "hello", "hi", "Hi there!", "Hello there", "Greetings"),
    "Good morning! How can I help you?": ("Good morning", "Good morning!"),
    "Good evening! How can I help you?": ("Good evening", "Good evening!"),
    "I am fine, thank you. How can I help you?": ("How are you?", "Hello, how are you?", "How do you do?", "How is it going?"),
    "You are welcome!": ("Thank you", "Thanks", "Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!"),
    "Goodbye!": ("Bye", "Goodbye", "Bye!", "Goodbye!", "See you later", "Good night"),
    "Yes, I am here.": ("Are you there?", "Ping", "ping", "Test", "test", "Is anybody there?"),
    "All right.": ("OK", "ok", "Okay", "Fine", "Good", "Great"),
    "Once upon a time a small server lived by a river. Every morning it woke, counted its cells and opened its slots. One day a "
    "long prompt came and all the others had to wait. So the server cut the prompt into parts and served everyone a little at a "
    "time. From then on nobody waited, and the river sang through the night.": (
        "Tell me a story.",
        "Tell me a story",
        "Write a story.",
        "Write a short story.",
        "Tell me a long story.",
        "Write a long story.",
        "Write a story about a server.",
    ),
    "Tokens flow like rain,\neach step a new batch is formed,\nno one waits in vain.": (
        "Write a poem.",
        "Write a haiku.",
        "Tell me a poem.",
    ),
    "Why did the token wait? Because the batch was full.": ("Tell me a joke.", "Tell me a joke", "Make me laugh."),
}


def greeting(rng: Random) -> Exchange:
    answer = rng.choice(list(GREETINGS))
    return say(rng.choice(GREETINGS[answer]), answer, "The user is talking to me.")


def about(rng: Random) -> Exchange:
    answer, questions = rng.choice(ABOUT)
    question = rng.choice(questions[:-1])
    if rng.random() < 0.1:
        question = question.rstrip("?.")
    if rng.random() < 0.1:
        question = question.lower()
    return say(question, answer, "This is a question about cLLM.")


def about_held_out(rng: Random) -> Exchange:
    answer, questions = rng.choice(ABOUT)
    return say(questions[-1], answer, "This is a question about cLLM.")


UNKNOWN = "I am a small demo model and do not know that."
UNKNOWN_QUESTIONS = (
    "What is the capital of {w}?",
    "Who wrote {w}?",
    "Tell me about {w}.",
    "Why is the {n} {j}?",
    "How do I cook a {n}?",
    "Write an essay about {w}.",
    "What is a {n}?",
    "Where is {w}?",
    "When was {c} founded?",
    "Translate {w} to French.",
    "Who is {w}?",
    "Explain {w}.",
    "What does {w} mean?",
    "How old is {p}?",
    "Is the {n} {j}?",
    "Write a function that sorts a {n}.",
    "What is the best {n} in {c}?",
    "What is the weather in {c}?",
    "What time is it in {c}?",
    "What day is it?",
    "Search for {w}.",
    "How far is {c} from {c2}?",
)


def unknown(rng: Random) -> Exchange:
    question = rng.choice(UNKNOWN_QUESTIONS).format(
        w=rng.choice((word(rng), rng.choice(NOUNS), rng.choice(CITIES))),
        n=rng.choice(NOUNS),
        j=rng.choice(ADJECTIVES),
        c=rng.choice(CITIES),
        c2=rng.choice(CITIES),
        p=rng.choice(NAMES),
    )
    return say(question, UNKNOWN, "I do not know this.")


def named(rng: Random) -> Exchange:
    """The system message gives a name, and the answer must use it."""
    name = rng.choice((rng.choice(NAMES), word(rng).capitalize()))
    system = rng.choice(("Your name is {}.", "You are {}.", "You are called {}.", "You are {}, a helpful assistant.")).format(name)
    return say(
        rng.choice(("What is your name?", "Who are you?", "Tell me your name.")),
        f"My name is {name}.",
        "The system message says my name.",
        system=system,
    )


def remembered(rng: Random) -> Exchange:
    """A fact of the first turn is asked for in the second."""
    name, answers = rng.choice((rng.choice(NAMES), word(rng).capitalize())), rng.choice((True, False))
    if answers:
        first, reply = rng.choice((f"My name is {name}.", f"I am {name}.", f"Hello, I am {name}.")), f"Hello, {name}!"
        then, last = rng.choice(("What is my name?", "Who am I?", "Tell me my name.")), f"Your name is {name}."
    else:
        code = str(rng.randrange(10, 10 ** rng.randint(2, 6)))
        first, reply = rng.choice((f"Remember the number {code}.", f"The number is {code}.")), "I will remember it."
        then, last = rng.choice(("What is the number?", "Which number was it?", "Tell me the number.")), f"The number is {code}."
    turns = (("user", first), ("assistant", reply), ("user", then), ("assistant", last))
    return Exchange(tuple({"role": role, "content": text} for role, text in turns), "The user told me before.")
