"""Files: atomic writes, locks, the names of the files of a run, tensors and JSON with a format version, CSV.

A file is written beside its target, flushed to disk and renamed over it, so a crash or a full disk leaves the previous
version in place. Nothing is pickled. ``maple.runs.folder.RunFolder`` reads, writes and locks a run folder as a whole.
"""

from maple.files.drafts import draft_folder, find_replaced, is_full, remove_stale, write_atomic
from maple.files.locks import Holder, check_unlocked, lock_folder, take_lock
from maple.files.paths import (
    check_links,
    check_weights_file,
    expand_home,
    inert,
    nearest_path,
    skipped_path,
    suggest_path,
)
from maple.files.run_files import ANEW, RunFile, check_finished, check_replaced, no_file, no_run
from maple.files.stores import (
    check_format,
    load_arrays,
    load_json,
    load_record,
    naming_damage,
    read_metadata,
    save_arrays,
    save_json,
    without_paths,
)
from maple.files.tables import Row, to_csv
