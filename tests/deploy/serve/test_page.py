"""The page of ``maple serve`` in a browser, on the real service: what it shows is what the service says."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

from browser import open_browser
from image_files import encode
from maple.data.splits import load_splits
from maple.decisions.calibration import Calibration
from maple.deploy.serve.app import create_app
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.server import listen_at, read_exemplars
from maple.networks import create_backbone, embed
from maple.prediction.fit import fit_predictor
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.reporting.gallery import write_cluster_gallery
from maple.types import PREDICTION_COLUMNS, Outputs, Relabelling

STATIC = Path(__file__).parents[3] / "src/maple/deploy/serve/static"
HOSTILE = '<img src=x onerror=alert(1)>,"quoted".png'
KEY = "a key with spaces"

Files = dict[str, bytes]  # of images, by name

# --- a small run, and services that answer with it -------------------------------------------------------------------


@pytest.fixture(scope="module")
def splits():
    return load_splits("digits")


@pytest.fixture(scope="module")
def run(splits, tmp_path_factory) -> Path:
    """Digits and a network that has learnt nothing, which is enough to tell them from noise; the 1 has two clusters."""
    folder = tmp_path_factory.mktemp("page")
    train = splits.train.subset(range(400))
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 11).eval()
    ids = train.labels.copy()
    ids[np.flatnonzero(ids == 1)[::2]] = 10
    cluster_to_class = np.array([*range(10), 1])
    relabelling = Relabelling(ids, cluster_to_class, cluster_to_class, np.ones(11))
    unseen = splits.validation.subset(range(100))
    fit_predictor(backbone, train, unseen, splits.calibration, relabelling=relabelling).save(folder)
    embeddings = embed(backbone, train).embeddings
    outputs = Outputs(embeddings, labels=train.labels, cluster_ids=ids, cluster_to_class=cluster_to_class)
    write_cluster_gallery(folder / "gallery", train, outputs, per_cluster=4)
    return folder


@contextmanager
def served(folder: Path, predictor: Predictor, **options: Any) -> Iterator[str]:
    """The address of a service in another thread."""
    app = create_app(predictor, ServeOptions(**options), read_exemplars(folder, predictor))
    listener = listen_at("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def address(run) -> Iterator[str]:
    with served(run, load_predictor(run)) as address:
        yield address


@pytest.fixture(scope="module")
def files(splits) -> Files:
    """Ten digits, one with its colours inverted, and noise."""
    rng = np.random.default_rng(0)
    pixels = [splits.test.read(i) for i in range(10)]
    others = {"inverted.png": 255 - pixels[0], "noise.png": rng.integers(0, 256, pixels[0].shape, dtype=np.uint8)}
    named = {f"digit-{i}.png": image for i, image in enumerate(pixels)} | others
    return {name: encode(Image.fromarray(image)) for name, image in named.items()}


def ask(address: str, files: Files, key: str | None = None) -> list[dict[str, Any]]:
    """What the service says of the images, asked without the page."""
    headers = {"X-API-Key": key} if key else {}
    upload = [("files", (name, data, "image/png")) for name, data in files.items()]
    answer = httpx2.post(f"{address}v1/predict", files=upload, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


@pytest.fixture(scope="module")
def said(address, files) -> list[dict[str, Any]]:
    return ask(address, files)


# --- a browser and what it shows -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@contextmanager
def visits(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open pages; at the end, nothing went wrong in them and they asked nobody but their own service."""
    faults: list[str] = []
    with ExitStack() as stack:

        def visit(address: str, *, refusals: bool = False, ready: bool = True, **options: Any) -> Any:
            """With ``refusals``, the service says no at times, which the browser notes as an error."""
            size = {"width": 1280, "height": 900}
            context = browser.new_context(**{"viewport": size, "reduced_motion": "reduce", **options})
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(20_000)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("dialog", lambda dialog: faults.append(f"a dialog: {dialog.message}"))

            def note_request(request: Any) -> None:
                if not request.url.startswith((address, "blob:", "data:")):
                    faults.append(request.url)

            def note_message(message: Any) -> None:
                refused = refusals and "the server responded with a status of" in message.text
                if message.type in ("error", "warning") and not refused:
                    faults.append(message.text)

            page.on("request", note_request)
            page.on("console", note_message)
            page.goto(address)
            if ready:
                page.wait_for_selector("#choose:enabled")
            return page

        yield visit
    assert faults == []


@pytest.fixture
def visit(browser):
    with visits(browser) as visit:
        yield visit


@pytest.fixture(scope="module")
def shared_page(browser, address, files):
    """One page for the tests that change nothing but its controls: all files were dropped on it."""
    with visits(browser) as visit:
        page = visit(address)
        drop(page, files)
        yield page


