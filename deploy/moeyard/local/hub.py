"""Models from the Hugging Face hub, read from the local cache or downloaded into it.

The description of a model (config, tokenizer, template, index) comes first, so an unsupported model costs no download
of weights. huggingface_hub reads its own settings: HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. It takes half a
second to import, so this module is imported only for a model that is not a directory.
"""

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import tqdm

from moeyard.entry import INTERRUPTED
from moeyard.local.model_source import other_format
from moeyard.local.startup import Progress
from moeyard_worker.config.engine_config import format_size
from moeyard_worker.models.families import load_model_config

# A model's description is in the repository's root, named chat templates in their own folder. Other folders hold copies
# for other programs. DeepSeek-V4's encoder names its reasoning efforts. It is read, never run.
_DESCRIPTION = (
    *("*.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    "encoding/encoding_dsv4.py",
)
_UNWANTED = ("*/*.json", "consolidated*")
_LOOK_SECONDS = 0.5
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class _Silent(tqdm):
    """Hides the library's progress bar, which counts files. moeyard shows bytes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """Weights that the cache lacks: `files` with their sizes in bytes.

    `directory` holds the model's description and is named after its commit. `keys`: all tensors of the index, empty
    without an index. `free`: bytes left on the cache's disk.
    """

    model: str
    directory: Path
    files: dict[str, int]
    keys: frozenset[str]
    free: int

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    def fetched(self) -> int:
        """Return the bytes on disk, in whole files and in the library's incomplete ones."""
        whole = sum(size for name, size in self.files.items() if (self.directory / name).is_file())
        parts = 0
        for part in (self.directory.parents[1] / "blobs").glob("*.incomplete"):
            with suppress(FileNotFoundError):  # boundary: it has just become a whole one
                parts += part.stat().st_size
        return min(whole + parts, self.num_bytes)

    def check_room(self) -> None:
        """Raise ValueError if the cache's disk is too small."""
        if self.num_bytes - self.fetched() > self.free:
            raise ValueError(f"{self.model}: {self}; make room, or set HF_HUB_CACHE to a folder on a larger disk")

    def __str__(self) -> str:
        files = f"{len(self.files)} file{'s'[: len(self.files) != 1]}"
        return (
            f"{format_size(self.num_bytes)} of weights to download in {files}, {format_size(self.free)} are free in "
            f"{constants.HF_HUB_CACHE}"
        )


def describe(model: str, revision: str | None) -> Path:
    """Return the directory of `model` ("organisation/name") at a branch, tag or commit (None: its main branch).

    It holds all files but the weights, and cached weights. The hub is queried only if the cache is incomplete, so a
    branch stays at the commit of its first download. Raises ValueError with one line if the model is unavailable.
    """
    cached = _cached(model, revision)
    if cached is not None and missing_file(cached) is None:
        return cached
    with _one_line(model, revision):
        directory = _description(model, revision).resolve()
    lacking = missing_file(directory, weights=False)
    if lacking is not None:
        why = f"{model}: {directory} has no {lacking}, and the hub gave none"
        raise ValueError(_format_problem(model, directory) or why)
    return directory


def missing_weights(model: str, directory: Path) -> Download | None:
    """Return the download that completes the model in `directory` (from `describe`), or None if it is complete.

    Raises ValueError with one line if the hub lacks some files.
    """
    if (lacking := missing_file(directory)) is None:
        return None
    keys, names = _index(directory)
    with _one_line(model, directory.name):
        listed = HfApi().list_repo_tree(model, revision=directory.name)
        sizes = {file.path: file.size for file in listed if isinstance(file, RepoFile)}
    files = {name: sizes[name] for name in names if name in sizes and not (directory / name).is_file()}
    if absent := [name for name in names if name not in sizes]:
        why = f"{model}: {directory} has no {lacking}, and the hub has no {absent[0]}"
        raise ValueError(other_format(model, sizes) or why)
    cache = Path(constants.HF_HUB_CACHE)
    place = next(folder for folder in (cache, *cache.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    return Download(model=model, directory=directory, files=files, keys=keys, free=free)


def download(weights: Download) -> None:
    """Fetch weights into the cache, with progress on stderr. Raises ValueError with one line when it cannot be done.

    Ctrl-C ends this process at once, which has started nothing yet: the library's threads would hold its end up until
    they have their files. The next download goes on with what is there.
    """
    weights.check_room()
    failed: list[Exception] = []

    def fetch() -> None:
        try:
            snapshot_download(
                weights.model,
                revision=weights.directory.name,
                allow_patterns=list(weights.files),
                tqdm_class=_Silent,
            )
        except Exception as error:  # boundary: raised again by the thread that waits
            failed.append(error)

    thread, progress = threading.Thread(target=fetch, name="download", daemon=True), Progress("downloading weights")
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            progress.show(weights.fetched(), weights.num_bytes)
        progress.close()
    except KeyboardInterrupt:
        progress.close()
        os._exit(INTERRUPTED)
    with _one_line(weights.model, weights.directory.name):
        if failed:
            raise failed[0]
    if (lacking := missing_file(weights.directory)) is not None:
        raise ValueError(f"{weights.model}: {weights.directory} has no {lacking}, and the hub gave none")
    print(f"downloaded {format_size(weights.num_bytes)} of weights", file=sys.stderr, flush=True)


def fetch(model: str, revision: str | None) -> str:
    """Return the directory of the complete model. Raises ValueError before the weights for an unsupported model."""
    directory = describe(model, revision)
    if (weights := missing_weights(model, directory)) is not None:
        load_model_config(directory)
        print(f"{model}: {weights}", file=sys.stderr, flush=True)
        download(weights)
    return str(directory)


def missing_file(directory: Path, *, weights: bool = True) -> str | None:
    """Return the first file that this checkpoint lacks, or None. `weights`: check weight files, too.

    Contents are checked elsewhere.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            return name
    if not weights:
        return None
    try:
        _, names = _index(directory)
    except ValueError:
        return f"{_INDEX} that can be read"
    absent = next((name for name in names if not (directory / name).is_file()), None)
    return _INDEX if absent == _SINGLE and not (directory / _INDEX).is_file() else absent


def _index(directory: Path) -> tuple[frozenset[str], list[str]]:
    """Return all tensors of the index and their files; without an index the single file. Raises ValueError."""
    index = directory / _INDEX
    if not index.is_file():
        return frozenset(), [_SINGLE]
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return frozenset(files), sorted(set(files.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: weight_map is missing or not a map of keys to file names") from error


def _format_problem(model: str, directory: Path) -> str:
    """Name the unsupported format of a model with an incomplete description; "" if unknown."""
    try:
        return other_format(model, HfApi().list_repo_files(model, revision=directory.name))
    except Exception:  # boundary: the caller reports an error already, and the hub may be unreachable
        return ""


def _description(model: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    """Return the directory of a model's description, downloaded if not cached. Raises the library's errors."""
    return Path(
        snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(_DESCRIPTION),
            ignore_patterns=list(_UNWANTED),
            local_files_only=local_files_only,
            tqdm_class=_Silent,
        )
    )


def _cached(model: str, revision: str | None) -> Path | None:
    """Return the model's directory in the cache; None if it or a file of the description is missing."""
    try:
        return _description(model, revision, local_files_only=True).resolve()
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ValueError(f"'{model}' is neither a directory here nor an id of the Hugging Face hub") from error


@contextmanager
def _one_line(model: str, revision: str | None) -> Iterator[None]:
    """Convert errors of huggingface_hub in this block to ValueError with one line."""
    here = f"no directory '{model}' here, "
    try:
        yield
    except GatedRepoError as error:
        raise ValueError(f"{model}: accept its terms on the hub, then `hf auth login` or set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{here}and the Hugging Face hub has no such model; if it is private, `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{model}: the Hugging Face hub has no revision '{revision}' of it") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(f"{here}{_unreached(error)}; name a local directory, or fetch it first") from error
    except Exception as error:  # boundary: the library passes on whatever its HTTP client and the disk raise
        raise ValueError(f"{model}: cannot be fetched: {type(error).__name__}: {_first_line(error)}") from error


def _unreached(error: Exception) -> str:
    where = "not whole in the hub's cache"
    if isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled):
        return f"{where}, and HF_HUB_OFFLINE forbids to fetch it"
    return f"{where}, and the hub cannot be reached ({_first_line(error.__cause__ or error)})"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
