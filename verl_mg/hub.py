"""Models and data sets by their names on the Hugging Face hub or on ModelScope, as folders of the local cache.

Any number of processes may call these functions at the same time. `huggingface_hub` locks each file of its cache, so
that one process downloads it and the others wait; nodes that share the cache folder share the download.

    Qwen/Qwen3-0.6B@main           site hf, revision main
    modelscope:Qwen/Qwen3-0.6B     site modelscope, the main branch
    openai/gsm8k:main:train        site hf, part main:train, the configuration and split of a data set
    models/qwen3                   a path if it exists, else a name
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

from verl_mg.errors import UserError

Kind = Literal["model", "dataset"]
SITES = {"hf": "the Hugging Face hub", "modelscope": "ModelScope"}  # prefixes of names, and their sites
WORDS: dict[Kind, tuple[str, str]] = {
    "model": ("model", "model directory"),
    "dataset": ("data set", "data file or folder"),
}
"""Kinds of repositories, and what their names would be as paths, for messages."""
IGNORED = ("consolidated*", "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt")
"""Second copies of a model in other formats, such as original/, onnx/ and metal/."""
ANSWER_SECONDS = 30.0  # time limit for connecting to the Hugging Face hub and for each part of its answer

_NAME = re.compile(
    r"(?:(?P<site>\w+):)?(?P<repository>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<part>.*))?"
)


@dataclass(frozen=True)
class HubName:
    """Name of a model or data set on a hub: `[hf:|modelscope:]OWNER/NAME[@REVISION][:PART]`."""

    text: str  # the name as it was written
    site: str  # key of `SITES`
    repository: str  # owner and name
    revision: str | None  # branch, tag or commit; None for the main branch
    part: str  # configuration and split of a data set, as in `main:train`; "" for none

    @classmethod
    def parse(cls, path: str | Path) -> HubName | None:
        """Returns the name that a path stands for, `OWNER/NAME` or with a prefix; None where the path exists."""
        text = str(path)
        match = _NAME.fullmatch(text)
        site = match["site"] if match else None
        if Path(text).exists():
            return None
        if text.partition(":")[0] in SITES and site is None:
            raise UserError(f"{text}: not the name of a repository. Write hf:OWNER/NAME or modelscope:OWNER/NAME.")
        if match is None or site not in (None, *SITES):
            return None
        repository = match["repository"]
        if site is None and ("/" not in repository or repository.split("/")[0] in (".", "..")):
            return None
        return cls(text, site or "hf", repository, match["revision"], match["part"] or "")


def fetch(name: HubName, kind: Kind, patterns: Sequence[str], key: str = "") -> Path:
    """Returns the folder of the local cache that has a repository's files; downloads those that are not there.

    The site is asked which files the revision has now. Where it cannot be reached, the files of the cache are used.
    `*` in a pattern stands for any characters, "/" included. Errors begin with `key`, a key of the configuration.
    """
    with _errors_named(name, kind, key):
        if name.site == "modelscope":
            return _fetch_from_modelscope(name, kind, patterns)
        import httpx
        from huggingface_hub import errors, get_session, snapshot_download

        hooks = get_session().event_hooks["request"]
        if _limit_waiting not in hooks:
            hooks.append(_limit_waiting)
        download = partial(
            snapshot_download,
            name.repository,
            repo_type=kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(IGNORED) if kind == "model" else None,
        )
        try:
            return Path(download())
        except (httpx.TransportError, errors.OfflineModeIsEnabled):
            # The client wants the list of a commit's files, which caches of its older versions do not have.
            with suppress(errors.LocalEntryNotFoundError):
                return Path(download(local_files_only=True))
            raise


def _limit_waiting(request: Any) -> None:
    """Limits the time of a request without a limit: the client would wait for ever for a site that does not answer."""
    limits = request.extensions["timeout"]
    limits |= {kind: ANSWER_SECONDS for kind, seconds in limits.items() if seconds is None}


def files_of(name: HubName, folder: Path) -> list[str]:
    """Returns the names of all files of a data set, by its list in `folder`, or else the files there."""
    if name.site == "hf":
        from huggingface_hub import errors, get_cached_repo_tree

        # The folder has the name of its commit. Caches of older versions of the client have no lists.
        with suppress(errors.CachedRepoTreeNotFoundError):
            tree = get_cached_repo_tree(name.repository, repo_type="dataset", revision=folder.name)
            return sorted(file.path for file in tree)
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    # train-00000-of-00003.parquet says how many files there are.
    sets = Counter(re.sub(r"\d+-of-", "*-of-", file) for file in files)
    for pattern, number in sets.items():
        total = re.search(r"\*-of-(\d+)", pattern)
        if total and int(total[1]) != number:
            raise UserError(
                f"{name.text}: the cache has {number} of {int(total[1])} files {pattern} ({folder}). Run the command "
                "again where there is a network."
            )
    return files


def matching(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Returns the names that match one of the patterns, in their order."""
    return [file for file in files if any(fnmatchcase(file, pattern) for pattern in patterns)]


