"""The description of a GGUF file's model, as a directory that all other code reads like one of the hub.

The directory is in the user's cache and named after its content, so each start of a server finds it again.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moeyard_worker.checkpoint.gguf_config import gguf_config, gguf_generation_config
from moeyard_worker.checkpoint.gguf_header import read_gguf_header
from moeyard_worker.checkpoint.gguf_index import shards
from moeyard_worker.checkpoint.gguf_tokenizer import TOKENIZER_ARRAYS, gguf_tokenizer

CACHE = Path("~/.cache/moeyard/gguf")
_CONFIG_FILES = ("config.json", "generation_config.json")


def gguf_description(file: Path, *, config: Path | None, tokenizer: Path | None) -> Path:
    """Return a directory with config.json, generation_config.json, and the tokenizer's files.

    They are those of the given directories; that of config.json may hold the tokenizer too. All others come out of the
    metadata of `file`. Raises CheckpointError if that does not hold them, ValueError if the cache cannot be written.
    """
    if config is not None and tokenizer is None and (config / "tokenizer.json").exists():
        return config
    headers = [read_gguf_header(each, TOKENIZER_ARRAYS) for each in shards(file)]
    texts: dict[str, str] = {}
    links: dict[str, Path] = {}
    if config is not None:
        links |= {name: config / name for name in _CONFIG_FILES if (config / name).exists()}
    else:
        shapes = {name: entry.shape for header in headers for name, entry in header.tensors.items()}
        values = (gguf_config(headers[0], shapes), gguf_generation_config(headers[0]))
        texts |= {name: json.dumps(value) for name, value in zip(_CONFIG_FILES, values, strict=True) if value}
    if tokenizer is not None:
        links |= {each.name: each for each in sorted(tokenizer.iterdir()) if each.name not in _CONFIG_FILES}
    else:
        texts |= gguf_tokenizer(headers[0])
    try:
        return _write(file.stem, texts, links)
    except OSError as error:
        raise ValueError(f"{file}: its description cannot be written: {error}; give --hf-config-path DIR") from error


def _write(name: str, texts: Mapping[str, str], links: Mapping[str, Path]) -> Path:
    """Return a directory of the cache with these texts and links, after writing it if it is absent."""
    content = json.dumps([dict(texts), {key: str(path) for key, path in links.items()}], sort_keys=True)
    target = CACHE.expanduser() / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for key, text in texts.items():
            (unfinished / key).write_text(text, "utf-8")
        for key, path in links.items():
            (unfinished / key).symlink_to(path)
        unfinished.rename(target)
    except OSError:
        shutil.rmtree(unfinished)
        # Another process may have written it meanwhile.
        if not target.is_dir():
            raise
    return target
