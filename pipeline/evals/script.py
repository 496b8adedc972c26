"""The script in which an item asks and is answered: damage to one alphabet must not hide in the mean of all."""

from __future__ import annotations

import unicodedata

from pipeline.evals.dataset import Item

MIXED, NONE = "mixed", "none"


def script_of(item: Item) -> str:
    """``latin``, ``cyrillic``, ``cjk`` ...: of the letters in the question and its answer; ``mixed`` for several,
    ``none`` where there are only digits and marks.
    """
    # The question ends the prompt: in its last two lines, or in the closed grammar (one line) from its mark on.
    question = "".join(item.prompt.splitlines()[-2:]).rpartition("?")[2]
    letters = filter(str.isalpha, question + "".join(item.targets))
    found = {unicodedata.name(letter, NONE).split()[0].lower() for letter in letters}
    return found.pop() if len(found) == 1 else MIXED if found else NONE
