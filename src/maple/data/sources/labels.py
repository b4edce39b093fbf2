"""Lists of image files with their labels: CSV with the columns ``file`` and ``label``, and JSON of Label Studio.

``maple predict --label-flagged`` writes such lists; a person fills in the labels, in a spreadsheet or in Label Studio,
and ``maple update --data`` or ``maple train`` reads them.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy as np

from maple.data.decode import read_file
from maple.data.sources.folders import Files
from maple.errors import DataError
from maple.files import expand_home
from maple.types import MAX_CELL, Skipped

LIST_SUFFIXES = (".csv", ".json")
LABEL_CONTROL = "class"  # name of the choices in the labelling interface of Label Studio
LOCAL_FILES = "/data/local-files/"  # where Label Studio serves files of its machine; the query d is the path
NO_LABEL = "has no label in the list"


class _Row(NamedTuple):
    file: str
    label: str  # empty: none yet


def list_labelled(path: Path, name: str, labelled: bool = True) -> Files:
    """The image files of a list, with their labels; rows without a label are skipped, unless ``labelled`` is false.

    A path is relative to the folder of the list, if there is such a file, else to the current folder. Classes are in
    the order of their names.
    """
    rows = list(_read_csv(path) if path.suffix.lower() == ".csv" else _read_tasks(path))
    if not rows:
        raise DataError(f"'{path}' lists no images: add a row with file and label for each")
    files = _place_files(rows, path)
    if not labelled:
        return Files.of(files, name)
    if not any(files.values()):
        raise DataError(f"no image in '{path}' has a label: fill in the column 'label', or label them in Label Studio")
    kept = {file: label for file, label in files.items() if label}
    class_names = tuple(sorted(set(kept.values())))
    ids = {name: class_id for class_id, name in enumerate(class_names)}
    labels = np.array([ids[label] for label in kept.values()], dtype=np.int64)
    skipped = (Skipped(file, NO_LABEL) for file, label in files.items() if not label)
    return Files.of(kept, name, (labels, class_names), skipped)


def _find(file: str, folder: Path) -> str:
    """The path of a file as the current folder sees it."""
    own = expand_home(file)
    beside = str(folder / own)
    return beside if os.path.exists(beside) else str(own)  # noqa: PTH110 (False for names that are too long)


def _place_files(rows: list[_Row], path: Path) -> dict[str, str]:
    """The label of each file, empty if it has none in any row."""
    files: dict[str, str] = {}
    for row in rows:
        try:
            file = _find(row.file, path.parent)
            os.fsencode(file)
        except ValueError as error:  # a null character, or half of another
            raise DataError(f"'{path}' names a file that cannot exist ({error}): correct its name") from None
        known = files.get(file, "")
        if known and row.label and known != row.label:
            raise DataError(f"'{path}' gives '{row.file}' the labels '{known}' and '{row.label}': keep one of them")
        files[file] = known or row.label
    return files


def _read_text(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8-sig")
    except DataError as error:
        raise DataError(f"'{path}' {error}") from None
    except UnicodeDecodeError:
        raise DataError(f"'{path}' is not UTF-8 text: save it as 'CSV UTF-8'") from None


def _read_csv(path: Path) -> Iterator[_Row]:
    """Rows of a CSV file, separated by commas, or by semicolons or tabs, as spreadsheets in some languages save it."""
    text = _read_text(path)
    header = text.partition("\n")[0]
    separator = max(",;\t", key=header.count)
    csv.field_size_limit(MAX_CELL)
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    for column in ("file", "label"):
        if column not in (table.fieldnames or ()):
            found = ", ".join(table.fieldnames or ()) or "nothing"
            raise DataError(f"'{path}' has no column '{column}': found {found}; name the columns in the first row")
    try:
        for row in table:
            if file := (row["file"] or "").strip():
                yield _Row(file, (row["label"] or "").strip())
    except csv.Error as error:
        raise DataError(f"'{path}' is not valid CSV ({error}): save it again") from None


def _read_tasks(path: Path) -> Iterator[_Row]:
    """Tasks of Label Studio, exported as JSON or as JSON-MIN."""
    try:
        tasks = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is not valid JSON ({error}): export it again") from None
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise DataError(f"'{path}' is not a list of tasks: export JSON or JSON-MIN from Label Studio")
    for number, task in enumerate(tasks, start=1):
        file = _file_of(task)
        if not file:
            raise DataError(f"task {number} of '{path}' names no file: export JSON or JSON-MIN from Label Studio")
        yield _Row(file, _label_of(task))


def _file_of(task: Mapping[str, Any]) -> str:
    """The image file of a task: ``file`` of its data, else the path in the address of its image."""
    data = task["data"] if isinstance(task.get("data"), dict) else task
    if isinstance(file := data.get("file"), str):
        return file
    address = urlsplit(image) if isinstance(image := data.get("image"), str) else urlsplit("")
    if address.path == LOCAL_FILES:
        return "/" + parse_qs(address.query).get("d", [""])[0]
    return address.path


def _label_of(task: Mapping[str, Any]) -> str:
    """The choice of the last annotation that was not cancelled; empty if there is none."""
    if "annotations" not in task:  # JSON-MIN
        return _choice(task.get(LABEL_CONTROL))
    label = ""
    for annotation in _list(task["annotations"]):
        if isinstance(annotation, dict) and not annotation.get("was_cancelled"):
            for result in _list(annotation.get("result")):
                if isinstance(result, dict) and result.get("from_name", LABEL_CONTROL) == LABEL_CONTROL:
                    label = _choice(result.get("value")) or label
    return label


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _choice(value: Any) -> str:
    """The single choice in ``"cat"`` or ``{"choices": ["cat"]}``; empty if there is none, or several."""
    listed = value.get("choices") if isinstance(value, dict) else [value]
    single = listed[0] if isinstance(listed, list) and len(listed) == 1 else None
    return single.strip() if isinstance(single, str) else ""
