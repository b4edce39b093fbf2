"""Request bodies: limits, forms, JSON, names, and decoding in processes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from starlette.testclient import TestClient

from image_files import encode, png_of_size
from maple.data.decode import Decoding
from maple.data.decoders import DecoderPool, decode_image
from maple.deploy.serve.app import create_app
from maple.deploy.serve.endpoints import DECODERS
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.uploads import PredictRequest, parse_json, read_uploads
from maple.deploy.serve.watch import UploadError
from serving import Colours, as_form, as_json, metrics, png, serve, server


def test_names_come_back_as_they_were_sent(client):
    names = [
        "../../etc/passwd",
        "C:\\x\\y.png",
        "a\x00b\x1b[31m.png",
        "<script>alert(1)</script>",
        "Zoë 猫 🐈.png",
        "",
        "x" * 1000,
    ]
    images = [{"name": name, "data": as_json(png((1, 2, 3)))["images"][0]["data"]} for name in names]
    answer = client.post("/v1/predict", json={"images": [*images, {"data": images[0]["data"]}]})
    shown = [name or f"image {i}" for i, name in enumerate(names, start=1)] + ["image 8"]
    assert [row["file"] for row in answer.json()["predictions"]] == shown


def test_limits_are_exact():
    image, large = png((1, 2, 3)), png((1, 2, 3), (10, 10))
    body, kind = as_form(image, image)
    with serve(max_images=2, max_bytes=len(body), max_pixels=99) as client:

        def post(body: bytes, kind: str) -> tuple[int, str]:
            said = client.post("/v1/predict", content=body, headers={"content-type": kind})
            return said.status_code, said.json().get("error", "")

        def refused(status: int, named: str, body: bytes, kind: str) -> None:
            said = post(body, kind)
            assert said[0] == status and named in said[1]

        assert post(body, kind)[0] == 200
        refused(413, f"{len(body):,}", body + b"\n", kind)
        refused(413, "'0.png'", *as_form(large))
        assert post(*as_form(png((1, 2, 3), (11, 9))))[0] == 200
        refused(422, "2 images", *as_form(b"", b"", b""))
        three = json.dumps({"images": [{"data": ""}] * 3}).encode()
        refused(422, "2 images", three, "application/json")
        refused(422, "image", b'{"images": []}', "application/json")
        refused(422, "image", *as_form())
        assert metrics(client)["maple_images_total"] == 3


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=limit"])
def test_a_body_of_unknown_length_is_counted_while_it_arrives(kind):
    sent = []

    async def chunks():
        yield as_form(b"")[0].split(b"\r\n\r\n")[0] + b"\r\n\r\n"
        while True:
            sent.append(b"x" * 100)
            yield sent[-1]

    with pytest.raises(UploadError) as refused:
        asyncio.run(read_uploads({"content-type": kind}, chunks(), ServeOptions(max_images=1, max_bytes=1000)))
    assert refused.value.status == 413 and len(sent) <= 10


def test_types_that_are_not_understood(client):
    body, kind = as_form(png((1, 2, 3)))
    for given in ("text/plain", "video/mp4", "multipart/mixed; boundary=limit"):
        said = client.post("/v1/predict", content=body, headers={"content-type": given})
        assert said.status_code == 415 and "multipart/form-data" in said.json()["error"]
    said = client.post("/v1/predict", content=body, headers={"content-type": kind, "content-encoding": "gzip"})
    assert said.status_code == 415


@pytest.mark.parametrize("kind", [None, "image/png", "application/octet-stream", "application/x-www-form-urlencoded"])
def test_a_body_can_be_one_image(client, kind):
    headers = {"content-type": kind} if kind else {}
    image = png((200, 40, 40))
    (said,) = client.post("/v1/predict", content=image, headers=headers).json()["predictions"]
    assert (said["file"], said["class"]) == ("image 1", "red")
    for broken in (b"a=b", b""):
        refused = client.post("/v1/predict", content=broken, headers=headers)
        assert refused.status_code == 422 and "image" in refused.json()["error"]
    with serve(max_bytes=len(image) - 1) as small:
        assert small.post("/v1/predict", content=image, headers=headers).status_code == 413


def test_the_field_of_a_form_is_files_or_file(client):
    images = [("0.png", png((200, 40, 40))), ("1.png", png((40, 200, 40)))]
    for names, status in ((("file", "file"), 200), (("files", "file"), 200), (("file", "other"), 422)):
        said = client.post("/v1/predict", files=list(zip(names, images, strict=True)))
        assert said.status_code == status
        if status == 200:
            assert [row["class"] for row in said.json()["predictions"]] == ["red", "green"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_sends_files_in_the_ways_that_come_to_mind(tmp_path):
    (tmp_path / "a.png").write_bytes(png((200, 40, 40)))
    with server(0.0) as (_, port):
        for option in ("-F file=@a.png", "-F files=@a.png", "--data-binary @a.png", "-T a.png -X POST"):
            url = f"http://127.0.0.1:{port}/v1/predict"
            said = subprocess.run(["curl", "-s", *option.split(), url], cwd=tmp_path, capture_output=True, check=True)
            (found,) = json.loads(said.stdout)["predictions"]
            assert found["class"] == "red", option


@pytest.mark.parametrize(
    ("image", "status"),
    [
        (b"", 422),
        (b"text", 422),
        (png((1, 2, 3))[:45], 422),
        (png_of_size(30_000, 30_000), 413),
        (png_of_size(9000, 9000), 413),
    ],
    ids=["nothing", "text", "truncated", "too long sides", "too many pixels"],
)
def test_what_is_not_an_image_is_named(client, image, status):
    said = client.post("/v1/predict", json=as_json(png((1, 2, 3)), image))
    assert said.status_code == status and said.json()["error"].count("'1.png'") == 1


@pytest.mark.parametrize("data", ["é", "a", "aGk=\n", " aGk=", "aGk-", "data:image/png;base64,aGk="])
def test_base64_is_strict(client, data):
    said = client.post("/v1/predict", json={"images": [{"data": data}]})
    assert said.status_code == 422 and "base64" in said.json()["error"]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_every_format_is_decoded_as_from_a_file(format):
    image = encode(Image.new("RGB", (30, 20), (200, 40, 40)), format)
    with serve(formats=(format.lower(),)) as client:
        (said,) = client.post("/v1/predict", files=[("files", ("x", image))]).json()["predictions"]
    expected = Colours().predict_pixels(decode_image(image, 8)[None])
    assert said["score"] == pytest.approx(expected.score[0])


def test_json_of_millions_of_values_is_refused_before_it_is_parsed():
    for value in (b"0", b'{"data":""}', b"[]"):
        with pytest.raises(UploadError, match="64 images"):
            parse_json(b'{"images":[' + (value + b",") * 100_000 + value + b"]}", 64)
    with pytest.raises(ValidationError) as error:
        PredictRequest.model_validate_json(b'{"images":[' + b"0," * 1000 + b"0]}")
    assert error.value.error_count() == 1
    names = [{"name": "," * 1000, "data": ""}] * 64
    assert len(parse_json(json.dumps({"images": names}).encode(), 64)) == 64


def test_headers_of_a_part_are_few_and_short():
    """Which older versions of python-multipart do not care about."""
    disposition = b'Content-Disposition: form-data; name="files"; filename="a.png"\r\n'
    many = b"".join(b"H%d: v\r\n" % i for i in range(1000))
    with TestClient(create_app(Colours(), ServeOptions())) as client:
        for headers in (many, b"H: " + b"v" * 10_000 + b"\r\n", b"H" * 10_000 + b": v\r\n"):
            body = b"--x\r\n" + disposition + headers + b"\r\n" + png((1, 2, 3)) + b"\r\n--x--\r\n"
            said = client.post("/v1/predict", content=body, headers={"Content-Type": "multipart/form-data; boundary=x"})
            assert said.status_code == 422 and "header" in said.json()["error"]


class Processes:
    """The processes that were started: no more than ``most`` can be, and the next ``n_doomed`` are killed at once."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen] = []
        self.most, self.n_doomed = 1000, 0

    def start(self, *arguments: Any, popen: type[subprocess.Popen] = subprocess.Popen, **options: Any) -> Any:
        if len(self.started) >= self.most:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        process = popen(*arguments, **options)
        self.started.append(process)
        if self.n_doomed:
            self.n_doomed -= 1
            process.kill()
        return process

    def end(self, by: signal.Signals) -> None:
        for process in self.started:
            process.send_signal(by)