class _UnreachableError(Exception):
    """ModelScope cannot be reached, and its cache does not have the repository."""


def _fetch_from_modelscope(name: HubName, kind: Kind, patterns: Sequence[str]) -> Path:
    try:
        import modelscope
    except ImportError as error:
        raise UserError(
            f"{name.text}: the package modelscope is not installed ({error}). Run: pip install modelscope."
        ) from None

    def download(**more: bool) -> Path:
        wanted = {"repo_type": kind, "revision": name.revision, "allow_file_pattern": list(patterns)}
        return Path(modelscope.snapshot_download(name.repository, **wanted, **more))

    try:
        return download()
    except ConnectionError as error:  # of the list of files; a download that breaks off raises another one
        with suppress(Exception):
            return download(local_files_only=True)
        raise _UnreachableError from error


@contextmanager
def _errors_named(name: HubName, kind: Kind, key: str) -> Iterator[None]:
    """Turns the errors of a download into one line with a remedy."""
    from huggingface_hub import constants, errors

    site, (what, local) = SITES[name.site], WORDS[kind]
    at = f"{key}: {name.text}" if key else name.text
    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError:  # a RepositoryNotFoundError too
        raise UserError(
            f"{at}: access to this {what} is restricted. Accept its terms on its page of {site} and set HF_TOKEN."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{at}: no such {local}, and {site} shows no {what} of this name. Correct the path or the name, or set "
            "HF_TOKEN for a private one."
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{at}: has no revision {name.revision!r}. Write a branch, tag or commit after @.") from None
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _reason(error)
        cached = "only a part of it" if isinstance(error, errors.IncompleteSnapshotError) else "no copy of it"
        raise UserError(
            f"{at}: no such {local}; {site} cannot be reached ({reason}) and its cache {constants.HF_HUB_CACHE} has "
            f"{cached}. Correct the path, or download the {what} where there is a network and set HF_HOME to its cache."
        ) from None
    except _UnreachableError as error:
        raise UserError(
            f"{at}: no such {local}; {site} cannot be reached ({_reason(error)}) and its cache has no copy of it. "
            f"Correct the path, or download the {what} where there is a network and set MODELSCOPE_CACHE to its cache."
        ) from None
    except Exception as error:  # the clients raise errors of their HTTP libraries, of the system and their own
        raise UserError(
            f"{at}: no such {local}, and the download from {site} failed ({_reason(error)}). Run the command again, "
            "which continues it, or correct the path."
        ) from None


def _reason(error: Exception) -> str:
    # The clients wrap the error of the connection, which says what is wrong.
    cause: BaseException = error
    while cause.__cause__:
        cause = cause.__cause__
    text = next(iter(str(cause).strip().splitlines()), "")
    return f"{type(cause).__name__}: {text}".rstrip(": .")
