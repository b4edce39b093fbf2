"""Hostile and broken requests: never a 5xx, never a traceback, always one sentence; and the service goes on."""

from __future__ import annotations

import base64
import json
import pickle
import re
import signal
import struct
import sys
import zlib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from starlette.testclient import TestClient

from image_files import encode, endless_jpeg, noise, png_of_size
from maple.deploy.serve.app import create_app
from maple.deploy.serve.endpoints import DECODERS
from maple.deploy.serve.options import ServeOptions
from serving import Colours, as_form, as_json, http_bytes, png, server, talk

N_UPLOADS = 500
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM")
NAMES = (
    "../../etc/passwd",
    "/etc/shadow",
    "..\\..\\windows\\system.ini",
    "C:\\a.png",
    "\\\\host\\share\\a.png",
    "a\x00.png",
    "\x1b[2Ja.png",
    "a\r\nX-Injected: yes",
    '"; filename="b.png',
    "%2e%2e%2f",
    "CON",
    "~root",
    "$(reboot)",
    "`id`",
    "<script>alert(1)</script>",
    "\u202egnp.exe",
    "😀" * 300,
    "a" * 5000,
    "",
    " ",
    ".",
    "..",
    "'; drop table images;--",
    "{{7*7}}",
    "\ufeffbom.png",
    "\x7f\x80\x9f",
    "nul\x00" * 50,
)


class Hostile(NamedTuple):
    """One request to predict."""

    body: bytes
    kind: str
    headers: dict[str, str] = {}


def form_part(image: bytes, name: bytes = b"a.png", field: bytes = b"files") -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n%s\r\n' % (field, name, image)


def either(rng: np.random.Generator, *images: bytes) -> Hostile:
    """These images as a form or as JSON."""
    if rng.random() < 0.5:
        return Hostile(*as_form(*images))
    return Hostile(json.dumps(as_json(*images)).encode(), "application/json")


# --- images ----------------------------------------------------------------------------------------------------------


def real_image(rng: np.random.Generator) -> bytes:
    return encode(noise(rng, tuple(rng.integers(1, 40, 2).tolist())), str(rng.choice(FORMATS)))


def truncated(rng: np.random.Generator) -> Hostile:
    image = real_image(rng)
    return either(rng, image[: rng.integers(0, len(image))])


def flipped(rng: np.random.Generator) -> Hostile:
    image = bytearray(real_image(rng))
    for place in rng.integers(0, len(image), rng.integers(1, 20)):
        image[place] = rng.integers(0, 256)
    return either(rng, bytes(image))


@cache
def bombs() -> list[bytes]:
    """Small files of large images, and of much that is no image."""
    text = PngInfo()
    text.add_text("Comment", "a" * 3_000_000, zip=True)
    files = [encode(Image.new("RGB", (8, 8)), pnginfo=text), zlib.compress(b"\0" * 10_000_000)]
    files += [encode(Image.new("L", (2000, 2000))), encode(Image.new("1", (2000, 2000)), "TIFF", compression="group4")]
    for side in (1001, 19_999, 20_001, 65_535, 2**31 - 1):
        short = struct.pack("<HH", min(side, 65_535), min(side, 65_535))
        header = struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
        files += [png_of_size(side, side), png_of_size(side, 1), b"BM" + header, b"P6 %d %d 255\n" % (side, side)]
        files.append(b"GIF89a" + short + b"\x80\0\0" + b"\0" * 6 + b",\0\0\0\0" + short + b"\0\x02\x02\x44\x01\0;")
    return files


def bomb(rng: np.random.Generator) -> Hostile:
    return either(rng, bombs()[rng.integers(len(bombs()))])


def wrong_type(rng: np.random.Generator) -> Hostile:
    others = [
        b"",
        b"\0",
        b"\0" * 1000,
        b"%PDF-1.7\n",
        b"PK\x03\x04" + b"\0" * 50,
        b"\x7fELF" + b"\0" * 50,
        pickle.dumps(print),
        b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
        b"<html>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"MZ",
        b"GIF89a",
        b"\xff\xd8\xff",
        b"RIFF\0\0\0\0WEBP",
        b"II*\0",
        b"\x89PNG\r\n\x1a\n",
        rng.bytes(500),
        b"\x00\x00\x01\x00",
        b"P5",
        b"P6 0 0 255\n",
        b"P7\nWIDTH 9\n",
        b"\x1f\x8b\x08",
        b"BM",
    ]
    return either(rng, others[rng.integers(len(others))])