@pytest.fixture
def processes(monkeypatch) -> Processes:
    noted = Processes()
    monkeypatch.setattr("maple.data.decoders.subprocess.Popen", noted.start)
    return noted


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_a_decoder_that_others_end_is_no_fault_of_the_image(processes):
    with TestClient(create_app(Colours())) as client:

        def ask() -> Any:
            return client.post("/v1/predict", json=as_json(png((200, 40, 40))))

        processes.end(signal.SIGKILL)
        assert [ask().status_code for _ in range(DECODERS + 1)] == [200] * (DECODERS + 1)
        processes.end(signal.SIGKILL)
        processes.n_doomed = 1  # the one that is asked next
        said = ask()
        assert said.status_code == 503 and int(said.headers["retry-after"]) >= 1
        assert 'maple_refused_total{reason="decoder"} 1.0' in client.get("/metrics").text
        assert [ask().status_code for _ in range(DECODERS + 1)] == [200] * (DECODERS + 1)
    assert all(process.poll() is not None for process in processes.started)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_a_decoder_that_cannot_be_started_is_missed_until_it_can(processes):
    with TestClient(create_app(Colours())) as client:

        def ask() -> Any:
            return client.post("/v1/predict", json=as_json(png((200, 40, 40))))

        processes.most = len(processes.started)
        processes.started[-1].send_signal(signal.SIGALRM)  # as an image would
        assert [ask().status_code for _ in range(3)] == [422, 200, 200]  # by the other
        processes.end(signal.SIGALRM)
        assert ask().status_code == 422
        for _ in range(DECODERS):
            said = ask()
            assert said.status_code == 503 and int(said.headers["retry-after"]) >= 1
        processes.most += DECODERS
        assert [ask().status_code for _ in range(DECODERS + 1)] == [200] * (DECODERS + 1)
    assert all(process.poll() is not None for process in processes.started)


def test_where_one_decoder_cannot_be_started_none_is_left(processes):
    processes.most = 1
    with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
        DecoderPool(Decoding(8, "pad", max_pixels=64, seconds=60), 2)
    (process,) = processes.started
    assert process.returncode is not None