RESET = """() => {
    document.querySelector("#level-reset").click();
    document.querySelector("#only-out").checked = false;
    document.querySelector("#sort").value = "added";
    document.querySelector("#sort").dispatchEvent(new Event("change"));
    document.querySelector(".card.selected .number")?.click();
}"""


@pytest.fixture
def page(shared_page):
    """That page, with the controls as they were at first."""
    yield shared_page
    shared_page.evaluate(RESET)


@pytest.fixture(scope="module")
def shared_empty_page(browser, address):
    with visits(browser) as visit:
        yield visit(address, refusals=True)


@pytest.fixture
def empty_page(shared_empty_page):
    """Another page, on which every test finds no image."""
    yield shared_empty_page
    shared_empty_page.unroute_all()
    shared_empty_page.evaluate(RESET)
    shared_empty_page.evaluate("document.querySelector('#clear').click()")


TRANSFER = """
    const transfer = new DataTransfer();
    for (const [name, data] of files) {
        const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
        transfer.items.add(new File([bytes], name, { type: "image/png" }));
    }
"""


def encoded(files: Files) -> list[list[str]]:
    return [[name, base64.b64encode(data).decode()] for name, data in files.items()]


def payload(files: Files) -> list[dict[str, Any]]:
    """Files as Playwright wants them."""
    return [{"name": name, "mimeType": "image/png", "buffer": data} for name, data in files.items()]


def drop(page: Any, files: Files) -> None:
    """Drop files on the page, as if they were dragged from a folder."""
    page.evaluate(
        f"""(files) => {{{TRANSFER}
            for (const kind of ["dragenter", "dragover", "drop"]) {{
                const options = {{ dataTransfer: transfer, bubbles: true, cancelable: true }};
                document.body.dispatchEvent(new DragEvent(kind, options));
            }}
        }}""",
        encoded(files),
    )
    wait_for_answers(page)


def wait_for_answers(page: Any) -> None:
    page.wait_for_selector(".card")
    wait_until(page, "() => !document.querySelector('[data-state=waiting], [data-state=sent]')")
    settle(page)


def wait_until(page: Any, function: str, argument: Any = None, seconds: float = 20) -> None:
    """Until a function of the page says yes. (Playwright's own way evaluates text in the page, which forbids that.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(function, argument):
        assert time.monotonic() < end, f"still not so after {seconds} s: {function}"
        page.wait_for_timeout(20)


def read_until(page: Any, read: Callable[[], Any], holds: Callable[[Any], bool], seconds: float = 20) -> Any:
    """What is read once it ``holds``, or when time is up: a busy machine draws late."""
    end = time.monotonic() + seconds
    while not holds(found := read()) and time.monotonic() < end:
        page.wait_for_timeout(50)
    return found


def settle(page: Any) -> None:
    """Two frames later everything is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def verdicts(page: Any) -> dict[str, str]:
    """in, out or none by the name of the image, from the cards; the words and the marker on the map must agree."""
    rows = page.evaluate(
        """() => [...document.querySelectorAll(".card[data-state=said]")].map((card) => {
            const number = card.querySelector(".number").textContent;
            const isOwn = (marker) => marker.querySelector("text").textContent === number;
            const marker = [...document.querySelectorAll("[role=button].marker")].find(isOwn);
            return [
                card.querySelector(".file").textContent, card.dataset.verdict,
                card.querySelector(".verdict").textContent, [...marker.classList], marker.getAttribute("aria-label"),
            ];
        })"""
    )
    words = {"in": "Known", "out": "Unknown", "none": "Not calibrated: no verdict"}
    for name, verdict, text, classes, label in rows:
        assert text == words[verdict]
        assert {"in", "out"} & set(classes) == {verdict} - {"none"}
        assert name in label and (verdict == "none" or words[verdict].lower() in label)
    return {name: verdict for name, verdict, *_ in rows}


def by_p_value(files: Files, said: list[dict[str, Any]], level: float) -> dict[str, str]:
    return {name: "out" if row["p_value"] <= level else "in" for name, row in zip(files, said, strict=True)}


def by_service(files: Files, said: list[dict[str, Any]]) -> dict[str, str]:
    return {name: "out" if row["is_ood"] else "in" for name, row in zip(files, said, strict=True)}


def names(page: Any) -> list[str]:
    """The names on the cards that can be seen, in their order."""
    return page.locator(".card:not([hidden]) .file").all_text_contents()


def set_level(page: Any, level: float) -> None:
    page.fill("#level-field", repr(float(level)))


CARDS = """() => [...document.querySelectorAll(".card")].map((card) => ({
    title: card.querySelector("h3").textContent,
    meters: Object.fromEntries([...card.querySelectorAll("[role=meter]")].map(
        (meter) => [meter.getAttribute("aria-label"), Number(meter.getAttribute("aria-valuenow"))])),
    captions: [...card.querySelectorAll("figcaption")].map((caption) => caption.textContent),
    strips: [...card.querySelectorAll(".strip img")].map((strip) => strip.alt),
}))"""


