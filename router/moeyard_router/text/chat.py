"""Text in: the tokenizer of a checkpoint directory, and its chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding

from moeyard_router.errors import bad_request
from moeyard_router.text.detokenizer import LengthCheck, TokenBytes, most_characters
from moeyard_router.text.template import ChatTemplate
from moeyard_worker.tokenizer import is_there, read_object, read_text, read_tokenizer

_USED_TEMPLATES = ("default", "tool_use")
_DEEPSEEK_V4 = Path(__file__).with_name("deepseek_v4.jinja")
_SHORT_TEXT = 512  # characters; handing a shorter text to the tokenizer's threads takes longer than tokenizing it


class TextCodec:
    """Text to token ids and back, for one checkpoint directory.

    `template` is for chats without tools, `tool_template` for chats with tools. The file `chat_template` replaces both.
    The post-processor of tokenizer.json adds special tokens. Raises `ValueError` with the name of the faulty file.
    """

    has_text = True

    def __init__(self, directory: Path, chat_template: Path | None = None, *, killable: bool = False) -> None:
        path = directory / "tokenizer.json"
        files = read_tokenizer(directory)
        if files is None:
            others = sorted(file.name for file in directory.glob("*tiktoken*"))
            made = f"; make it from {others[0]} with transformers' TikTokenConverter (docs/tools.md)" if others else ""
            raise ValueError(f"{path}: no such file; the router needs a checkpoint with a tokenizer.json{made}")
        self._tokenizer = files.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        try:
            self.token_bytes = TokenBytes(self._tokenizer)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        per_token = most_characters(json.loads(self._tokenizer.to_str()), self.token_bytes.longest)
        self._check_length = LengthCheck(per_token, lambda piece: len(self._encoding(piece, add_special_tokens=False)))
        config, self.special_tokens = files.config, files.special_tokens
        if chat_template is None:
            found = template_sources(directory, config)
        else:
            found = {"default": (chat_template, read_text(chat_template))}
        templates = {name: _template(*found[name], self.special_tokens, killable=killable) for name in found}
        self.template = templates.get("default")
        self.tool_template = templates.get("tool_use", self.template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`. Tokenize long texts in a thread, where they release the interpreter lock."""
        if len(text) < _SHORT_TEXT:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self._encoding(text, add_special_tokens=add_special_tokens).ids)

    def check_length(self, text: str, limit: int, param: str) -> None:
        """Raise `ApiError` 400 for a text that surely exceeds `limit` tokens. May tokenize parts of it."""
        self._check_length(text, limit, param)

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Encoding:
        # `encode` holds the interpreter lock to its end, but a batch of one does not (tokenizers 0.23). Without
        # offsets, a batch takes two thirds of the time, and freeing its result a tenth.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes.of(i) for i in token_ids).decode("utf-8", "replace")

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them (`Ġthe`). "" for ids without a token."""
        return [self._tokenizer.id_to_token(i) or "" for i in token_ids]


class IdCodec:
    """No tokenizer: prompts and answers are token ids, as with vLLM's --skip-tokenizer-init."""

    template = tool_template = None
    has_text = False

    def __init__(self) -> None:
        self.token_bytes = TokenBytes(None)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raise `ApiError` 400, because there is no tokenizer."""
        raise bad_request("this server has no tokenizer: give 'prompt' as a list of token ids", "prompt")

    def check_length(self, text: str, limit: int, param: str) -> None:
        """Do nothing, because the number of tokens is unknown."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        return [""] * len(token_ids)


Codec = TextCodec | IdCodec


def open_codec(directory: Path | None, chat_template: Path | None = None, *, killable: bool = False) -> Codec:
    """Return the codec of a checkpoint directory, or of a model without one. Raises `ValueError` and `OSError`."""
    if directory is not None:
        return TextCodec(directory, chat_template, killable=killable)
    if chat_template is not None:
        raise ValueError(f"chat template {chat_template}: chats need a tokenizer")
    return IdCodec()


def _template(path: Path, source: Any, special_tokens: Mapping[str, str], *, killable: bool) -> ChatTemplate:
    """Return the chat template with this source. Raises `ValueError` with the name of its file."""
    if not isinstance(source, str):
        raise ValueError(f"{path}: chat_template must be a string or a list of named ones")
    try:
        return ChatTemplate(source, special_tokens, killable=killable)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    """Return file and text of the templates `default` and `tool_use`.

    As in transformers, chat_template.jinja and additional_chat_templates/ replace chat_template.json, which replaces
    the template in tokenizer_config.json. A DeepSeek-V4 without any gets the one of this package.
    """
    path = directory / "chat_template.jinja"
    found: dict[str, tuple[Path, Any]] = {"default": (path, read_text(path))} if is_there(path) else {}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        name = path.name.removesuffix(".jinja")
        found[name] = path, read_text(path) if name in _USED_TEMPLATES else ""
    if not found:
        path = directory / "chat_template.json"
        own: Mapping[str, Any] | None = read_object(path)
        if own is None:
            path, own = directory / "tokenizer_config.json", config
        found = {name: (path, source) for name, source in _named(path, own.get("chat_template")).items()}
    model = {} if found else read_object(directory / "config.json") or {}
    if model.get("model_type") == "deepseek_v4":
        found = {"default": (_DEEPSEEK_V4, _deepseek_v4(directory, model))}
    used = {name: found[name] for name in _USED_TEMPLATES if name in found}
    if found and not used:
        raise ValueError(f"{path}: none of the chat templates {', '.join(sorted(found))} is named 'default'")
    return used


def _deepseek_v4(directory: Path, model: Mapping[str, Any]) -> str:
    """Return the template of DeepSeek-V4 with the reasoning efforts of the checkpoint's release.

    The releases of July and August 2026 (0731, 0813) have other efforts than those of April. The authors' encoder is
    beside the weights and says which ones; it is only read. Copies often lack it, so the drafter's keys, which came
    with these releases, decide then.
    """
    path = directory / "encoding" / "encoding_dsv4.py"
    later = "Reasoning Effort: Beyond maximum" in read_text(path) if is_there(path) else "dspark_block_size" in model
    return f"{{%- set efforts_of_0731 = {'true' if later else 'false'} %}}{read_text(_DEEPSEEK_V4)}"


def _named(path: Path, given: Any) -> dict[str, Any]:
    """Return templates by name, from the value of chat_template. A template without a name is the default."""
    if given is None:
        return {}
    if isinstance(given, list):
        for entry in given:
            if not (isinstance(entry, dict) and isinstance(entry.get("name"), str) and "template" in entry):
                raise ValueError(f"{path}: a chat_template of a list needs a name and a template, got {entry!r:.80}")
        return {entry["name"]: entry["template"] for entry in given}
    return given if isinstance(given, dict) else {"default": given}
