"""Runs on the Hugging Face Hub: ``maple push RUN hf://ORG/NAME``, and ``maple.load("hf://ORG/NAME@REVISION")``.

What goes there is what a prediction needs, a model card, and the gallery only if asked, since it holds training images;
sources of images and the command of the run are left out. What comes from there is untrusted: only files with the names
of a run are fetched, after their sizes were checked, and none of them runs code without ``trust``.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from maple import __version__
from maple.errors import RunError, UsageError, naming_extras
from maple.files import (
    RunFile,
    check_finished,
    check_links,
    load_arrays,
    load_json,
    read_metadata,
    save_arrays,
    without_paths,
)
from maple.runs.folder import RunFolder, RunOrigin, RunSettings
from maple.runs.hub_card import set_name, write_card

PREFIX = "hf://"
CARD = "README.md"
NEEDED = (RunFile.WEIGHTS, RunFile.DETECTOR)
LIMITS = {  # bytes of each file that is fetched
    RunFile.WEIGHTS: 16 * 2**30,
    RunFile.DETECTOR: 4 * 2**30,
    RunFile.CONFIG: 2**20,
    RunFile.CLASSES: 2**26,
    RunFile.MANIFEST: 2**20,
}
FOLDERS = {  # the same for files of a folder
    RunFile.GALLERY: (re.compile(r"[\w.-]+\.(png|json|safetensors)"), 2**28),
    RunFile.NETWORK: (re.compile(r"[\w.-]+"), 16 * 2**30),  # runs code: with trust only
}
MAX_FILES = 1000
NAMED = ("timm", "torchvision", "python")  # networks that are opened by a name, not by a path


@dataclass(frozen=True)
class HubPlace:
    """A repository on the hub, and a branch, tag or commit of it.

    >>> HubPlace.parse("hf://lab/diatoms@v2")
    HubPlace(repository='lab/diatoms', revision='v2')
    """

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubPlace:
        found = re.fullmatch(r"hf://([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w-][\w./-]*))?", text)
        if found is None or ".." in text:
            raise UsageError(f"'{text}' is no place on the hub: give hf://ORG/NAME or hf://ORG/NAME@REVISION")
        return cls(found[1], found[2])

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class PushReport:
    """What was pushed, and where to."""

    place: str  # with the commit, for maple.load
    url: str
    files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """The report in a few lines."""
        return f"pushed {', '.join(self.files)}\nload it with maple.load({self.place!r})\npage: {self.url}"


# --- there ------------------------------------------------------------------------------------------------------------


def push_run(
    run: Path, place: str, *, gallery: bool = False, private: bool = False, message: str | None = None
) -> PushReport:
    """Write a finished run into a repository, which is made if there is none; files of an earlier run are replaced.

    ``gallery`` includes the thumbnails of training images.
    """
    target = HubPlace.parse(place)
    check_finished(run)
    files = _outgoing(RunFolder(run), target, gallery)
    with _talking(target) as hub:
        api = hub.HfApi(library_name="maple", library_version=__version__)
        api.create_repo(target.repository, private=private, exist_ok=True)
        if target.revision is not None:
            api.create_branch(target.repository, branch=target.revision, exist_ok=True)
        there = api.model_info(target.repository, revision=target.revision).siblings or ()
        stale = [each.rfilename for each in there if _limit(each.rfilename, True) and each.rfilename not in files]
        operations = [hub.CommitOperationAdd(name, content) for name, content in files.items()]
        operations += [hub.CommitOperationDelete(name) for name in stale]
        message = message or f"Push a run of maple {__version__}"
        made = api.create_commit(target.repository, operations, commit_message=message, revision=target.revision)
    pinned = str(HubPlace(target.repository, made.oid))
    return PushReport(pinned, f"{api.endpoint}/{target.repository}", tuple(sorted(map(str, files))))


def _outgoing(run: RunFolder, place: HubPlace, gallery: bool) -> dict[str, bytes | str]:
    """Content, or the path of it, by name in the repository."""
    check_links(run.path)
    files: dict[str, bytes | str] = {str(name): str(run / name) for name in NEEDED}
    with tempfile.TemporaryDirectory() as folder:
        clean = RunFolder(Path(folder))
        weights, described = run / RunFile.WEIGHTS, read_metadata(run / RunFile.WEIGHTS)
        public = without_paths(described)
        if (run / RunFile.CONFIG).is_file():
            settings = run.read_config()
            known = settings.origin
            origin = RunOrigin(source=Path(known.source).name, preset=known.preset, plugin=known.plugin)  # no path
            sections = dict(settings.sections)
            kind = (public.get("origin") or {}).get("kind")
            if "backbone" in sections.get("model", {}) and kind not in NAMED:  # as given to fit or --init: a path
                sections["model"] = {**sections["model"], "backbone": public["backbone"]}
            clean.write_config(RunSettings(origin, sections))
        if (run / RunFile.CLASSES).is_file():
            clean.write_classes(replace(run.read_classes(), skipped=(), updates=()))
        if public != described:  # of a run that an earlier version wrote
            save_arrays(clean / RunFile.WEIGHTS, load_arrays(weights)[0], public)
        elif (run / RunFile.MANIFEST).is_file():
            files[RunFile.MANIFEST] = str(run / RunFile.MANIFEST)
        files |= {path.name: path.read_bytes() for path in clean.path.iterdir()}
    files |= {f"{RunFile.NETWORK}/{path.name}": str(path) for path in sorted((run / RunFile.NETWORK).glob("*"))}
    if gallery:
        files |= {f"{RunFile.GALLERY}/{name}": each for name, each in _outgoing_gallery(run / RunFile.GALLERY).items()}
    files[CARD] = write_card(run.path, str(replace(place, revision=None))).encode()
    return files


def _outgoing_gallery(folder: Path) -> dict[str, bytes | str]:
    """Thumbnails and their descriptions, without the folders of images and without sets that were given as paths."""
    files: dict[str, bytes | str] = {path.name: str(path) for path in sorted(folder.glob("*"))}
    for name in [each for each in files if each.endswith(".json")]:
        said = load_json(folder / name)
        source = said.get("source", "")
        if set_name(source) != source:
            del files[name]
            files.pop(said.get("sheet", ""), None)
        else:
            files[name] = json.dumps(_without_folders(said), indent=1).encode()
    return files


def _without_folders(value: Any) -> Any:
    """JSON in which files have the last part of their names alone.

    >>> _without_folders({"class": "a/b", "files": ["/home/me/1.png"], "low": [{"file": "/home/me/2.png"}]})
    {'class': 'a/b', 'files': ['1.png'], 'low': [{'file': '2.png'}]}
    """
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    if not isinstance(value, dict):
        return value
    named = {"file": lambda name: PurePath(name).name, "files": lambda names: [PurePath(name).name for name in names]}
    return {key: named.get(key, _without_folders)(each) for key, each in value.items()}


# --- and back ---------------------------------------------------------------------------------------------------------


def fetch_run(text: str, trust: bool = False) -> Path:
    """The folder of a run from the hub, in the cache of huggingface_hub; files that are there already are not fetched.

    Without a revision, the newest commit of the main branch. With ``HF_HUB_OFFLINE=1``, what is in the cache.
    """
    place = HubPlace.parse(text)
    with _talking(place) as hub:
        api = hub.HfApi(library_name="maple", library_version=__version__)
        try:
            info = api.model_info(place.repository, revision=place.revision, files_metadata=True)
        except hub.errors.OfflineModeIsEnabled:
            cached = hub.snapshot_download(place.repository, revision=place.revision, local_files_only=True)
            check_finished(Path(cached))
            return Path(cached)
        names = _incoming(place, info.siblings or (), trust)
        paths = {name: api.hf_hub_download(place.repository, name, revision=info.sha) for name in names}
        api.hf_hub_download(
            place.repository, RunFile.DETECTOR, revision=place.revision
        )  # notes its commit, for offline
    for name, path in paths.items():
        _check_size(place, name, Path(path).stat().st_size)
    return Path(paths[RunFile.DETECTOR]).parent


def _incoming(place: HubPlace, siblings: Any, trust: bool) -> list[str]:
    """The names of the files to fetch, after their number and sizes were checked."""
    sizes = {each.rfilename: each.size for each in siblings if _limit(each.rfilename, trust)}
    for name in NEEDED:
        if name not in sizes:
            raise RunError(f"'{place}' is not a run of maple, it has no {name}: push one with maple push RUN {place}")
    if len(sizes) > MAX_FILES:
        raise RunError(f"'{place}' has {len(sizes)} files, more than {MAX_FILES}: it is not a run of maple")
    for name, size in sizes.items():
        _check_size(place, name, size)
    return list(sizes)


def _check_size(place: HubPlace, name: str, size: int | None) -> None:
    limit = _limit(name, True)
    if size is None or size > limit:
        raise RunError(f"'{name}' of '{place}' is larger than {limit / 1e6:,.0f} MB, or of unknown size: not fetched")


def _limit(name: str, trust: bool) -> int:
    """The bytes that a file of this name may have; 0 if it is not fetched."""
    folder, _, inner = name.rpartition("/")
    if folder in FOLDERS and (trust or folder != RunFile.NETWORK):
        pattern, limit = FOLDERS[RunFile(folder)]
        return limit if pattern.fullmatch(inner) else 0
    return LIMITS.get(RunFile(name), 0) if name in tuple(RunFile) else 0


@contextmanager
def _talking(place: HubPlace) -> Iterator[Any]:
    """The module huggingface_hub; its errors become a :class:`RunError` of one sentence."""
    with naming_extras():
        import huggingface_hub as hub
        import huggingface_hub.errors
    try:
        yield hub
    except hub.errors.RepositoryNotFoundError:
        remedy = "check its name, or log in with hf auth login, or set HF_TOKEN"
        raise RunError(f"there is no '{place}' on the hub, or no permission for it: {remedy}") from None
    except hub.errors.RevisionNotFoundError:
        raise RunError(
            f"'{place.repository}' has no revision '{place.revision}': check its branches and tags"
        ) from None
    except hub.errors.HfHubHTTPError as error:
        refused = getattr(error.response, "status_code", 0) in (401, 403)
        remedy = "log in with hf auth login, or set HF_TOKEN" if refused else "try again later"
        raise RunError(f"the hub refused '{place}' ({_first_line(error)}): {remedy}") from None
    except hub.errors.LocalEntryNotFoundError:
        raise RunError(f"'{place}' is not in the cache, and the hub was not asked: connect first") from None
    except (OSError, *hub.errors.HfHubHTTPError.__bases__) as error:  # those of its HTTP library need not be OSErrors
        remedy = "check the connection, or set HF_HUB_OFFLINE=1 to load what is in the cache"
        raise RunError(f"cannot reach the hub for '{place}' ({_first_line(error)}): {remedy}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