# --- images in, verdicts out -----------------------------------------------------------------------------------------


def test_dropped_images_show_what_the_service_says(page, address, files, said):
    assert names(page) == list(files)
    assert verdicts(page) == by_service(files, said) and {"in", "out"} == set(verdicts(page).values())
    clusters = httpx2.get(f"{address}v1/model").json()["clusters"]
    for row, card in zip(said, page.evaluate(CARDS), strict=True):
        second = row["runner_up"]["class"]
        own = [c for c in clusters if c["class"] == second]  # a class may have several
        nearest = min(own, key=lambda c: math.dist(c["position"], row["position"]))["cluster"]
        assert card["title"] == row["class"]
        assert card["meters"]["p-value"] == row["p_value"]
        assert set(card["meters"]) == {"Probability", "p-value"}  # the quantities of the paper are under "More"
        assert card["meters"]["Probability"] == pytest.approx(row["probability"], rel=1e-4)  # batches differ a little
        assert card["captions"][0] == f"Nearest {row['md_class']}cluster {row['cluster']}"
        assert card["captions"][1].startswith(f"Runner-up {second}") and len(card["captions"]) == 2
        assert [alt.split(", those")[0] for alt in card["strips"]] == [
            f"Training images of cluster {row['cluster']}, {row['md_class']}",
            f"Training images of cluster {nearest}, {second}",
        ]
    wait_until(page, "() => document.querySelector('.strip img').naturalWidth === 4 * 8")  # four exemplars of 8 pixels
    n_out = sum(row["is_ood"] for row in said)
    wait_until(
        page,
        "text => document.querySelector('#summary').textContent === text",
        f"12 images, {n_out} unknown at level 0.05.",
    )


def test_a_nearest_cluster_of_another_class_stands_beside_the_class(empty_page, files, said):
    """The class of the most probable answer, not the runner-up, which may be that of the nearest cluster."""
    other = said[0]["runner_up"]["class"]

    def move(route: Any) -> None:
        answer = route.fetch()
        body = answer.json()
        body["predictions"][0]["md_class"] = other
        route.fulfill(response=answer, json=body)

    empty_page.route("**/v1/predict", move)
    name, content = next(iter(files.items()))
    drop(empty_page, {name: content})
    (card,) = empty_page.evaluate(CARDS)
    assert card["captions"][0].startswith(f"Nearest {other}")
    assert card["captions"][1].startswith(f"Most probable {said[0]['class']}")


def test_labels_of_the_track_do_not_touch(page):
    boxes = page.evaluate(
        """async () => {
            const { Level } = await import("./static/level.js");
            const { figure } = await import("./static/format.js");
            const { html } = await import("./static/dom.js");
            const own = document.getElementById("ticks");
            const row = own.parentNode.appendChild(own.cloneNode());
            const found = [19, 60, 99, 225, 226, 1000, 5000].map((n) => {
                const level = new Level({ n_calibration: n, false_alarm: 0.05 });
                row.replaceChildren(...level.ticks.map((tick) => {
                    const node = html("span", {}, figure(tick));
                    node.style.setProperty("--at", String(level.toTrack(tick)));
                    return node;
                }));
                return [...row.children].map((node) => node.getBoundingClientRect())
                    .map(({ left, right }) => [left, right]);
            });
            row.remove();
            return found;
        }"""
    )
    for ticks in map(sorted, boxes):
        assert len(ticks) > 2
        assert all(right + 2 < left for (_, right), (left, _) in pairwise(ticks))


def test_numbers_that_round_to_a_bound_say_so(page):
    texts = page.evaluate(
        """async () => {
            const { share, figure, percent } = await import("./static/format.js");
            const shares = [0, 0.0004, 0.0005, 0.1234, 0.9994, 0.99951, 1];
            return [shares.map(share), [-0.012345, 1234.5].map(figure), percent(0.05)];
        }"""
    )
    assert texts == [["0.000", "< 0.001", "0.001", "0.123", "0.999", "> 0.999", "1.000"], ["−0.0123", "1230"], "5 %"]


def test_verdicts_flip_exactly_at_the_p_values(page, address, files, said):
    for p in sorted({row["p_value"] for row in said}):
        for level in (np.nextafter(p, 0), p):
            set_level(page, level)
            assert verdicts(page) == by_p_value(files, said, level), level
    for key, end in (("Home", math.ceil(1e5 / 180) / 1e5), ("End", 0.5)):  # 179 calibration images
        page.focus("#level")
        page.keyboard.press(key)
        assert page.input_value("#level-field") == f"{end:g}"
        assert verdicts(page) == by_p_value(files, said, end)
    for _ in range(6):
        page.keyboard.press("PageDown")
        assert verdicts(page) == by_p_value(files, said, float(page.input_value("#level-field")))
    assert "at most" in page.text_content("#promise") and page.input_value("#level-field") in page.text_content(
        "#promise"
    )
    page.click("#level-reset")
    assert page.input_value("#level-field") == "0.05" and verdicts(page) == by_service(files, said)
    model = httpx2.get(f"{address}v1/model").json()
    assert page.text_content("#promise").lower() == model["decision"]["sentence"].lower() + "."


