"""A model by its id on the Hugging Face hub: out of the local cache where it is whole, else downloaded into it.

The description of a model (config, tokenizer, template, index) comes first, so that a model that is not served costs no
download of weights. huggingface_hub reads its own settings (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). It takes
half a second to load, so this file is loaded for a model that is no directory only.
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

# The description of a model lies in the repository's own folder, named chat templates in one of theirs. Other folders
# hold copies for other programs.
_DESCRIPTION = ("*.json", "chat_template.jinja", "additional_chat_templates/*.jinja")
_UNWANTED = ("*/*.json", "consolidated*")
_LOOK_SECONDS = 0.5
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class _Silent(tqdm):
    """The library's bar, of files, which is never drawn: progress is shown in bytes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """Weights of a model that the cache lacks: `files` with their sizes in bytes.

    `directory` has what describes the model, at the commit that it is named after. `keys` are all tensors of the index,
    none where there is no index. `free` bytes are left on the cache's disk.
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
        """Bytes that are there by now, whole files and what the library calls incomplete ones."""
        whole = sum(size for name, size in self.files.items() if (self.directory / name).is_file())
        parts = 0
        for part in (self.directory.parents[1] / "blobs").glob("*.incomplete"):
            with suppress(FileNotFoundError):  # boundary: it has just become a whole one
                parts += part.stat().st_size
        return min(whole + parts, self.num_bytes)

    def check_room(self) -> None:
        """Raise ValueError where the cache's disk is too small."""
        if self.num_bytes - self.fetched() > self.free:
            raise ValueError(f"{self.model}: {self}; make room, or set HF_HUB_CACHE to a folder on a larger disk")

    def __str__(self) -> str:
        files = f"{len(self.files)} file{'s'[: len(self.files) != 1]}"
        return (
            f"{format_size(self.num_bytes)} of weights to download in {files}, {format_size(self.free)} are free in "
            f"{constants.HF_HUB_CACHE}"
        )


def describe(model: str, revision: str | None) -> Path:
    """The directory of `model` ("organisation/name") at a branch, tag or commit (None: its main branch).

    It has all but the weights, and these where the cache has them. The hub is asked only if the cache lacks some of the
    model, so a branch stays where it was when it was fetched. Raises ValueError with one line when it cannot be had.
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
    """Return the download that makes the model in `directory` (from `describe`) whole; None where it is.

    Raises ValueError with one line where the hub has not all of it.
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
    """The directory of the whole model. Raises ValueError as `describe`, and before any weights if it is not served."""
    directory = describe(model, revision)
    if (weights := missing_weights(model, directory)) is not None:
        load_model_config(directory)
        print(f"{model}: {weights}", file=sys.stderr, flush=True)
        download(weights)
    return str(directory)


def missing_file(directory: Path, *, weights: bool = True) -> str | None:
    """The first file that a checkpoint needs and this directory lacks, or None; contents are checked elsewhere.

    Without `weights` those are not looked for.
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
    """All tensors of the index and the files that they are in; without an index the one file. Raises ValueError."""
    index = directory / _INDEX
    if not index.is_file():
        return frozenset(), [_SINGLE]
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return frozenset(files), sorted(set(files.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: weight_map is missing or not a map of keys to file names") from error


def _format_problem(model: str, directory: Path) -> str:
    """Name the wrong format of a model whose description is not whole; "" where that cannot be told."""
    try:
        return other_format(model, HfApi().list_repo_files(model, revision=directory.name))
    except Exception:  # boundary: another error is told already, and the hub may be out of reach
        return ""


def _description(model: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    """Directory of the files that describe a model, fetched where the cache lacks them. Raises as the library does."""
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
    """Return the cache's directory of it; None without one, or where files of the description are missing."""
    try:
        return _description(model, revision, local_files_only=True).resolve()
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ValueError(f"'{model}' is neither a directory here nor an id of the Hugging Face hub") from error


@contextmanager
def _one_line(model: str, revision: str | None) -> Iterator[None]:
    """Raise what huggingface_hub raises in this block as a ValueError with one line."""
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
