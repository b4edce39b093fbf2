"""Commands that bring a run into use: export, serve."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from maple.cli import _flags as cli


@dataclass(frozen=True)
class ExportArguments:
    """The arguments of ``maple export``."""

    run: Path = cli.argument("run folder", "RUN")
    out: Path = cli.argument("file to write or replace: .onnx, or .pt2 for torch.export", "OUT")
    preprocess: bool = cli.flag(False, "take uint8 images (N, S, S, 3) instead of float32 (N, 3, S, S)")
    exemplars: bool = cli.flag(True, "include four training images of each cluster")
    quantise: bool = cli.flag(False, "store weights in 8 bits, and report the change of accuracy, ECE and AUROC")
    ood: cli.OodSources = None
    data_root: cli.RunDataRoot = None
    trust: cli.Trust = False
    as_json: cli.AsJson = False


@cli.command()
def export(given: ExportArguments) -> None:
    """Write network, Gaussians and decision as one graph, and check its parity with the run on images."""
    from maple.deploy.export import ExportRequest, export_run

    report = export_run(cli.to_request(given, ExportRequest, ood=cli.named_sources(given.ood)))
    print(json.dumps(report.to_dict()) if given.as_json else report.describe())


@dataclass(frozen=True)
class ServeArguments:
    """The arguments of ``maple serve``."""

    model: Path = cli.argument("run folder, or the .onnx file that maple export wrote", "MODEL")
    api_key: str | None = cli.flag(
        None,
        "key that requests must send in the header X-API-Key; prefer the environment variable",
        panel=cli.SECTIONS["serve"].title,
        envvar="MAPLE_API_KEY",
    )
    trust: cli.Trust = False


@cli.command("serve", "decision", rare=True, default="the model's")
def serve(given: ServeArguments, flags: cli.Flags) -> None:
    """Answer requests over HTTP, with a page for the browser, until Ctrl-C or SIGTERM.

    Accepted requests are answered before it stops. Without --host it listens on this machine only.
    """
    from maple.decisions.options import DecisionOptions
    from maple.deploy.serve.options import ServeOptions
    from maple.deploy.serve.server import serve_model
    from maple.options import build_options, list_options

    decision = {name: flags.pop(name) for name in list_options(DecisionOptions) if name in flags}
    options = build_options(ServeOptions, {**flags, "api_key": given.api_key}, where=None)
    serve_model(given.model, options, decision, trust=given.trust)