def test_levels_that_are_none_change_nothing(page, address, files, said):
    set_level(page, 0.3)
    for text in ("", "0", "1", "-0.1", "7"):
        page.fill("#level-field", text)
        assert verdicts(page) == by_p_value(files, said, 0.3)
    set_level(page, 1e-6)
    assert set(verdicts(page).values()) == {"in"} and page.text_content("#promise").startswith("Flags nothing")


def test_sort_and_filter(page, address, files, said):
    rows = list(zip(files, said, strict=True))
    page.select_option("#sort", "probability")
    assert names(page) == [name for name, row in sorted(rows, key=lambda r: (r[1]["probability"], -r[1]["score"]))]
    page.select_option("#sort", "p_value")
    assert names(page) == [name for name, row in sorted(rows, key=lambda r: (r[1]["p_value"], -r[1]["score"]))]
    page.select_option("#sort", "added")
    page.check("#only-out")
    assert names(page) == [name for name, row in rows if row["is_ood"]]
    set_level(page, 0.4)
    assert names(page) == [name for name, row in rows if row["p_value"] <= 0.4]
    assert page.locator("[role=button].marker:visible").count() == len(names(page))
    page.uncheck("#only-out")
    assert names(page) == list(files)


def test_csv_holds_every_prediction_at_the_level(empty_page, files, said, tmp_path):
    page = empty_page
    drop(page, {**files, HOSTILE: files["noise.png"]})
    set_level(page, 0.4)
    page.select_option("#sort", "probability")  # the file keeps the order added
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "predictions-at-0.4.csv"
    download.value.save_as(tmp_path / "predictions.csv")
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == [*PREDICTION_COLUMNS, "false_alarm"]
    noise = said[list(files).index("noise.png")]
    for name, row, expected in zip([*files, HOSTILE], rows, [*said, noise], strict=True):
        assert row["file"] == name and row["false_alarm"] == "0.4"
        assert row["is_ood"] == str(expected["p_value"] <= 0.4)
        for column in ("class", "md_class", "softmax_class"):
            assert row[column] == expected[column]
        for column in ("probability", "typicality", "uncertainty", "score", "p_value", "cluster"):
            assert float(row[column]) == pytest.approx(expected[column], rel=1e-5)


def test_paste(empty_page, files, said):
    page = empty_page
    page.evaluate(
        f"""(files) => {{{TRANSFER}
            const event = new ClipboardEvent("paste", {{ clipboardData: transfer, bubbles: true, cancelable: true }});
            document.body.dispatchEvent(event);
        }}""",
        encoded({"image.png": files["noise.png"], "own name.png": files["digit-0.png"]}),
    )
    wait_for_answers(page)
    by_name = dict(zip(files, by_service(files, said).values(), strict=True))
    assert verdicts(page) == {"pasted-1.png": by_name["noise.png"], "own name.png": by_name["digit-0.png"]}


def test_a_broken_image_has_a_sentence_and_the_others_go_on(empty_page, address, files, said):
    page = empty_page
    page.set_input_files("#files", payload({HOSTILE: b"no image at all", **files}))
    wait_for_answers(page)
    broken = page.locator(".card").first
    refusal = httpx2.post(f"{address}v1/predict", files=[("files", (HOSTILE, b"no image at all", "image/png"))])
    sentence = broken.locator(".error").text_content()
    assert refusal.status_code == 422
    assert broken.locator(".file").text_content() == HOSTILE and "No preview" in broken.text_content()
    assert sentence.lower() == refusal.json()["error"].lower() + "."
    assert verdicts(page) == by_service(files, said)
    wait_until(page, "() => document.querySelector('#summary').textContent.includes('1 without a prediction')")
    assert page.locator(".card img[src=x]").count() == 0


def test_a_busy_service_is_asked_again(empty_page, files, said):
    page = empty_page
    seen: list[str] = []

    def answer(route: Any) -> None:
        seen.append(route.request.url)
        if len(seen) <= 2:
            body = json.dumps({"error": "the queue is full: ask again later"})
            route.fulfill(status=503, headers={"Retry-After": "1"}, content_type="application/json", body=body)
        else:
            route.continue_()

    page.route("**/v1/predict", answer)
    page.set_input_files("#files", payload(files))
    note = "The service is busy: trying again in 1 s."
    wait_until(page, "note => document.querySelector('#note:not([hidden])')?.textContent === note", note)
    wait_for_answers(page)
    assert not page.is_visible("#note") and len(seen) == 2 + 3  # two refused, three of four images each
    assert verdicts(page) == by_service(files, said)


