"""A model by its id on the Hugging Face hub: out of the local cache where it is whole, else downloaded into it.

huggingface_hub reads its own settings (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). It takes half a second to load,
so this file is loaded for a model that is no directory only.
"""

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# What is served of a repository: its own folder, and the weights once, not as other programs keep them too.
_WANTED = ("*.safetensors", "*.json", "*.jinja")
_UNWANTED = ("*/*", "consolidated*")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def fetch(model: str, revision: str | None) -> str:
    """The directory of `model` ("organisation/name") at a branch, tag or commit (None: its main branch).

    The hub is asked only if the cache lacks some of it, so a branch stays where it was when it was fetched. Raises
    `ValueError` with one line when it cannot be had.
    """
    cached = _cached(model, revision)
    if cached is not None and missing_file(cached) is None:
        return str(cached)
    here = f"no directory '{model}' here, "
    try:
        fetched = Path(
            snapshot_download(model, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED))
        ).resolve()
    except GatedRepoError as error:
        raise ValueError(f"{model}: accept its terms on the hub, then `hf auth login` or set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{here}and the Hugging Face hub has no such model; if it is private, `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{model}: the Hugging Face hub has no revision '{revision}' of it") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(f"{here}{_unreached(error)}; name a local directory, or fetch it first") from error
    except Exception as error:  # boundary: the library passes on whatever its HTTP client and the disk raise
        raise ValueError(f"{model}: cannot be fetched: {type(error).__name__}: {_first_line(error)}") from error
    lacking = missing_file(fetched)
    if lacking is not None:
        raise ValueError(f"{model}: {fetched} has no {lacking}, and the hub gave none")
    return str(fetched)


def missing_file(directory: Path) -> str | None:
    """The first file that a checkpoint needs and this directory lacks, or None; contents are checked elsewhere."""
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            return name
    index = directory / _INDEX
    if not index.is_file():
        return None if (directory / _SINGLE).is_file() else _INDEX
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_INDEX} that can be read"
    return next((name for name in files if not (directory / name).is_file()), None)


def _cached(model: str, revision: str | None) -> Path | None:
    """What the cache has of it; None where it has nothing, or knows that files are missing."""
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
                local_files_only=True,
            )
        ).resolve()
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ValueError(f"'{model}' is neither a directory here nor an id of the Hugging Face hub") from error


def _unreached(error: LocalEntryNotFoundError) -> str:
    where = "not whole in the hub's cache"
    if type(error.__cause__).__name__ == "OfflineModeIsEnabled":
        return f"{where}, and HF_HUB_OFFLINE forbids to fetch it"
    return f"{where}, and the hub cannot be reached ({_first_line(error.__cause__ or error)})"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
