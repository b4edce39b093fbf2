"""The server: a run behind a port, until a signal; accepted requests are answered."""

from __future__ import annotations

import concurrent.futures
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from image_files import encode
from maple.deploy.serve.app import create_app
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.server import listen_at, read_exemplars
from maple.errors import RunError
from processes import Forked
from serving import as_form, as_json, check_against, http_bytes, png, server, talk

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    import torch

    from maple.data.splits import load_splits
    from maple.networks import create_backbone, embed
    from maple.prediction.fit import fit_predictor
    from maple.reporting.gallery import write_cluster_gallery

    splits = load_splits("digits")
    torch.manual_seed(0)
    predictor = fit_predictor(
        create_backbone("resnet9", 10).eval(), splits.train, splits.validation, splits.calibration
    )
    folder = tmp_path_factory.mktemp("run")
    predictor.save(folder)
    some = splits.train.subset(np.arange(200))
    write_cluster_gallery(folder / "gallery", some, embed(predictor.backbone, some))
    return folder


def test_a_run_is_served(run_folder):
    from maple.data.splits import load_splits
    from maple.runs.loading import ready_model

    predictor = ready_model(run_folder, {"false_alarm": 0.1})
    test = load_splits("digits").test
    pixels = np.stack([test.read(i) for i in range(24)])
    exemplars = read_exemplars(run_folder, predictor)
    assert sorted(exemplars) == list(range(10))
    with TestClient(create_app(predictor, ServeOptions(max_batch=16), exemplars)) as client:
        said = client.post("/v1/predict", json=as_json(*[encode(Image.fromarray(image)) for image in pixels])).json()
        check_against(predictor, pixels, said["predictions"], [f"{i}.png" for i in range(24)])
        described = client.get("/v1/model").json()
        assert described["runtime"] == "torch" and described["decision"]["false_alarm"] == 0.1
        assert [cluster["n_exemplars"] for cluster in described["clusters"]] == [len(exemplars[i]) for i in range(10)]
        assert client.get("/v1/clusters/3/exemplars.png").status_code == 200


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_everything_accepted_is_answered(sign):
    body, kind = as_form(png((200, 40, 40)))
    with server(1.0) as (process, port):  # seconds per batch of at most four images
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            waiting = [pool.submit(talk, port, http_bytes("/v1/predict", body, kind)) for _ in range(12)]
            deadline = time.monotonic() + 10
            while b"maple_queue_images 12.0" not in talk(port, http_bytes("/metrics", method="GET")):
                assert time.monotonic() < deadline
            slow = socket.create_connection(("127.0.0.1", port), 20)  # its body arrives after the signal
            request = http_bytes("/v1/predict", body, kind)
            slow.sendall(request[:-10])
            time.sleep(0.3)  # until it has begun to read
            process.send_signal(sign)
            time.sleep(0.1)
            slow.sendall(request[-10:])
            refused = b""
            while chunk := slow.recv(2**16):
                refused += chunk
            slow.close()
            answers = [answer.result() for answer in waiting]
        assert process.wait(20) == 0
        errors = process.stderr.read()
    assert all(answer.startswith(b"HTTP/1.1 200") and b'"class":"red"' in answer for answer in answers)
    assert refused.startswith(b"HTTP/1.1 503") and b"shutting down" in refused
    assert errors == ""


def test_nothing_is_computed_for_clients_that_left():
    body, kind = as_form(*[png((200, 40, 40))] * 4)
    with server(1.0) as (_, port):
        first = threading.Thread(target=talk, args=(port, http_bytes("/v1/predict", body, kind)))
        first.start()
        time.sleep(0.1)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), 20) as leaving:
                leaving.sendall(http_bytes("/v1/predict", body, kind))
                time.sleep(0.05)
        assert talk(port, http_bytes("/v1/predict", body, kind)).startswith(b"HTTP/1.1 200")
        first.join()
        text = talk(port, http_bytes("/metrics", method="GET")).decode()
        computed = float(re.search(r"^maple_images_total (\S+)$", text, re.MULTILINE)[1])
        assert computed <= 12 and 'status="499"' in text  # of 28: the two who stayed, and who left in mid-batch


def test_a_port_that_is_taken_is_a_sentence():
    with listen_at("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=rf"{port}.*--port"):
            listen_at("127.0.0.1", port)
    with pytest.raises(RunError, match=r"no\.such\.host\.invalid"):
        listen_at("no.such.host.invalid", 0)


def test_the_whole_of_it_serves_a_run(run_folder):
    code = f"""
from pathlib import Path
from maple.deploy.serve.server import serve_model
from maple.deploy.serve.options import ServeOptions
serve_model(Path({str(run_folder)!r}), ServeOptions(port=0), {{"false_alarm": 0.2}})
"""
    process = Forked(code)
    try:
        port = int(re.search(r":(\d+)/", process.stderr.readline())[1])
        answer = talk(port, http_bytes("/v1/model", method="GET"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and process.stderr.read() == ""
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert json.loads(body)["decision"]["false_alarm"] == 0.2
    assert b"server:" not in head.lower()


def test_without_torch_the_service_loads():
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning_fabric", "matplotlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import maple.deploy.serve.server
print("loaded")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "loaded\n", done.stderr


def test_the_log_holds_no_key():
    with server(0.0, "s3cret-of-us") as (process, port):
        for key in ("s3cret-of-us", "s3cret-of-them", "\x1b[2J"):
            for path in ("/v1/model", "/v1/predict", "/static/../../etc/passwd"):
                body, kind = as_form(png((1, 2, 3)))
                talk(port, http_bytes(path, body, kind, method="POST", **{"X-API-Key": key}))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log = process.stderr.read()
    assert "/v1/predict" in log and "s3cret" not in log and "\x1b[2J" not in log