def test_a_service_that_cannot_be_reached_can_be_tried_again(empty_page, files, said):
    page = empty_page
    page.route("**/v1/predict", lambda route: route.fulfill(status=200, body='{"predictions": []}'))
    drop(page, {"digit-0.png": files["digit-0.png"]})
    assert "try again" in page.text_content(".error")
    page.unroute("**/v1/predict")
    page.click("button:text('Try again')")
    wait_for_answers(page)
    assert verdicts(page) == {"digit-0.png": by_service(files, said)["digit-0.png"]}


def test_clear_gives_memory_back_and_numbers_start_again(empty_page, files):
    page = empty_page
    page.evaluate(
        """() => {
            window.held = new Set();
            const [create, revoke] = [URL.createObjectURL, URL.revokeObjectURL];
            URL.createObjectURL = (blob) => {
                const url = create(blob);
                if (blob instanceof File) held.add(url);
                return url;
            };
            URL.revokeObjectURL = (url) => {
                held.delete(url);
                revoke(url);
            };
        }"""
    )
    drop(page, files)
    assert page.evaluate("held.size") == len(files)
    page.click("#clear")
    assert page.evaluate("held.size") == 0 and page.locator(".card, .marker").count() == 0
    assert not page.is_visible("#results") and page.is_visible("text=Drop images or folders anywhere")
    drop(page, {"again.png": files["noise.png"]})
    assert page.text_content(".number") == "1"


# --- map -------------------------------------------------------------------------------------------------------------


def places(page: Any, selector: str) -> list[tuple[float, float]]:
    found = page.locator(selector).evaluate_all("nodes => nodes.map((node) => node.getAttribute('transform'))")
    return [tuple(map(float, re.findall(r"-?[\d.]+(?:e-?\d+)?", text))) for text in found]


def test_the_map_keeps_distances_and_clamps_what_is_far(empty_page, address, files, said):
    page = empty_page
    model = httpx2.get(f"{address}v1/model").json()

    def move_the_last(route: Any) -> None:
        answer = route.fetch()
        body = answer.json()
        if body["predictions"][-1]["file"] == "noise.png":
            body["predictions"][-1]["position"] = [1000.0, 0.0]
        route.fulfill(response=answer, json=body)

    page.route("**/v1/predict", move_the_last)
    drop(page, files)
    circles = page.locator("circle.cluster").evaluate_all(
        "nodes => nodes.map((node) => ['cx', 'cy', 'r'].map((name) => Number(node.getAttribute(name))))"
    )
    scale = circles[0][2] / (2 * model["map_radius"])
    order = page.locator("[role=button].marker text").all_text_contents()  # answers come in any order
    markers = dict(zip(map(int, order), places(page, "[role=button].marker"), strict=True))
    arrows = page.locator("[role=button].marker:has(.arrow) text").all_text_contents()
    points = [(c["position"], circle[:2]) for c, circle in zip(model["clusters"], circles, strict=True)]
    points += [(row["position"], markers[i]) for i, row in enumerate(said, 1) if str(i) not in arrows]
    assert len(points) > len(circles) + 6
    for (a, drawn_a), (b, drawn_b) in combinations(points, 2):
        assert math.dist(drawn_a, drawn_b) == pytest.approx(scale * math.dist(a, b), abs=0.01)
    assert "12" in arrows
    width, height = map(float, page.get_attribute("#map", "viewBox").split()[2:])
    for x, y in markers.values():
        assert 0 < x < width and 0 < y < height
    assert markers[12][0] > 0.9 * width
    names_on_map = set(page.locator("#map .label").all_text_contents())
    assert names_on_map and names_on_map <= set(model["classes"])


def test_marker_and_card_select_each_other(page, address, files, said):
    page.locator("[role=button].marker", has_text=re.compile("^7$")).dispatch_event("click")
    assert page.locator(".card.selected .file").all_text_contents() == [list(files)[6]]
    assert page.locator(".top .marker text").all_text_contents() == ["7"]
    page.locator(".card .number").nth(2).click()
    assert page.locator("[role=button].marker[aria-pressed=true] text").all_text_contents() == ["3"]
    assert page.locator(".card [aria-pressed=true]").all_text_contents() == ["3"]
    link = page.locator(".link.nearest").evaluate("node => ['x2', 'y2'].map((name) => Number(node.getAttribute(name)))")
    circle = page.locator("circle.cluster").nth(said[2]["cluster"])
    assert link == [float(circle.get_attribute("cx")), float(circle.get_attribute("cy"))]
    page.locator(".card .number").nth(2).click()
    assert page.locator(".selected, .link").count() == 0


