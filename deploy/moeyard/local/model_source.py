"""Resolve a command's MODEL: a local directory, an id on the Hugging Face hub, or the bundled demo."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType

from moeyard.entry import load

# The demo's place in a checkout, and in an installed package (pyproject.toml copies it).
_DEMO_PLACES = (
    Path(__file__).resolve().parents[2] / "demo",
    Path(__file__).resolve().parents[1] / "bundled" / "demo",
)
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_PART = r"[A-Za-z0-9][\w.-]*"
_OWN_FORMS = "a MODEL is a directory or an id of the Hugging Face hub, such as Qwen/Qwen3-30B-A3B"
_ORIGINAL = "name the directory or the id of the model that it was made from"
_GGUF_READERS = "serve, doctor, verify and dequantize"
_DOWNLOAD = f"for {_GGUF_READERS} download the file, and name it"
# Weights in other formats, by the endings of their files.
_OTHER_FORMATS = MappingProxyType(
    {".gguf": "GGUF", ".ggml": "GGML", ".bin": "PyTorch", ".pt": "PyTorch", ".pth": "PyTorch", ".onnx": "ONNX"}
)


def checkpoint(args: argparse.Namespace) -> str:
    """Return the directory of the complete checkpoint. Download it if it is on the hub.

    Raises ValueError for an unsupported model, before any download of weights.
    """
    hub = hub_id(args.model)
    return local_directory(args) if hub is None else str(load("moeyard.local.hub").fetch(hub, args.revision))


def weights_source(args: argparse.Namespace) -> tuple[str, str | None]:
    """Return (directory of the complete checkpoint, None), or the directory that describes a GGUF file, and that file.

    Raises ValueError as `checkpoint` and `gguf_source` do.
    """
    source = gguf_source(args)
    return (checkpoint(args), None) if source is None else (source[1], source[0])


def described(args: argparse.Namespace) -> str:
    """Return the directory of a model's description: config, tokenizer and index. Hub weights may be missing."""
    hub = hub_id(args.model)
    return local_directory(args) if hub is None else str(load("moeyard.local.hub").describe(hub, args.revision))


def local_directory(args: argparse.Namespace) -> str:
    """Return the absolute path of the given directory, or of the demo's. Raises ValueError if there is none."""
    revision = getattr(args, "revision", None)
    if args.model == "":  # of a variable that is not set
        raise ValueError("MODEL is an empty text; name a model, or leave it out for the bundled demo")
    directory = Path(args.model or bundled_model())
    if directory.is_dir():
        why = other_format(str(directory), (file.name for file in directory.iterdir()))
    else:
        why = foreign_form(args.model, revision)
    if why:
        raise ValueError(why)
    if revision is not None:
        raise ValueError(f"--revision {revision}: only a model of the Hugging Face hub has revisions")
    return str(directory.resolve())


def gguf_source(args: argparse.Namespace) -> tuple[str, str] | None:
    """Return (GGUF file, directory of config.json and tokenizer), or None if MODEL is no GGUF file. Raises ValueError.

    The file's path keeps its links, because the hub's cache links the shards of a model to files with other names.
    """
    model = args.model
    given = {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in ("hf_config_path", "tokenizer")}
    flag = next((flag for flag, directory in given.items() if directory is not None), None)
    if model is None or "://" in model or _file_format(model) != "GGUF" or Path(model).is_dir():
        if flag is not None:
            raise ValueError(f"{flag} {given[flag]}: only a GGUF file needs it, and {model or 'the demo'} is none")
        return None
    if not Path(model).exists():
        raise ValueError(f"{model}: no such file")
    for name, directory in given.items():
        if directory is not None and not Path(directory).is_dir():
            raise ValueError(f"{name} {directory}: no such directory")
    config, tokenizer = (None if each is None else Path(each).resolve() for each in given.values())
    file = Path(model).absolute()
    found = load("moeyard.local.gguf_description").gguf_description(file, config=config, tokenizer=tokenizer)
    if getattr(args, "ray_address", None) is not None and found != config:
        raise ValueError(
            "--ray-address: every host needs config and tokenizer; give them with --hf-config-path DIR alone"
        )
    return str(file), str(found)


