"""Load a service with twice its saturating rate: refusals, latency of accepted requests, and memory.

    python benchmarks/serve_load.py [--model RUN_OR_ONNX] [--seconds 60] [--probe-seconds 10] [--images 4]
        [--deadline-ms 2000] [--storm] [--json results/serve_load.json]
    python benchmarks/serve_load.py --storm --seconds 600 --deadline-ms 10000 --json results/serve_storm.json

Service and clients are two processes on the same machine, connected by loopback. First the saturating rate is measured,
with clients in a closed loop. Then requests arrive at twice that rate for a minute, in an open loop. Targets:

- only 200 and 503, and an answer to every request;
- no accepted request lost or expired: the service computed exactly the images it answered with 200;
- p99 of the accepted requests below the deadline;
- constant memory: the last quarter of the minute needs at most 5 % more than the second.

With ``--storm``, one request in ten has an image that no decoder accepts, among them one every 20 seconds that would
take minutes to decode; one of the two decoders is killed every second, and the model is loaded again eight times
(``SIGHUP``). Such requests must get a status from 400 to 499, or 503, and all others 200 or 503.

Without ``--model``, the network is a ResNet-9 with random weights on simulated diatoms of 32 x 32 pixels, as fast as a
trained one. The machine should be idle.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import platform
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLIENTS = 16  # who look for the saturating rate
HOSTILE = 10  # one request in so many, in a storm
ENDLESS_SECONDS = 20  # between two images that take minutes to decode
RELOADS = 8
SERVE = """
import sys
from pathlib import Path
from maple.deploy.serve.server import serve_model
from maple.deploy.serve.options import ServeOptions
serve_model(Path(sys.argv[1]), ServeOptions(port=0, deadline_ms=float(sys.argv[2])))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="run folder or .onnx file")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--probe-seconds", type=float, default=10)
    parser.add_argument("--images", type=int, default=4, help="per request")
    parser.add_argument("--deadline-ms", type=float, default=2000)
    parser.add_argument("--storm", action="store_true", help="hostile images, killed decoders, and a model reloaded")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make_run(Path(folder))
        command = [sys.executable, "-c", SERVE, str(model), str(arguments.deadline_ms)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"page: http://127\.0\.0\.1:(\d+)/", line)
            if found is None:
                sys.exit(f"the service did not start: {line}{process.stderr.read()}")
            said: list[str] = []
            threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True).start()
            results = asyncio.run(measure(int(found[1]), process.pid, arguments))
            process.send_signal(signal.SIGTERM)
            results["exit_code"] = process.wait(30)
            if arguments.storm:
                results["reloads"] = sum("loaded again" in line and "not" not in line for line in said)
                results["other_messages"] = [line.strip() for line in said if "loaded again" not in line][:5]
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    results["targets"] = judge(results)
    print(json.dumps(results, indent=1))
    if arguments.json:
        about = {"python": platform.python_version(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
        arguments.json.write_text(json.dumps({**about, **results}, indent=2) + "\n")
    sys.exit(0 if all(results["targets"].values()) else 1)


def make_run(folder: Path) -> Path:
    """A run of a small network that never learned."""
    import torch

    from maple.data.splits import load_splits
    from maple.networks import create_backbone
    from maple.prediction.fit import fit_predictor

    splits = load_splits("simulated-diatoms?n=600&size=32")
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", len(splits.class_names)).eval()
    fit_predictor(backbone, splits.train, splits.validation, splits.calibration).save(folder)
    return folder


# --- clients ---------------------------------------------------------------------------------------------------------


def make_requests(n: int, n_images: int) -> list[bytes]:
    """Forms with images of noise, as they go over the wire."""
    rng = np.random.default_rng(0)
    return [
        as_request([encode(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(n_images)])
        for _ in range(n)
    ]


def make_hostile() -> list[bytes]:
    """Forms with a good image and one that cannot be used: cut off, garbage, empty, or of too many pixels."""
    good = encode(np.zeros((32, 32, 3), dtype=np.uint8))
    huge = bytearray(good)
    huge[16:24] = struct.pack(">II", 60_000, 60_000)  # in its header
    huge[29:33] = struct.pack(">I", zlib.crc32(huge[12:29]))
    bad = [good[:-30], os.urandom(2000), b"", bytes(huge), good[:8] + os.urandom(500), b"GIF89a" + bytes(50)]
    return [as_request([good, each]) for each in bad]


def make_endless() -> bytes:
    """A form with a JPEG file of less than 1 MB whose last scan is repeated so often that decoding takes minutes."""
    file = BytesIO()
    Image.new("L", (4900, 4900), 128).save(file, "JPEG", progressive=True)
    image = file.getvalue()
    end = len(image) - 2
    return as_request([image[:end] + 20_000 * image[image.rindex(b"\xff\xda") : end] + image[end:]])


def encode(pixels: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def as_request(images: list[bytes]) -> bytes:
    body = b""
    for i, image in enumerate(images):
        part = f'--limit\r\nContent-Disposition: form-data; name="files"; filename="{i}.png"\r\n\r\n'
        body += part.encode() + image + b"\r\n"
    body += b"--limit--\r\n"
    head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=limit\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Connections:
    """Connections that wait to be used again; as many as are needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: collections.deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = collections.deque()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer; on a connection that the service closed meanwhile, once more on a new one."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._ask_on(connection, request)
            except (ConnectionError, asyncio.IncompleteReadError):
                connection[1].close()
        return await self._ask_on(await asyncio.open_connection("127.0.0.1", self._port), request)

    async def _ask_on(
        self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes
    ) -> tuple[int, bytes]:
        reader, writer = connection
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(length[1]) if length else 0)
        self._idle.append(connection)
        return int(head.split(maxsplit=2)[1]), body

    async def metrics(self) -> dict[str, float]:
        _, body = await self.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*) (\S+)$", body.decode(), re.MULTILINE)}


@dataclass
class Tally:
    """What became of the requests."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    accepted_seconds: list[float] = field(default_factory=list)
    refused_seconds: list[float] = field(default_factory=list)

    async def ask(self, connections: Connections, request: bytes) -> None:
        start = time.perf_counter()
        try:
            status, _ = await connections.ask(request)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.statuses[f"lost: {type(error).__name__}"] += 1
            return
        self.statuses[str(status)] += 1
        seconds = self.accepted_seconds if status == 200 else self.refused_seconds
        seconds.append(time.perf_counter() - start)


async def find_rate(connections: Connections, requests: list[bytes], seconds: float) -> float:
    """Accepted requests per second, of clients who ask again as soon as they are answered."""
    tally, end = Tally(), time.perf_counter() + seconds

    async def keep_asking(own: itertools.cycle[bytes]) -> None:
        while time.perf_counter() < end:
            await tally.ask(connections, next(own))

    start = time.perf_counter()
    await asyncio.gather(*(keep_asking(itertools.cycle(requests[i:] + requests[:i])) for i in range(CLIENTS)))
    if not tally.statuses["200"] or set(tally.statuses) - {"200", "503"}:
        sys.exit(f"no rate could be found: {dict(tally.statuses)}")
    return tally.statuses["200"] / (time.perf_counter() - start)


async def overload(
    connections: Connections, requests: list[bytes], rate: float, seconds: float, storm: bool = False
) -> tuple[Tally, Tally]:
    """Requests at a constant rate, whatever becomes of them; good and hostile ones."""
    good, bad, running = Tally(), Tally(), set()
    hostile, endless = itertools.cycle(make_hostile()), make_endless() if storm else b""
    start = time.perf_counter()
    next_endless = 1.0
    for i in range(round(rate * seconds)):
        if (early := start + i / rate - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        tally, request = good, requests[i % len(requests)]
        if storm and i / rate >= next_endless:
            tally, request, next_endless = bad, endless, next_endless + ENDLESS_SECONDS
        elif storm and i % HOSTILE == 0:
            tally, request = bad, next(hostile)
        task = asyncio.create_task(tally.ask(connections, request))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    return good, bad


async def kill_decoders(process_id: int, killed: list[int]) -> None:
    """Kill one decoder of the service every second."""
    while True:
        await asyncio.sleep(1)
        decoders = [child for child in _children(process_id) if child not in killed]
        if decoders:
            os.kill(decoders[0], signal.SIGKILL)
            killed.append(decoders[0])


def _children(process_id: int) -> list[int]:
    """The decoders of the service, which threads of it have started."""
    found = []
    for task in Path(f"/proc/{process_id}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread is gone
            for child in (task / "children").read_text().split():
                if b"_decoder" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


async def reload_often(process_id: int, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        os.kill(process_id, signal.SIGHUP)


async def watch_memory(process_id: int, samples: list[int]) -> None:
    """Resident bytes of a process, twice a second."""
    while True:
        pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
        samples.append(pages * resource.getpagesize())
        await asyncio.sleep(0.5)


# --- results ---------------------------------------------------------------------------------------------------------


async def measure(port: int, process_id: int, arguments: argparse.Namespace) -> dict[str, Any]:
    connections, requests = Connections(port), make_requests(64, arguments.images)
    rate = await find_rate(connections, requests, arguments.probe_seconds)
    before, samples = await connections.metrics(), list[int]()
    beside, killed = [asyncio.create_task(watch_memory(process_id, samples))], list[int]()
    if arguments.storm:
        beside.append(asyncio.create_task(kill_decoders(process_id, killed)))
        beside.append(asyncio.create_task(reload_often(process_id, arguments.seconds / (RELOADS + 1))))
    start = time.perf_counter()
    tally, bad = await overload(connections, requests, 2 * rate, arguments.seconds, arguments.storm)
    took = time.perf_counter() - start
    for task in beside:
        task.cancel()
    after = await connections.metrics()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    quarters = [float(np.median(part)) for part in np.array_split(np.array(samples), 4) if len(part)]
    n_asked, n_accepted = sum(tally.statuses.values()), tally.statuses["200"]
    return {
        "model": "ResNet-9, 32 x 32 pixels, torch" if arguments.model is None else arguments.model.name,
        "images_per_request": arguments.images,
        "deadline_seconds": arguments.deadline_ms / 1000,
        "saturating_requests_per_second": round(rate, 1),
        "asked_requests_per_second": round((n_asked + sum(bad.statuses.values())) / took, 1),
        "accepted_requests_per_second": round(n_accepted / took, 1),
        "seconds": round(took, 1),
        "statuses": dict(tally.statuses),
        **({"hostile_statuses": dict(bad.statuses), "killed_decoders": len(killed)} if arguments.storm else {}),
        "images_predicted": int(grown["maple_images_total"]),
        "images_answered": n_accepted * arguments.images,
        "mean_batch": round(grown["maple_batch_images_sum"] / max(grown["maple_batch_images_count"], 1), 1),
        "refused": {
            found[1]: int(value)
            for name, value in grown.items()
            if (found := re.fullmatch(r'maple_refused_total{reason="(\w+)"}', name))
        },
        "accepted_seconds": quantiles(tally.accepted_seconds),
        "refused_seconds": quantiles(tally.refused_seconds),
        "memory_mib_by_quarter": [round(value / 2**20, 1) for value in quarters],
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.quantile(seconds, [0.5, 0.95, 0.99, 1.0])
    return {name: round(float(value), 4) for name, value in zip(("p50", "p95", "p99", "max"), values)}


def judge(results: dict[str, Any]) -> dict[str, bool]:
    """Which targets were met."""
    memory = results["memory_mib_by_quarter"]
    judged = {
        "no answer but 200 and 503": set(results["statuses"]) <= {"200", "503"},
        "some were refused": results["statuses"].get("503", 0) > 0,
        "no accepted request lost": results["images_predicted"] == results["images_answered"],
        "p99 below the deadline": results["accepted_seconds"].get("p99", 1e9) < results["deadline_seconds"],
        "memory flat": memory[-1] <= 1.05 * memory[min(1, len(memory) - 1)],
        "ended cleanly": results["exit_code"] == 0,
    }
    if "hostile_statuses" not in results:
        return judged | {"none expired": results["refused"].get("expired", 0) == 0}
    return judged | {
        "hostile requests are refused": all(
            status[0] == "4" or status == "503" for status in results["hostile_statuses"]
        ),
        "decoders were killed": results["killed_decoders"] > 0,
        "the model was loaded again": results["reloads"] > 0,
        "no other message": not results["other_messages"],
    }


if __name__ == "__main__":
    main()