def test_the_map_has_a_table(page, address, files, said):
    page.click("text=The map as a table")
    page.wait_for_selector("#map-table tbody tr")  # it is drawn when the browser says that it was opened
    rows = page.locator("#map-table table").first.locator("tbody tr").all()
    assert len(rows) == len(files)
    cells = rows[-1].locator("td").all_text_contents()
    verdict = "unknown" if said[-1]["is_ood"] else "known"
    assert cells[:5] == ["12", "noise.png", said[-1]["class"], verdict, str(said[-1]["cluster"])]
    set_level(page, 0.5)
    assert rows[-1].locator("td").nth(3).text_content() == ("unknown" if said[-1]["p_value"] <= 0.5 else "known")


# --- other models ----------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_calibrated_says_how(visit, run, files):
    predictor = load_predictor(run)
    predictor.calibration = Calibration.empty(len(predictor.class_names))
    with served(run, predictor.decide()) as address:
        page = visit(address)
        drop(page, {"noise.png": files["noise.png"]})
        assert verdicts(page) == {"noise.png": "none"}
        for control in ("#level", "#level-field", "#only-out"):
            assert page.is_disabled(control)
        assert "maple update RUN --calibrate IMAGES" in page.text_content("#promise")
        with page.expect_download() as download:
            page.click("#download")
        row = next(csv.DictReader(io.StringIO(download.value.path().read_text())))
        assert row["p_value"] == "nan" and row["is_ood"] == "False"


def test_one_calibration_image_leaves_one_level(visit, run, files):
    predictor = load_predictor(run)
    predictor.calibration = Calibration(predictor.calibration.scores[:1], np.zeros(1, dtype=int), 10)
    with served(run, predictor.decide()) as address:
        page = visit(address)
        drop(page, {"noise.png": files["noise.png"]})
        assert verdicts(page) == {"noise.png": "in"}
        assert page.locator("#ticks span").all_text_contents() == ["0.5"]
        for level, verdict, place in ((0.05, "in", "0"), (0.5, "out", "1")):
            set_level(page, level)
            assert verdicts(page) == {"noise.png": verdict}
            assert page.evaluate("document.querySelector('#level').style.getPropertyValue('--level')") == place
        assert "NaN" not in page.content()


def test_with_a_key_and_confidence(visit, run, files):
    """Without the key nothing; with it everything, exemplars too. The run's own thresholds decide until one moves."""
    predictor = load_predictor(run).decide(false_alarm=0.2, confidence=0.999)
    with served(run, predictor, api_key=KEY) as address:
        said = ask(address, files, KEY)
        assert by_service(files, said) != by_p_value(files, said, 0.2), "choose images that tell the rules apart"
        page = visit(address, refusals=True, ready=False)
        for key in ("wrong", KEY):
            page.wait_for_selector("#key-form:visible")
            page.fill("#key", key)
            page.keyboard.press("Enter")
        page.wait_for_selector("#choose:enabled")
        drop(page, files)
        wait_until(page, "() => document.querySelector('.strip img').naturalWidth > 0")
        assert verdicts(page) == by_service(files, said)
        assert "99.9 % confidence" in page.text_content("#promise") and "until the level is moved" in page.text_content(
            "#promise"
        )
        set_level(page, 0.2)
        assert verdicts(page) == by_p_value(files, said, 0.2)
        assert "99.9 % confidence of the run’s own threshold is not kept" in page.text_content("#promise")
        page.reload()  # the key is remembered for the session
        page.wait_for_selector("#choose:enabled")
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]


# --- for everybody ---------------------------------------------------------------------------------------------------


def press_until(page: Any, selector: str, key: str = "Tab", most: int = 60) -> None:
    """Press a key until an element has the focus, and the focus can be seen."""
    for _ in range(most):
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press(key)
    pytest.fail(f"no way to {selector} by the keyboard")


def test_by_keyboard_alone(visit, address, files, said):
    page = visit(address)
    page.on("filechooser", lambda chooser: None)  # from the beginning: the browser opens no window of its own
    press_until(page, "#choose")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    with page.expect_event("filechooser") as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(payload(files))
    wait_for_answers(page)
    press_until(page, "#level")
    page.keyboard.press("End")
    assert verdicts(page) == by_p_value(files, said, 0.5)
    press_until(page, ".marker")
    for key, number in (("Home", 1), ("ArrowRight", 2), ("End", 12), ("ArrowRight", 1), ("ArrowLeft", 12)):
        page.keyboard.press(key)
        focused = page.evaluate("document.activeElement.querySelector('text').textContent")
        assert focused == marker_numbers(page)[number - 1]
    page.keyboard.press("Enter")
    assert page.locator(".card.selected .number").text_content() == focused
    press_until(page, "#sort")
    page.keyboard.press("ArrowDown")
    press_until(page, "#only-out")
    page.keyboard.press("Space")
    assert set(names(page)) == {name for name, out in by_p_value(files, said, 0.5).items() if out == "out"}
    press_until(page, "#download")
    with page.expect_download():
        page.keyboard.press("Enter")
    press_until(page, ".card .number")
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"