# --- names, forms, JSON, headers -------------------------------------------------------------------------------------


def odd_name(rng: np.random.Generator) -> Hostile:
    name = NAMES[rng.integers(len(NAMES))]
    if rng.random() < 0.5:
        image = {"name": name, "data": base64.b64encode(png((1, 2, 3))).decode()}
        return Hostile(json.dumps({"images": [image]}).encode(), "application/json")
    raw = name.encode() if rng.random() < 0.7 else rng.bytes(30)
    return Hostile(form_part(png((1, 2, 3)), raw) + b"--x--\r\n", "multipart/form-data; boundary=x")


def broken_form(rng: np.random.Generator) -> Hostile:
    good = form_part(png((1, 2, 3))) * 3 + b"--x--\r\n"
    damaged = bytearray(good)
    for place in rng.integers(0, len(good), 5):
        damaged[place] = rng.integers(0, 256)
    bodies = [
        good[: rng.integers(0, len(good))],
        good[rng.integers(1, len(good)) :],
        bytes(damaged),
        good.replace(b"\r\n", b"\n"),
        good.replace(b"--x--\r\n", b""),
        good + good,
        form_part(b"", field=b"other") + b"--x--\r\n",
        form_part(b"", field=b"") + b"--x--\r\n",
        b"--x\r\n\r\n\r\n--x--\r\n",
        b"--x\r\nno colon here\r\n\r\n\r\n--x--\r\n",
        b"--x\r\nContent-Disposition: " + b"a" * 10_000 + b"\r\n\r\n\r\n--x--\r\n",
        b"--x\r\n" + b"".join(b"H%d: v\r\n" % i for i in range(1000)) + b"\r\n\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="files"\r\n\r\ntext\r\n--x--\r\n',
        form_part(b"", b"a") * 1000 + b"--x--\r\n",
        b"--x\r\nContent-Disposition: form-data; name*=utf-8''files; filename*=utf-8''a\r\n\r\n\r\n--x--\r\n",
        b"--x\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n--y--\r\n--x--\r\n",
        b"\r\n" * 500,
        b"--" * 500,
        b"",
    ]
    boundaries = [
        "boundary=x",
        "boundary=y",
        "",
        "boundary=",
        'boundary="',
        'boundary="x',
        f"boundary={'x' * 5000}",
        "boundary=x;boundary=y",
        "boundary=x; charset=idna",
        "boundary=x; charset=undefined",
        "boundary=x; charset=utf-7",
        "boundary=x; charset=a\x01b",
        "boundary=\xe9",
        "BOUNDARY=x",
        ";;;=;",
        "boundary=x; charset=utf-16",
    ]
    boundary = boundaries[0] if rng.random() < 0.6 else boundaries[rng.integers(len(boundaries))]
    return Hostile(bodies[rng.integers(len(bodies))], f"multipart/form-data; {boundary}")


def broken_json(rng: np.random.Generator) -> Hostile:
    good = json.dumps(as_json(png((1, 2, 3)))).encode()
    bodies = [
        good[: rng.integers(0, len(good))],
        b"[" * 100_000,
        b'{"images":' * 5000,
        b'{"images": [' + b"{" * 5000,
        b"",
        b"null",
        b"NaN",
        b"1e999",
        b'{"images": 1}',
        b'{"images": {"data": ""}}',
        b'{"images": [null]}',
        b'{"images": [{"data": null}]}',
        b'{"images": [{"data": 7, "name": []}]}',
        b'{"images": [{"data": "", "name": "\\ud800"}]}',
        b'{"images": [{"data": "\\u0000"}]}',
        b'{"images": [{"data": "a\\u0000b="}]}',
        b'{"images": [{"data": "'
        + bytes(rng.integers(33, 127, 40, np.uint8)).replace(b'"', b"").replace(b"\\", b"")
        + b'"}]}',
        b'{"images": [{"data": "=", "extra": 1}]}',
        b'{"images": [], "images": [{}]}',
        b'{"images": [' + b",".join([b'{"data": ""}'] * 1000) + b"]}",
        b"\xef\xbb\xbf" + good,
        good.decode().encode("utf-16"),
        good.replace(b"a", b"\xff"),
        good.replace(b":", b";"),
        good + b"\0",
        b'{"images": [{"name": "' + b"n" * 2000 + b'", "data": ""}]}',
        b"9" * 5000,
        rng.bytes(300),
    ]
    return Hostile(bodies[rng.integers(len(bodies))], "application/json")


