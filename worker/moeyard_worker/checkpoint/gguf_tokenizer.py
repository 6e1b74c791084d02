"""A tokenizer as metadata of a GGUF file: tokenizer.json and tokenizer_config.json out of it, and into it.

llama.cpp stores the tokens and merges of a byte-level BPE, and names its regular expression (`tokenizer.ggml.pre`).
`PRE_TOKENIZERS` has the names whose original tokenizer.json is known. transformers 5.17 also makes tokenizers of GGUF
files (`integrations/ggml.py`), but it ignores that name and adds the three special tokens of Qwen to each of them.

Token ids equal those of the original tokenizer. Two details of tokens are not stored. The converter marks `<|...|>` as
special even if the original does not, so answers show such a token only with `skip_special_tokens: false`. And every
added token is found in the text before it is normalised.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress, product
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from moeyard_worker.checkpoint.gguf_header import GgufHeader, Value
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.tokenizer import TokenizerFiles

_ADVICE = "give the directory of the original tokenizer.json with --tokenizer DIR"
TOKENS, TYPES, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"
# The arrays of the metadata that are read.
TOKENIZER_ARRAYS = (TOKENS, TYPES, MERGES)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_TEMPLATE = "tokenizer.chat_template"
_NAMED = MappingProxyType({"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"})


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split before merges apply.

    patterns: regular expressions, each of which splits the pieces of the one before it. Empty: that of GPT-2.
    nfc: texts are normalised first. whole_words: a piece that is a token needs no merges. add_bos: a text begins with
    bos unless the file has `add_bos_token`.
    """

    patterns: tuple[str, ...] = ()
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def build(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
        """Return the tokenizer with this vocabulary, without added tokens."""
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=self.whole_words))
        tokenizer.normalizer = normalizers.NFC() if self.nfc else None
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer


