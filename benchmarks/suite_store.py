"""Keep the figures of the networks of ``maple benchmark`` without the networks, and put them back elsewhere.

    python benchmarks/suite_store.py keep --shared ../shared --runs runs/benchmark --store results/suites/trainings
    python benchmarks/suite_store.py restore --runs runs/benchmark --store results/suites/trainings

All suites of a profile take many hours, and many networks serve several suites. ``keep`` evaluates each finished
network for every suite that reads it and writes one small JSON file per network, without ROC curves; after
``restore``, on any machine, ``maple benchmark`` takes these networks as finished and trains the others. A network whose
figures do not suffice, since a suite has changed, is trained again. Figures that draw embeddings (``latent``,
``clusters``) need the networks themselves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maple.errors import UsageError
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.suites import SUITES, Suite
from maple.evaluation.results import Results
from maple.files import RunFile, save_json, write_atomic
from maple.runs.benchmark.jobs import Job, list_jobs
from maple.runs.benchmark.suites import evaluate_job
from maple.runs.benchmark.trainings import EVALUATIONS, training_facts
from maple.runs.folder import RunFolder

CURVES = ("roc_ind", "roc_ood", "kept", "accuracy_kept")  # drawn by reports of runs, not by suites


def thin(value: Any) -> Any:
    """The content of a results file with empty curves.

    >>> thin({"auroc": 0.5, "roc_ind": [0.0, 1.0]})
    {'auroc': 0.5, 'roc_ind': []}
    """
    if isinstance(value, dict):
        return {name: [] if name in CURVES else thin(item) for name, item in value.items()}
    return [thin(item) for item in value] if isinstance(value, list) else value


def find_finished(names: list[str], profile: str, runs: Path, data_root: Path) -> Iterator[tuple[Suite, Job]]:
    """Each suite and each of its finished networks; suites whose images are not here are left out."""
    for suite in (SUITES[name] for name in names):
        for job in list_jobs([suite], PROFILES[profile], PROFILES[profile].seeds, runs, data_root):
            try:
                finished = RunFolder(job.folder).is_finished() and job.is_finished
            except UsageError:
                break
            if finished:
                yield suite, job


def keep(names: list[str], profile: str, runs: Path, data_root: Path, store: Path) -> None:
    """Write the figures of each finished network that these suites read."""
    store.mkdir(parents=True, exist_ok=True)
    found: dict[str, Job] = {}
    for suite, job in find_finished(names, profile, runs, data_root):
        evaluate_job(suite, job)
        found[job.key] = job
    for key, job in found.items():
        evaluations = {
            path.stem: thin(json.loads(path.read_text(encoding="utf-8")))
            for path in sorted((job.folder / EVALUATIONS).glob("*.json"))
            if path.stem != "facts"
        }
        content = {"title": job.title, "facts": training_facts(job), "evaluations": evaluations}
        (store / f"{key}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"{key}: {job.title}, {len(evaluations)} evaluations")


def restore(runs: Path, store: Path) -> None:
    """Make folders of finished networks, without their weights, of those that are not there."""
    for path in sorted(store.glob("*.json")):
        content, folder = json.loads(path.read_text(encoding="utf-8")), runs / "trainings" / path.stem
        if (folder / RunFile.RESULTS).exists():
            continue
        (folder / EVALUATIONS).mkdir(parents=True, exist_ok=True)
        for key, evaluation in content["evaluations"].items():
            text = Results.from_json(json.dumps(evaluation)).to_json()
            write_atomic(folder / EVALUATIONS / f"{key}.json", text)
        save_json(folder / EVALUATIONS / "facts.json", content["facts"])
        write_atomic(folder / RunFile.RESULTS, text)  # by which a network counts as finished
        print(f"{path.stem}: {content['title']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["keep", "restore"])
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/")
    parser.add_argument("--suites", nargs="*", default=list(SUITES), choices=list(SUITES), help="all by default")
    parser.add_argument("--profile", default="cpu", choices=list(PROFILES))
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="--out of maple benchmark")
    parser.add_argument("--store", type=Path, default=Path("results/suites/trainings"))
    arguments = parser.parse_args()
    if arguments.mode == "keep":
        keep(arguments.suites, arguments.profile, arguments.runs, arguments.shared / "data", arguments.store)
    else:
        restore(arguments.runs, arguments.store)


if __name__ == "__main__":
    main()