def odd_header(rng: np.random.Generator) -> Hostile:
    body, kind = as_form(png((1, 2, 3)))
    headers = [
        {"content-encoding": "gzip"},
        {"content-encoding": "\xff"},
        {"content-length": "-1"},
        {"content-length": "9" * 400},
        {"content-length": "abc"},
        {"x-api-key": "k" * 10_000},
        {"x-forwarded-for": "a" * 20_000},
        {"accept": "text/html", "accept-charset": "\xe9"},
        {"cookie": "a=b;" * 2000},
        {"range": "bytes=0-1"},
        {"expect": "100-continue"},
        {f"x-{i}": "v" for i in range(500)},
    ]
    kinds = [
        kind,
        "",
        "text/plain",
        "image/png",
        "multipart/form-data",
        "multipart/x; boundary=x",
        "/",
        ";",
        "a" * 9000,
        "json",
        "\xff",
    ]
    return Hostile(body, kinds[rng.integers(len(kinds))], headers[rng.integers(len(headers))])


KINDS: tuple[Callable[[np.random.Generator], Hostile], ...] = (
    truncated,
    flipped,
    bomb,
    wrong_type,
    odd_name,
    broken_form,
    broken_json,
    odd_header,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_hostile_uploads_are_answered_with_a_sentence(kind):
    """Five hundred of them in all; in this process, where a failure would come out as an exception."""
    rng = np.random.default_rng(7 + KINDS.index(kind))
    app = create_app(Colours(), ServeOptions(max_bytes=2**20, max_pixels=1_000_000))
    statuses = []
    with TestClient(app) as client:
        for i in range(-(-N_UPLOADS // len(KINDS))):
            sent = kind(rng)
            headers = {name.encode("latin-1"): value.encode("latin-1") for name, value in sent.headers.items()}
            if sent.kind:
                headers[b"content-type"] = sent.kind.encode("latin-1")
            said = client.post("/v1/predict", content=sent.body, headers=headers)
            statuses.append(said.status_code)
            assert said.status_code in (200, 413, 415, 422), (i, sent, said.text)
            if said.status_code == 200:
                assert all(isinstance(row["class"], str) for row in said.json()["predictions"])
            else:
                assert list(said.json()) == ["error"]
                assert re.fullmatch(r"[^\n]{10,500}", said.json()["error"]) and "Traceback" not in said.text
        assert client.get("/readyz").status_code == 200
        assert client.post("/v1/predict", json=as_json(png((1, 2, 3)))).status_code == 200
    assert any(status != 200 for status in statuses) or kind is odd_name


@pytest.mark.skipif(sys.platform == "win32", reason="has no signal that ends a decoder")
def test_images_that_decode_forever_are_refused_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr("maple.deploy.serve.endpoints.DECODE_SECONDS", 1.0)
    small = encode(Image.new("RGB", (8, 8)), "JPEG")
    endless = (
        endless_jpeg(),
        b"P6\n#" + bytes(2**25) + b"\n8 8\n255\n" + bytes(192),  # a comment, of which Pillow reads byte by byte
        small[:2] + b"\xff\xfe\0\2" * 2**23 + small[2:],  # comments of no length
    )
    with TestClient(create_app(Colours(), ServeOptions(max_bytes=2**26, formats=("jpeg", "png", "ppm")))) as client:
        for image in endless:
            for _ in range(DECODERS):  # each takes one out of service, if it can
                body, kind = as_form(image)
                said = client.post("/v1/predict", content=body, headers={"Content-Type": kind})
                assert said.status_code == 422 and "'0.png'" in said.json()["error"]
            assert client.post("/v1/predict", json=as_json(png((200, 40, 40)))).status_code == 200


def raw_requests() -> list[tuple[str, bytes]]:
    """What a client may send that no library would: (name, bytes)."""
    body, kind = as_form(png((1, 2, 3)))
    good = http_bytes("/v1/predict", body, kind)
    start = f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    chunked = f"{start}Transfer-Encoding: chunked\r\n\r\n".encode()
    big = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    too_much = b"80000\r\n" + b"a" * 2**19 + b"\r\n100000\r\n" + b"a" * 2**20
    two = http_bytes("/healthz", method="GET").replace(b"Connection: close\r\n", b"") + b"\0\0\r\n\r\n"
    end = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    return [
        ("a huge header", http_bytes("/v1/predict", body, kind, **{"X-Huge": "a" * 200_000})),
        ("many headers", http_bytes("/v1/predict", body, kind, **{f"X-{i}": "a" * 100 for i in range(2000)})),
        ("a huge path", http_bytes("/" + "a" * 200_000, method="GET")),
        ("a huge query", http_bytes("/healthz?" + "a" * 200_000, method="GET")),
        ("a huge header without end", b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 200_000),
        ("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100 + b"\r\n\r\n"),
        ("text", b"hello\r\n\r\n"),
        ("zeros", b"\0" * 1000 + b"\r\n\r\n"),
        ("an old version", b"GET /healthz HTTP/0.9\r\n\r\n"),
        ("a future version", b"GET /healthz HTTP/9.9\r\nHost: localhost\r\n\r\n"),
        ("no host", b"GET /healthz HTTP/1.1\r\n\r\n"),
        ("a header without colon", b"GET /healthz HTTP/1.1\r\nHost a\r\n\r\n"),
        ("a zero in a header", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n"),
        ("a space before the colon", b"GET /healthz HTTP/1.1\r\nHost : a\r\n\r\n"),
        ("a negative length", good.replace(b"Content-Length: ", b"Content-Length: -")),
        ("a length of letters", good.replace(b"Content-Length: ", b"Content-Length: x")),
        ("two lengths", good.replace(b"Host: localhost", b"Host: localhost\r\nContent-Length: 3")),
        ("length and chunks", good.replace(b"Host: localhost", b"Host: localhost\r\nTransfer-Encoding: chunked")),
        ("an unknown coding", good.replace(b"Host: localhost", b"Host: localhost\r\nTransfer-Encoding: gzip, chunked")),
        ("a chunk of no length", chunked + b"zz\r\nabc\r\n0\r\n\r\n"),
        ("a huge chunk size", chunked + b"f" * 100 + b"\r\nabc\r\n"),
        ("chunks that lie", chunked + b"3\r\nabcdef\r\n0\r\n\r\n"),
        ("too much, then nonsense", big + b"Transfer-Encoding: chunked\r\n\r\n" + too_much + b"\r\nzz\r\n"),
        ("too long by its own word", big + b"Content-Length: 99999999999\r\nConnection: close\r\n\r\nabc"),
        ("a length of a thousand digits", big + b"Content-Length: " + b"9" * 1000 + b"\r\n\r\n"),
        ("two requests, the second broken", two),
        ("refused, then broken", chunked.replace(b"multipart", b"image") + b"zz\r\n"),
        ("a path of any bytes", b"GET /%ff%fe%00%0d%0a/../..//static/%2e%2e/%2e%2e/etc/passwd" + end),
        ("a path outside", b"GET /static/../../../../etc/passwd" + end),
        ("an absolute path", b"GET http://elsewhere.example/healthz" + end),
        ("a proxy request", b"CONNECT a:443" + end),
        (
            "an upgrade",
            http_bytes("/healthz", method="GET", Upgrade="websocket").replace(b": close", b": upgrade, close"),
        ),
        ("an unknown method", http_bytes("/v1/predict", body, kind, method="BREW")),
        ("a body that stops", good[:-100]),
    ]


UNFINISHED = ("a huge header without end", "a body that stops")  # for whose end the service waits


def test_hostile_bytes_over_a_socket_do_not_bring_it_down():
    with server(0.0) as (process, port):
        for name, request in raw_requests():
            answer = talk(port, request, timeout=1.0 if name in UNFINISHED else 4.0)
            statuses = [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d+)", answer, re.MULTILINE)]
            assert all(200 <= status < 500 for status in statuses), (name, answer[:500])
            assert statuses or name in UNFINISHED, name
            assert b"Traceback" not in answer
        assert talk(port, http_bytes("/readyz", method="GET")).startswith(b"HTTP/1.1 200")
        good = http_bytes("/v1/predict", *as_form(png((200, 40, 40))))
        assert b'"class":"red"' in talk(port, good)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
