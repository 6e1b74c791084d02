"""The tokenizer of a checkpoint directory, with every token that one of its files names.

tokenizer.json holds the vocabulary. tokenizer_config.json, special_tokens_map.json and added_tokens.json may name more
tokens, or call a known token special. Router and workers read them here, so that both know the same ids. Order and
precedence are those of transformers 5.17 (`PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend.__init__`).
"""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_MAX_BYTES = 256 << 20  # of one file; the largest published tokenizer.json has 35 MB (2026-11)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer of a checkpoint.

    tokenizer: with all tokens of all files. json: the same as text.
    config: tokenizer_config.json.
    special_tokens: the texts of named tokens (`eos_token`), as chat templates see them.
    """

    tokenizer: Tokenizer
    json: str
    config: Mapping[str, Any]
    special_tokens: Mapping[str, str]

    def json_within(self, vocab_size: int) -> str:
        """Return `json` without added tokens whose ids are at least `vocab_size`, because llguidance refuses them."""
        if all(number < vocab_size for number in self.tokenizer.get_added_tokens_decoder()):
            return self.json
        spec = json.loads(self.json)
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < vocab_size]
        return json.dumps(spec)


def read_tokenizer(directory: Path) -> TokenizerFiles | None:
    """Read the tokenizer of a checkpoint; None without a tokenizer.json. Raises `ValueError` naming the file at fault.

    Missing tokens get the next free ids, in the order of the ids that the files give them.
    """
    path = directory / "tokenizer.json"
    if not is_there(path):
        return None
    text = read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # boundary: tokenizers raises bare Exception for any bad file
        raise ValueError(f"{path}: {error}") from error
    path = directory / "tokenizer_config.json"
    config = read_object(path) or {}
    known = tokenizer.get_added_tokens_decoder()
    values, added = _joined(config), _listed(path, config.get("added_tokens_decoder"))
    if config.get("added_tokens_decoder") is None:
        _named(path, values)  # raises an error that names this file
        path = directory / "special_tokens_map.json"
        values |= read_object(path) or {}
        # Under the list's older name in special_tokens_map.json, transformers makes no token special here.
        usual = (*(values.get(name) for name in _NAMED), *(values.get("extra_special_tokens") or ()))
        special = {_token(path, "a special token", given).content for given in usual if given is not None}
        added = _legacy(directory / "added_tokens.json", special) | known
        values = _joined(values)
    named, by_text = _named(path, values), {token.content: token for token in added.values()}
    named |= {name: by_text.get(token.content, token) for name, token in named.items() if name in _NAMED}
    extra = [_token(path, "extra_special_tokens", given) for given in values.get("extra_special_tokens") or ()]
    tokens = [added[number] for number in sorted(added)]
    texts = {token.content for token in (*known.values(), *tokens)}
    tokens += [token for token in (*named.values(), *extra) if token.content not in texts]
    # A token that was special before remains special: the tokenizer continues to hide it.
    texts = {token.content for token in named.values()} | {token.content for token in known.values() if token.special}
    for token in tokens:
        token.special = token.special or token.content in texts
    tokenizer.add_tokens(tokens)
    if repr(tokenizer.get_added_tokens_decoder()) != repr(known):
        text = tokenizer.to_str()
    return TokenizerFiles(tokenizer, text, config, {name: token.content for name, token in named.items()})


def is_there(path: Path) -> bool:
    """Return whether a file exists. Raises `ValueError` naming a path that is no regular file, or is too large."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: is not a regular file, as the files of a checkpoint are")
    if found.st_size > _MAX_BYTES:
        raise ValueError(f"{path}: has {found.st_size} bytes, at most {_MAX_BYTES} are read")
    return True


def read_text(path: Path) -> str:
    """Return the file's text. Raises `ValueError` naming it if it is not UTF-8, or no regular file."""
    is_there(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None without the file. Raises `ValueError` naming it for anything else."""
    if not is_there(path):
        return None
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return data


def _listed(path: Path, given: Any) -> dict[int, AddedToken]:
    """Return `added_tokens_decoder`, a map of ids to tokens."""
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(number.isdecimal() for number in given):
        raise ValueError(f"{path}: added_tokens_decoder must be an object with ids as keys, got {given!r:.80}")
    return {
        int(number): _token(path, f"added_tokens_decoder {number}", given[number], special=False) for number in given
    }


def _joined(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with one list of unnamed special tokens. Tokens of a map become values of their names."""
    joined = dict(values)
    lists = [joined.pop(key, None) for key in ("extra_special_tokens", "additional_special_tokens")]
    for given in lists:
        if isinstance(given, dict):
            joined |= {name if name.endswith("_token") else f"{name}_token": given[name] for name in given}
    return {**joined, "extra_special_tokens": next((given for given in lists if isinstance(given, list)), None)}


def _legacy(path: Path, special: set[str]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json, a map of texts to ids; those in `special` are special."""
    tokens = {}
    for text, number in (read_object(path) or {}).items():
        if not isinstance(number, int):
            raise ValueError(f"{path}: {text!r:.80} must have an id, got {number!r:.80}")
        tokens[number] = AddedToken(text, special=text in special, normalized=text not in special)
    return tokens


def _named(path: Path, values: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return the tokens with names: the usual ones first, then a model's own (`image_token`)."""
    others = (name for name in values if name.endswith("_token") and name not in _NAMED)
    # Flags such as add_bos_token have such a name, too.
    others = (name for name in others if isinstance(values[name], str | dict))
    names = (*(name for name in _NAMED if values.get(name) is not None), *others)
    return {name: _token(path, name, values[name]) for name in names}


def _token(path: Path, name: str, given: Any, **defaults: bool) -> AddedToken:
    """Return a token that a file gives as a string, or as an object with `content` and flags."""
    content = given.get("content") if isinstance(given, dict) else given
    if not isinstance(content, str):
        raise ValueError(f"{path}: {name} must be a string or an object with a string 'content', got {given!r:.80}")
    flags = {flag: given[flag] for flag in _FLAGS if flag in given} if isinstance(given, dict) else {}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ValueError(f"{path}: {name} has a flag that is neither true nor false: {given!r:.200}")
    return AddedToken(content, **{"special": True, **defaults, **flags})