def marker_numbers(page: Any) -> list[str]:
    return page.locator("[role=button].marker text").all_text_contents()


def test_focus_survives_sorting(page):
    page.locator(".card .number").first.focus()
    page.evaluate(
        """() => {
            document.querySelector("#sort").value = "p_value";
            document.querySelector("#sort").dispatchEvent(new Event("change"));
        }"""
    )
    assert page.evaluate("document.activeElement.textContent") == "1"


CONTRASTS = """() => {
    const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const known = new Map();
    const luminance = (colours) => {  // of one colour over the other, the first at the bottom
        const key = colours.join();
        if (!known.has(key)) {
            for (const colour of colours) { pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1); }
            const rgb = [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255);
            const [r, g, b] = rgb.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            known.set(key, 0.2126 * r + 0.7152 * g + 0.0722 * b);
        }
        return known.get(key);
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
        const element = text.parentElement;
        const isSeen = text.data.trim() && element.checkVisibility() && element.getClientRects().length;
        if (!isSeen || element.closest(":disabled, svg, option, noscript, .hidden")) continue;
        const behind = ["white"];
        for (let node = element; node; node = node.parentElement) {
            behind.splice(1, 0, getComputedStyle(node).backgroundColor);
        }
        const back = luminance(behind);
        const front = luminance([...behind, getComputedStyle(element).color]);
        const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
        found.push([ratio, text.data.trim().slice(0, 30)]);
    }
    return found;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_enough_contrast(page, theme, tmp_path):
    page.emulate_media(color_scheme=theme)
    wait_until(page, "theme => document.documentElement.dataset.theme === theme", theme)
    page.locator(".card .number").first.click()
    page.screenshot(path=tmp_path / f"{theme}.png")
    assert len(Image.open(tmp_path / f"{theme}.png").convert("RGB").getcolors(2**24)) > 100
    ratios = page.evaluate(CONTRASTS)
    assert len(ratios) > 100
    assert [text for ratio, text in ratios if ratio < 4.5] == []  # WCAG 2.2, level AA


def test_the_theme_is_remembered(empty_page):
    page = empty_page
    page.emulate_media(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("#theme")
    dark = page.evaluate(background)
    page.reload()
    page.wait_for_selector("#choose:enabled")
    assert page.evaluate(background) == dark != light
    assert page.get_attribute("#theme", "aria-pressed") == "true"
    page.click("#theme")
    assert page.evaluate(background) == light and page.evaluate("localStorage.length") == 0  # follows the system again


def test_nothing_is_wider_than_the_window(empty_page, files):
    page = empty_page
    drop(page, {"digit-0.png": files["digit-0.png"], "a-name-that-is-much-too-long-" * 8 + ".png": files["noise.png"]})
    for width in (360, 390, 600, 768, 950, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [420, 1400, 1920])
def test_names_of_40_letters_are_told_apart_and_break_between_words(visit, run, files, width):
    predictor = load_predictor(run)
    predictor.class_names = tuple(f"copepod_calanoid_with_eggs_lateral_no_{i:02d}" for i in range(10))
    with served(run, predictor) as address:
        page = visit(address, viewport={"width": width, "height": 900})
        drop(page, {f"station_17_haul_0042_of_the_slide_{name}": image for name, image in files.items()})
        drawn = page.locator("#map .label").evaluate_all(INSIDE)
        cards = page.locator(".card h3")
        words = read_until(page, lambda: cards.evaluate_all(LINES), break_after_words)  # with their pictures
        page.evaluate("document.querySelectorAll('.card details').forEach((each) => { each.open = true; })")
        for selector, count in ((".card .file", 1), (".facts dt", 5), (".facts dd", 5)):
            lines = page.locator(selector).evaluate_all(LINES)
            assert len(lines) >= count * len(files) and break_after_words(lines), selector
        page.close()  # before the service: it may still be fetching pictures
    assert len({text for text, _ in drawn}) == len(drawn) > 1
    assert all(is_inside for _, is_inside in drawn)
    assert {"".join(lines) for lines in words} <= set(predictor.class_names)
    assert break_after_words(words), words


def break_after_words(names: list[list[str]]) -> bool:
    return all(line.endswith(("_", " ", "-", ".")) for lines in names for line in lines[:-1])


def test_labels_of_the_map_move_off_the_markers_and_back(visit, run, files):
    predictor = load_predictor(run)
    predictor.class_names = tuple(f"copepod_calanoid_with_eggs_lateral_no_{i:02d}" for i in range(10))
    with served(run, predictor) as address:
        page = visit(address)
        shown = page.locator("#map")
        boxes = shown.evaluate(BOXES)
        drop(page, files)
        read_until(page, lambda: shown.evaluate(BOXES), lambda found: found != boxes)
        moved = page.locator("#map .label").evaluate_all(INSIDE)
        stayed, covered = (shown.evaluate(COVERED, each) for each in (boxes, None))
        page.click("#clear")
        assert read_until(page, lambda: shown.evaluate(BOXES), lambda found: found == boxes) == boxes
        page.close()
    assert len(covered) < len(stayed), (covered, stayed)
    assert len(moved) > 5 and all(is_inside for _, is_inside in moved)


INSIDE = """(labels) => labels.map((label) => {
    const own = label.getBoundingClientRect();
    const map = label.ownerSVGElement.getBoundingClientRect();
    return [label.textContent, own.left >= map.left && own.right <= map.right];
})"""
BOXES = """(map) => [...map.querySelectorAll(".label")].map((label) => {
    const { x, y, width, height } = label.getBBox();
    return [label.textContent, { x, y, width, height }];
})"""
COVERED = f"""(map, boxes) => {{
    const labels = boxes ?? ({BOXES})(map);
    const markers = [...map.querySelectorAll("[role=button].marker:not(.away)")].map((marker) =>
        marker.getAttribute("transform").match(/-?[\\d.]+/g).map(Number));
    return labels.filter(([, {{ x, y, width, height }}]) => markers.some(([cx, cy]) =>
        cx + 7 > x && cx - 7 < x + width && cy + 7 > y + 2 && cy - 7 < y + height - 2)).map(([name]) => name);
}}"""
LINES = """(titles) => titles.map((title) => {
    const lines = []; // [top, text]; the parts of a line may differ by fractions of a pixel
    for (const node of title.childNodes) {
        for (let i = 0; i < (node.data?.length ?? 0); i++) {
            const range = document.createRange();
            range.setStart(node, i);
            range.setEnd(node, i + 1);
            const top = range.getBoundingClientRect().top;
            const line = lines.find((other) => Math.abs(other[0] - top) < 4);
            if (line) line[1] += node.data[i];
            else lines.push([top, node.data[i]]);
        }
    }
    return lines.map((line) => line[1]);
})"""


def test_less_motion_where_it_is_asked_for(page):
    moving = """() => [...document.querySelectorAll("*")].filter((node) => {
        const style = getComputedStyle(node);
        return style.animationName !== "none" || style.transitionDuration !== "0s";
    }).length"""
    page.evaluate("document.querySelector('.card').dataset.state = 'sent'")
    assert page.evaluate(moving) == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(moving) == 1  # the picture of an image under way
    page.emulate_media(reduced_motion="reduce")
    page.evaluate("document.querySelector('.card').dataset.state = 'said'")


# --- the description of the API --------------------------------------------------------------------------------------


def test_the_api_is_described_without_help_from_elsewhere(visit, run):
    """With a key, the description is behind it; the lines for curl are those of the service itself."""
    with served(run, load_predictor(run), api_key=KEY) as address:
        page = visit(address, refusals=True, ready=False)
        page.click("text=API")
        page.wait_for_selector("#key-form:visible")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#api section")
        described = httpx2.get(f"{address}openapi.json", headers={"X-API-Key": KEY}).json()
        assert page.locator("h2 code").all_text_contents() == list(described["paths"])
        commands = page.locator("pre").all_text_contents()
        for how in ("-F files=@a.png", "--data-binary @a.png", "-H 'Content-Type: application/json'"):
            assert f"curl -H 'X-API-Key: KEY' {how}" in commands[0]
        assert f"{address}v1/predict" in commands[0]
        for link in page.locator("#api a").all():
            assert page.locator(link.get_attribute("href")).count() == 1
        for width, theme in ((420, "light"), (1400, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=theme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            wait_until(page, "theme => document.documentElement.dataset.theme === theme", theme)
            ratios = page.evaluate(CONTRASTS)
            assert len(ratios) > 100 and [text for ratio, text in ratios if ratio < 4.5] == []


# --- the files -------------------------------------------------------------------------------------------------------


def test_static_files_name_nothing_outside_and_parse_no_markup():
    sources = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
    assert {"index.html", "app.js", "app.css"} <= set(sources)
    for name, text in sources.items():
        outside = set(re.findall(r"https?://[^\"' )]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside, f"{name} names {outside}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
    for page in ("index.html", "docs.html"):
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", sources[page])


def test_columns_are_those_of_the_prediction_files():
    text = (STATIC / "format.js").read_text(encoding="utf-8")
    block = re.search(r"COLUMNS = \[(.*?)\]", text, re.DOTALL).group(1)
    assert tuple(re.findall(r'"(\w+)"', block)) == (*PREDICTION_COLUMNS, "false_alarm")
