"""Commands that bring a run into use: export, serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from maple.cli import _flags as cli

if TYPE_CHECKING:
    from maple.options import Flag
    from maple.runs.requests import AsJson, ExportRequest, Trust


@cli.command()
def export(request: ExportRequest, as_json: AsJson = False) -> None:
    """Write network, Gaussians and decision as one graph, and check its parity with the run on images."""
    from maple.deploy.export import export_run

    report = export_run(request)
    print(json.dumps(report.to_dict()) if as_json else report.describe())


@cli.command("serve", "decision", rare=True, default="the model's")
def serve(
    model: Annotated[
        Path, Flag("run folder, or the .onnx file that maple export wrote", metavar="MODEL", positional=True)
    ],
    flags: cli.Flags,
    api_key: Annotated[
        str | None,
        Flag(
            "key that requests must send in the header X-API-Key; prefer the environment variable",
            panel=cli.SECTIONS["serve"].title,
            envvar="MAPLE_API_KEY",
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Answer requests over HTTP, with a page for the browser, until Ctrl-C or SIGTERM.

    Accepted requests are answered before it stops. Without --host it listens on this machine only.
    """
    from maple.decisions.options import DecisionOptions
    from maple.deploy.serve.options import ServeOptions
    from maple.deploy.serve.server import serve_model
    from maple.options import build_options, list_options

    decision = {name: flags.pop(name) for name in list_options(DecisionOptions) if name in flags}
    options = build_options(ServeOptions, {**flags, "api_key": api_key}, where=None)
    serve_model(model, options, decision, trust=trust)