def hub_id(model: str | None) -> str | None:
    """Return `model` if it is a hub id (organisation/name) and not a local path, else None."""
    if model is None or not re.fullmatch(f"{_PART}/{_PART}", model) or Path(model).exists():
        return None
    return None if model.partition("/")[0] in _HUB_HOSTS or _file_format(model) else model


def other_format(where: str, files: Iterable[str]) -> str:
    """Name the format of a directory or repository with weights but no safetensors; "" otherwise."""
    names = sorted(files, key=lambda name: (_file_format(name) != "GGUF", name))
    found = next((name for name in names if _file_format(name)), None)
    if found is None or any(name.endswith(".safetensors") for name in names):
        return ""
    kind = _file_format(found)
    text = f"{where} has its weights as {kind} files ({found})"
    if kind != "GGUF":
        return f"{text}, which are not read; {_ORIGINAL}"
    # The files of a repository of the hub are not here.
    here = Path(where) / found if Path(where).is_dir() else None
    return f"{text}; {_DOWNLOAD if here is None else f'for {_GGUF_READERS} name the file {here}'}"


def foreign_form(model: str, revision: str | None = None) -> str:
    """Explain why `model`, not a directory, names no checkpoint, and what to use; "" for a path that is missing."""
    if (kind := _file_format(model)) and "://" not in model:
        readers = f"only {_GGUF_READERS} read" if kind == "GGUF" else "is not read"
        return f"{model} is a {kind} file, which {readers}; {_ORIGINAL}"
    if Path(model).exists():
        return f"{model} is a file; name the directory that it is in"
    scheme, _, rest = model.rpartition("://")
    host, _, path = rest.partition("/")
    if host.lower() in _HUB_HOSTS and scheme.lower() in ("", "http", "https", "hf"):
        return _of_hub(model, path, revision)
    if scheme == "hf":
        return _of_hub(model, rest, revision)
    if scheme:
        return f"{model} is a URL, which is not read; download it, and name the directory; {_OWN_FORMS}"
    tagged = re.fullmatch(rf"({_PART}(?:/{_PART})*)([:@])([\w.-]+)", model)
    if tagged is None:
        return "" if "/" in model or model in (".", "..") else f"no directory '{model}' here; {_OWN_FORMS}"
    name, sign, tag = tagged.groups()
    if "/" not in name or "library/" in name:
        return f"{model} is a name of Ollama's library, whose files are GGUF; {_OWN_FORMS}"
    if sign == ":" and (re.match(r"(?i)(UD-)?(I?Q\d|F16|F32|BF16)", tag) or "gguf" in name.lower()):
        return f"{model} names a GGUF file by its tag; {_DOWNLOAD}"
    return f"{model}: an id has no tag; a branch, tag or commit is --revision: `{name} --revision {tag}`"


def _of_hub(model: str, path: str, revision: str | None) -> str:
    """Return the advice for a hub URL, or for a hub name in the style of Ollama and llama.cpp."""
    parts = [part for part in re.split(r"[?#]", path)[0].split("/") if part]
    name = "/".join(parts[:2])
    if "gguf" in path.lower() or ":" in name:
        return f"{model} names GGUF files; {_DOWNLOAD}"
    if len(parts) < 2 or parts[0] in ("datasets", "spaces"):
        return f"{model} names no model; {_OWN_FORMS}"
    where = parts[3] if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve") else "main"
    given = f" --revision {where}" if where != "main" and revision is None else ""
    return f"{model} is an address, and an id has no host: give `{name}{given}`"


def _file_format(name: str) -> str:
    """Return the format of a weight file other than safetensors; "" for all other files."""
    return _OTHER_FORMATS.get(Path(name).suffix.lower(), "")


def bundled_model() -> str:
    """Return the directory of the demo checkpoint. Raises ValueError if the installation lacks it."""
    for place in _DEMO_PLACES:
        if (place / "config.json").is_file():
            return str(place)
    raise ValueError("the demo checkpoint is not part of this installation; name a MODEL, or use a checkout or a wheel")