def _words(digits: str) -> str:
    """Return the expression of the tokenizers after GPT-4's: contractions, words, numbers, punctuation and spaces."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    # Line ends are not escaped, as in the published file: spellings are compared when a file is written.
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
# By `tokenizer.ggml.pre`.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "gpt-2": PreTokenizer(),
        "olmo": PreTokenizer(nfc=True),
        "qwen2": PreTokenizer((_words(r"\p{N}"),), nfc=True),
        "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
    }
)


def gguf_tokenizer(header: GgufHeader) -> dict[str, str]:
    """Return the texts of the tokenizer's files by name. `header` was read with `TOKENIZER_ARRAYS`.

    Raises CheckpointError naming the file, the key and the flag that helps.
    """
    try:
        tokenizer, tokens = _tokenizer(header)
        config = _config(header, tokens)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_ADVICE}") from None
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": json.dumps(config)}


def _tokenizer(header: GgufHeader) -> tuple[str, tuple[str, ...]]:
    """Return tokenizer.json as text, and all tokens by id."""
    kind, pre = header.metadata.get("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise header.error("tokenizer.ggml.model", f"is {kind!r:.80}, which is not supported (supported: gpt2)")
    how = PRE_TOKENIZERS.get(str(pre))
    if how is None:
        supported = ", ".join(PRE_TOKENIZERS)
        raise header.error("tokenizer.ggml.pre", f"is {pre!r:.80}, which is not supported (supported: {supported})")
    tokens, types = _texts(header, TOKENS), header.arrays.get(TYPES, ())
    if len(types) != len(tokens) or not set(types) <= {NORMAL, CONTROL, USER_DEFINED, UNUSED}:
        raise header.error(TYPES, f"does not give each of the {len(tokens)} tokens a known type")
    # Rows of the embedding that have no token are listed as unused tokens.
    vocabulary = {text: i for i, (text, type_) in enumerate(zip(tokens, types, strict=True)) if type_ != UNUSED}
    if len(vocabulary) + types.count(UNUSED) != len(tokens):
        raise header.error(TOKENS, "holds a token twice")
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in _texts(header, MERGES))]
    begin = _marked(header, tokens, "bos", how.add_bos)
    end = _marked(header, tokens, "eos", False)
    try:
        tokenizer = how.build(vocabulary, merges)
        if begin or end:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*begin, "$A", *end],
                pair=[*begin, "$A", *end, *begin, "$B:1", *end],
                special_tokens=[(text, tokens.index(text)) for text in (*begin, *end)],
            )
    except Exception as error:  # boundary: tokenizers raises bare Exception, for example for a merge of no tokens
        raise header.error(MERGES, f"or the tokens cannot be used: {error}") from error
    tokenizer.add_tokens(
        [
            AddedToken(text, special=type_ == CONTROL, normalized=False)
            for text, type_ in zip(tokens, types, strict=True)
            if type_ in (CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer.to_str(), tokens


def _texts(header: GgufHeader, key: str) -> tuple[str, ...]:
    found = header.arrays.get(key)
    if found is None or not all(isinstance(each, str) for each in found):
        raise header.error(key, "is missing, or no list of strings")
    return tuple(map(str, found))


def _marked(header: GgufHeader, tokens: tuple[str, ...], name: str, default: bool) -> list[str]:
    """Return the token that every text begins ("bos") or ends ("eos") with, if there is one."""
    key = f"tokenizer.ggml.add_{name}_token"
    if not header.metadata.get(key, default):
        return []
    text = _named(header, tokens, name)
    if text is None:
        raise header.error(key, f"is true, but tokenizer.ggml.{name}_token_id is missing")
    return [text]


def _named(header: GgufHeader, tokens: tuple[str, ...], name: str) -> str | None:
    """Return the text of the token with this name, None without one."""
    key = f"tokenizer.ggml.{_NAMED[name]}_token_id"
    number = header.integer(key)
    if number is not None and not 0 <= number < len(tokens):
        raise header.error(key, f"is {number}, but there are {len(tokens)} tokens")
    return None if number is None else tokens[number]


def _config(header: GgufHeader, tokens: tuple[str, ...]) -> dict[str, Any]:
    """Return tokenizer_config.json: named tokens and chat templates."""
    named = {f"{name}_token": _named(header, tokens, name) for name in _NAMED}
    config: dict[str, Any] = {name: text for name, text in named.items() if text is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    templates: dict[str, Value] = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
        for key, value in header.metadata.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def tokenizer_keys(files: TokenizerFiles, size: int, templates: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the keys from which `gguf_tokenizer` makes this tokenizer of a model with `size` tokens again.

    `templates` are the chat templates by name. Return None for a tokenizer that has no GGUF form here.
    """
    tokenizer = files.tokenizer
    spec = json.loads(tokenizer.to_str())
    form = _form(spec)
    pre = next(
        (name for name, how in PRE_TOKENIZERS.items() if _form(json.loads(how.build({}, []).to_str())) == form), ""
    )
    added, texts = tokenizer.get_added_tokens_decoder(), {i: text for text, i in tokenizer.get_vocab().items()}
    ids = {name: tokenizer.token_to_id(files.special_tokens.get(f"{name}_token", "")) for name in _NAMED}
    # The tokens around every text: none, one or both of these.
    around, both = tokenizer.encode("").ids, (ids["bos"], ids["eos"])
    marks = next((each for each in product((False, True), repeat=2) if list(compress(both, each)) == around), None)
    merges = [" ".join(merge) for merge in spec["model"].get("merges", ())]
    flags = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
    if not pre or marks is None or not merges or flags or max(texts, default=size) >= size:
        return None
    types = {i: CONTROL if token.special else USER_DEFINED for i, token in added.items()}
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        TOKENS: [texts.get(i, f"[PAD{i}]") for i in range(size)],
        TYPES: [types.get(i, NORMAL) if i in texts else UNUSED for i in range(size)],
        MERGES: merges,
        "tokenizer.ggml.add_bos_token": marks[0],
        "tokenizer.ggml.add_eos_token": marks[1],
    }
    keys |= {f"tokenizer.ggml.{key}_token_id": ids[name] for name, key in _NAMED.items() if ids[name] is not None}
    keys |= {_TEMPLATE if name == "default" else f"{_TEMPLATE}.{name}": text for name, text in templates.items()}
    if others := [name for name in templates if name != "default"]:
        keys[f"{_TEMPLATE}s"] = others
    return keys


def _form(spec: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a tokenizer.json that decide over token ids, besides the vocabulary and added tokens."""
    model = spec["model"]
    names = ("type", "ignore_merges", "byte_fallback", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    rules = [model.get(name) or None for name in names]
    splits = [
        tuple(part.get(key) for key in ("type", "pattern", "behavior", "invert", "use_regex", "add_prefix_space"))
        for part in _flat(spec["pre_tokenizer"], "pretokenizers")
    ]
    decoder = [part["type"] for part in _flat(spec["decoder"], "decoders")]
    return rules, [part["type"] for part in _flat(spec["normalizer"], "normalizers")], splits, decoder


def _flat(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Return the parts of a sequence under `key`, or the part itself."""
    return [] if part is None else part[key] if part["type"] == "Sequence" else [part]
