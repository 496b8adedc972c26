"""The tiny model's words and its tokenizer: a byte-level BPE built by construction, not learned.

Every lexicon word with its leading space is one token (so a task's length in words is its length in tokens), and every
other UTF-8 text still round-trips through the 256 byte tokens.  Merges come in classes, each complete before the next:
space + consonant, consonant + vowel, space + syllable, whole word.  BPE applies the lowest rank first, hence each word
has one derivation and ends as one token.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB_SIZE = 1024
SEED = 20260927
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
MEDIA = "<|kimi_image_placeholder|>"
SPECIAL = (PAD, BOS, EOS, MEDIA)  # ids 0, 1, 2, 3

LATIN = ("bdfgklmnrt", "aeiou")
CYRILLIC = ("бдклмнрт", "аеио")
KEYS, VALUES, FILLER, SUCCESSORS = 128, 128, 160, 4
MARKS = {"statement": "=", "end": ";", "query": "?", "alias": "@", "multi_value": "+", "multi_query": ":",
         "list_open": "[", "list_close": "]", "count": "#"}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def make_lexicon() -> dict:
    """The task words: ``keys`` (half Latin, half Cyrillic), ``values``, ``filler`` with its Markov chain, ``marks``."""
    draw = random.Random(SEED)

    def words(consonants: str, vowels: str) -> list[str]:
        made = ["".join(letters) for letters in itertools.product(consonants, vowels, consonants, vowels)]
        draw.shuffle(made)
        return made

    latin, cyrillic = words(*LATIN), words(*CYRILLIC)
    filler, keys = latin[:FILLER], latin[FILLER:FILLER + KEYS // 2] + cyrillic[:KEYS // 2]
    values = [f"{number:03d}" for number in draw.sample(range(1000), VALUES)]
    successors = [draw.sample(range(FILLER), SUCCESSORS) for _ in range(FILLER)]
    return {"keys": keys, "values": values, "filler": filler, "filler_successors": successors, "marks": MARKS}


def _merges(lexicon: dict) -> list[tuple[str, str]]:
    """Merge rules over the printable stand-ins that byte-level BPE uses for bytes (space is ``Ġ``)."""
    alphabet = _byte_characters()

    def visible(text: str) -> str:
        return "".join(alphabet[byte] for byte in text.encode())

    space, classes = visible(" "), {name: {} for name in ("char", "start", "syllable", "stem", "word")}
    for mark in lexicon["marks"].values():
        classes["start"][(space, visible(mark))] = None
    for word in [*lexicon["filler"], *lexicon["keys"]]:
        letters = [visible(letter) for letter in word]
        for letter in letters:
            if len(letter) == 2:  # a Cyrillic letter is two bytes
                classes["char"][tuple(letter)] = None
        first, vowel, second, last = letters
        classes["start"][(space, first)] = None
        classes["syllable"][(second, last)] = None
        classes["stem"][(space + first, vowel)] = None
        classes["word"][(space + first + vowel, second + last)] = None
    for value in lexicon["values"]:
        first, second, last = value
        classes["start"][(space, first)] = None
        classes["stem"][(space + first, second)] = None
        classes["word"][(space + first + second, last)] = None
    return [pair for group in classes.values() for pair in group]


def _byte_characters() -> list[str]:
    """The usual byte-to-printable-character table of byte-level BPE, indexed by byte value."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = itertools.count(0x100)
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]


def make_tokenizer(lexicon: dict) -> Tokenizer:
    """The tokenizer: special tokens 0..3, 256 bytes, merge results, then reserved tokens up to 1024."""
    merges = _merges(lexicon)
    pieces = [*SPECIAL, *_byte_characters(), *dict.fromkeys(left + right for left, right in merges)]
    if len(pieces) > VOCAB_SIZE:
        raise ValueError(f"{len(pieces)} pieces do not fit into a vocabulary of {VOCAB_SIZE}")
    reserved = [f"<|reserved_{index}|>" for index in range(len(pieces), VOCAB_SIZE)]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *reserved])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in [*SPECIAL, *reserved]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])])
    return tokenizer


def tokenizer_config() -> dict:
    """``tokenizer_config.json``: a plain fast tokenizer, loadable without remote code."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "additional_special_tokens": [MEDIA], "clean_up_tokenization_spaces": False, "model_max_length": 16384,
        "add_bos_token": True, "chat_template": CHAT_TEMPLATE,
    }


def write(directory: Path) -> None:
    """Write ``lexicon.json``, ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
    lexicon = make_lexicon()
    make_tokenizer(lexicon).save(str(directory / "tokenizer.json"))
    for name, value in (("lexicon.json", lexicon), ("tokenizer_config.json", tokenizer_config())):
        (directory / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parent.parent)
