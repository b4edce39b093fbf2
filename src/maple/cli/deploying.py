"""Commands that bring a run into use: export, serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from maple.cli._flags import SECTIONS, AsJson, OodSources, RunDataRoot, Trust, named_sources, with_options
from maple.decisions.options import DecisionOptions
from maple.deploy.serve.options import ServeOptions
from maple.options import build_options, list_options


@with_options()
def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    out: Annotated[Path, typer.Argument(help="file to write or replace: .onnx, or .pt2 for torch.export")],
    preprocess: Annotated[
        bool, typer.Option("--preprocess", help="take uint8 images (N, S, S, 3) instead of float32 (N, 3, S, S)")
    ] = False,
    exemplars: Annotated[
        bool, typer.Option("--exemplars/--no-exemplars", help="include four training images of each cluster")
    ] = True,
    quantise: Annotated[
        bool, typer.Option("--quantise", help="weights in 8 bits; reports the change of accuracy, ECE and AUROC")
    ] = False,
    ood: OodSources = None,
    data_root: RunDataRoot = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write network, Gaussians and decision as one graph, and check its parity with the run on images."""
    from maple.deploy.export import export_run

    report = export_run(
        run,
        out,
        preprocess=preprocess,
        exemplars=exemplars,
        quantise=quantise,
        ood=named_sources(ood),
        data_root=data_root,
        trust=trust,
    )
    print(json.dumps(report.to_dict()) if as_json else report.describe())


@with_options("serve", "decision", rare=True, default="the model's")
def serve(
    model: Annotated[Path, typer.Argument(help="run folder, or the .onnx file that maple export wrote")],
    flags: dict[str, Any],
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MAPLE_API_KEY",
            help="key that requests must send in the header X-API-Key; prefer the environment variable",
            rich_help_panel=SECTIONS["serve"].title,
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Answer requests over HTTP, with a page for the browser, until Ctrl-C or SIGTERM.

    Accepted requests are answered before it stops. Without --host it listens on this machine only.
    """
    from maple.deploy.serve.server import serve_model

    decision = {name: flags.pop(name) for name in list_options(DecisionOptions) if name in flags}
    options = build_options(ServeOptions, {**flags, "api_key": api_key}, where=None)
    serve_model(model, options, decision, trust=trust)
