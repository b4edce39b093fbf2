"""Flagged images for a person: their files in a folder, and a list to label them, for a spreadsheet or Label Studio.

Corrected labels come back with ``maple update RUN --data LIST``, or the folder itself, once its images have been sorted
into one subfolder per class.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

import numpy as np
from PIL import Image

from maple.data._decoder import Item
from maple.data.headers import image_suffix
from maple.data.sources.folders import Files
from maple.data.sources.labels import LABEL_CONTROL, LIST_SUFFIXES, LOCAL_FILES
from maple.data.stream import Source
from maple.errors import RunError, UsageError
from maple.files import draft_folder, is_full, skipped_path, to_csv, write_atomic
from maple.reporting.predictions import PredictionRow, iterate_predictions
from maple.runs.requests import PredictRequest
from maple.text import plural

_COLUMNS = ("file", "label", "class", "probability", "p_value")


def check_flagged(request: PredictRequest) -> None:
    """Refuse targets that cannot be written or would replace something, before images are read."""
    folder, listed = request.copy_flagged, request.label_flagged
    if request.link and folder is None:
        raise UsageError("--link makes links in the folder of --copy-flagged: give both")
    if folder is None and listed is None:
        return
    if request.path is None:
        flag = "--label-flagged" if folder is None else "--copy-flagged"
        raise UsageError(f"{flag} needs a file of predictions: give one with --out, such as --out predictions.csv")
    if folder is not None:
        _check_folder(folder, request.sources, request.path)
    if listed is not None:
        _check_list(listed, request.path)


def check_files(request: PredictRequest, source: Source) -> None:
    """Refuse to list images that are rows of a table or an array, and are not made files either."""
    if request.label_flagged is not None and request.copy_flagged is None and not isinstance(source, Files):
        raise UsageError(f"--label-flagged: images of '{source.name}' are not files: add --copy-flagged FOLDER")


def _check_list(listed: Path, predictions: Path) -> None:
    if listed.suffix.lower() not in LIST_SUFFIXES:
        raise UsageError(f"--label-flagged '{listed}': end the name in .csv, or in .json for Label Studio")
    if listed.resolve() in (predictions.resolve(), skipped_path(predictions).resolve()):
        raise UsageError(f"--label-flagged '{listed}' would replace a file of --out: choose another name")
    for path in (listed, _interface(listed)) if listed.suffix.lower() == ".json" else (listed,):
        if path.exists():
            raise UsageError(f"--label-flagged: '{path}' exists already, perhaps with labels: choose another name")


def _check_folder(folder: Path, sources: Sequence[str], predictions: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--copy-flagged '{folder}' exists already: choose a new or an empty folder")
    for name in sources:
        if Path(name).is_dir() and folder.resolve().is_relative_to(Path(name).resolve()):
            raise UsageError(f"--copy-flagged '{folder}' is inside the images, '{name}': choose another folder")
    if predictions.resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"--out '{predictions}' is inside the folder of --copy-flagged: choose another folder")


def place_flagged(request: PredictRequest, source: Source, class_names: Sequence[str]) -> Iterator[str]:
    """Copy or link the flagged images of a finished request and list them; one line about each target."""
    folder, listed = request.copy_flagged, request.label_flagged
    if request.path is None or (folder is None and listed is None):
        return
    flagged = {row.file: row for row in iterate_predictions(request.path) if row.is_ood}
    items = ((file, item) for file, item in source.items(0) if file in flagged)
    places = {file: Path(item).resolve() for file, item in items if isinstance(item, str)} if folder is None else {}
    if folder is not None:
        places = _fill_folder(folder, items, request.link)
        yield f"flagged images: {folder}"
    if listed is not None:
        rows = [_Flagged(places[file], row) for file, row in flagged.items()]
        yield from _write_list(listed, rows, class_names)


# --- the folder -------------------------------------------------------------------------------------------------------


def _fill_folder(folder: Path, items: Iterator[tuple[str, Item]], link: bool) -> dict[str, Path]:
    """Place each image under a name of its own; returns where each is, by its name in the predictions."""
    places: dict[str, Path] = {}
    taken: set[str] = set()
    with _naming("--copy-flagged", folder), draft_folder(folder, replace=False) as draft:
        draft.mkdir()
        for file, item in items:
            if file not in places:
                name = _free_name(file, item, taken)
                _place(item, draft / name, link)
                places[file] = folder.resolve() / name
    return places


def _free_name(file: str, item: Item, taken: set[str]) -> str:
    """The name of a file, or one made from the name of a row; with a number if it is taken."""
    name = Path(file).name if isinstance(item, str) else re.sub(r"[^\w.-]+", "-", file)
    suffix = ".png" if isinstance(item, np.ndarray) else image_suffix(item) if isinstance(item, bytes) else ""
    path = Path(name if name.lower().endswith(suffix) else name + suffix)
    tries = (path.name, *(f"{path.stem}-{i}{path.suffix}" for i in range(2, len(taken) + 3)))
    free = next(each for each in tries if each.lower() not in taken)  # some file systems know no capitals
    taken.add(free.lower())
    return free


def _place(item: Item, target: Path, link: bool) -> None:
    if isinstance(item, np.ndarray):
        Image.fromarray(item).save(target)
    elif isinstance(item, bytes):
        target.write_bytes(item)
    elif isinstance(item, str) and link:
        target.symlink_to(Path(item).resolve())
    elif isinstance(item, str):
        shutil.copyfile(item, target)


@contextmanager
def _naming(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "free some space, or choose another folder" if is_full(error) else "choose another folder"
        raise RunError(
            f"{flag}: cannot write '{path}': {error.strerror or error}; {remedy}; the predictions are complete"
        ) from None


# --- the list ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Flagged:
    """A flagged image: where it is, and what was predicted."""

    path: Path
    row: PredictionRow

    def to_row(self) -> dict[str, object]:
        row = self.row
        said = {"class": row.class_name, "probability": row.probability, "p_value": row.p_value}
        return {"file": str(self.path), "label": "", **said}

    def to_task(self) -> Mapping[str, object]:
        """A task of Label Studio, whose prediction is the class."""
        address = f"{LOCAL_FILES}?d={quote(self.path.as_posix().lstrip('/'))}"
        choice = {
            "from_name": LABEL_CONTROL,
            "to_name": "image",
            "type": "choices",
            "value": {"choices": [self.row.class_name]},
        }
        said = {"model_version": "maple", "score": self.row.probability, "result": [choice]}
        data = {"image": address, "file": str(self.path), "p_value": self.row.p_value}
        return {"data": data, "predictions": [said]}


def _write_list(path: Path, rows: Sequence[_Flagged], class_names: Sequence[str]) -> Iterator[str]:
    if path.suffix.lower() == ".csv":
        write_atomic(path, to_csv((each.to_row() for each in rows), _COLUMNS, header=True))
        yield f"to label: {path}, {plural(len(rows), 'image')}: fill in the column 'label'"
        return
    write_atomic(path, json.dumps([each.to_task() for each in rows], indent=1, ensure_ascii=False) + "\n")
    interface = _interface(path)
    write_atomic(interface, labelling_interface(class_names))
    yield f"to label: {path}, {plural(len(rows), 'task')} for Label Studio, with the labelling interface {interface}"


def _interface(tasks: Path) -> Path:
    """The file of the labelling interface beside the tasks."""
    return tasks.with_suffix(".xml")


def labelling_interface(class_names: Sequence[str]) -> str:
    """The labelling interface of a Label Studio project: one image, one choice among the classes.

    >>> print(labelling_interface(["cat", "a&b"]))
    <View>
      <Image name="image" value="$image"/>
      <Choices name="class" toName="image" choice="single">
        <Choice value="cat"/>
        <Choice value="a&amp;b"/>
      </Choices>
    </View>
    <BLANKLINE>
    """
    choices = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in class_names)
    opening = f'  <Choices name="{LABEL_CONTROL}" toName="image" choice="single">\n'
    return f'<View>\n  <Image name="image" value="$image"/>\n{opening}{choices}  </Choices>\n</View>\n'
