"""What is wrong with an image is said before the rest of its body arrives."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest
from PIL import Image

from image_files import encode, png_of_size
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.uploads import read_uploads
from maple.deploy.serve.watch import UploadError
from maple.errors import UsageError
from serving import as_form, as_json, png, serve

LONG = b"\0" * 10_000_000  # that follows the header, and must not be asked for
SMALL, LARGE, OTHER = png((1, 2, 3)), png_of_size(9000, 9000), encode(Image.new("RGB", (8, 8)), "TIFF")


def as_raw(*images: bytes) -> tuple[bytes, str]:
    return b"".join(images), "image/png"


def as_text(*images: bytes) -> tuple[bytes, str]:
    return json.dumps(as_json(*images)).encode(), "application/json"


def send(body: bytes, kind: str, size: int) -> tuple[int, int]:
    """Status of the refusal, and how many bytes were asked for before it."""
    taken = 0

    async def chunks():
        nonlocal taken
        for start in range(0, len(body), size):
            taken += size
            yield body[start : start + size]

    with pytest.raises(UploadError) as refused:
        asyncio.run(read_uploads({"content-type": kind}, chunks(), ServeOptions()))
    return refused.value.status, taken


@pytest.mark.parametrize("write", [as_raw, as_form, as_text])
@pytest.mark.parametrize("size", [7, 1000, 2**16])
@pytest.mark.parametrize(("image", "status"), [(LARGE, 413), (OTHER, 415)], ids=["large", "other"])
def test_an_image_is_refused_from_its_first_bytes(write, size, image, status) -> None:
    before = () if write is as_raw else (SMALL, SMALL)  # images that can be used
    found, taken = send(*write(*before, image + LONG), size)
    assert found == status and taken < 3000 + 2 * size


def test_more_images_than_accepted_are_refused_before_all_have_arrived() -> None:
    """Each costs a look at the rest of the text."""
    body = b'{"images": [' + b'{"data":""},' * 500_000
    status, taken = send(body, "application/json", 2**16)
    assert status == 422 and taken == 2**16


@pytest.mark.parametrize("write", [as_form, as_text])
def test_names_are_those_of_the_upload(write) -> None:
    with serve(max_pixels=64) as client:
        body, kind = write(png((1, 2, 3)), png((1, 2, 3), (9, 8)))
        said = client.post("/v1/predict", content=body, headers={"content-type": kind})
    assert said.status_code == 413
    assert "'1.png'" in said.json()["error"]
    with serve(max_pixels=64) as client:
        unnamed = {"images": [{"data": base64.b64encode(each).decode()} for each in (SMALL, png((1, 2, 3), (9, 8)))]}
        assert "'image 2'" in client.post("/v1/predict", json=unnamed).json()["error"]


@pytest.mark.parametrize("write", [as_raw, as_form, as_text])
def test_formats_are_chosen(write) -> None:
    gif = encode(Image.new("RGB", (8, 8), (200, 40, 40)), "GIF")
    for options, status in (({}, 415), ({"formats": ("gif",)}, 200), ({"formats": ("png", "tiff")}, 415)):
        with serve(**options) as client:
            body, kind = write(gif)
            said = client.post("/v1/predict", content=body, headers={"content-type": kind})
            assert said.status_code == status
            if status == 415:
                assert "GIF" in said.json()["error"]
            assert client.get("/v1/model").json()["limits"]["formats"] == list(ServeOptions(**options).formats)
    with pytest.raises(UsageError, match="--formats"):
        ServeOptions(formats=())


def test_what_the_watch_cannot_tell_the_decoder_refuses() -> None:
    """TIFF has its dimensions at its end, and a form may hide an image behind base64."""
    tiff = encode(Image.new("1", (2000, 2000)), "TIFF", compression="group4")
    with serve(max_pixels=1000, formats=("tiff", "png")) as client:
        assert client.post("/v1/predict", content=tiff).status_code == 413
        part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n'
        coded = part + b"Content-Transfer-Encoding: base64\r\n\r\n" + base64.b64encode(LARGE) + b"\r\n--x--\r\n"
        kind = {"content-type": "multipart/form-data; boundary=x"}
        assert client.post("/v1/predict", content=coded, headers=kind).status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        b'{"images": [{"name": "\\"data\\": \\"' + base64.b64encode(LARGE) + b'", "data": "%s"}]}',
        b'{"images": [{"data"  :\n"%s", "name": "data"}]}',
    ],
)
def test_text_that_only_looks_like_an_image_is_none(body) -> None:
    with serve() as client:
        sent = body.replace(b"%s", base64.b64encode(png((200, 40, 40))))
        said = client.post("/v1/predict", content=sent, headers={"content-type": "application/json"})
    assert said.status_code == 200 and said.json()["predictions"][0]["class"] == "red"
