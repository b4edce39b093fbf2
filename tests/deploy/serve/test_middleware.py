"""Middleware: security headers, counts by route, and the rest of refused bodies."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

import pytest

from serving import as_form, http_bytes, serve, server, talk


def test_browsers_are_told_to_be_careful(client):
    for path in ("/", "/v1/model", "/nowhere", "/static/nowhere"):
        headers = client.get(path, headers={"Origin": "https://elsewhere.example"}).headers
        assert "default-src 'self'; img-src 'self' blob: data:" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers


def test_a_page_elsewhere_cannot_give_its_name_to_this_machine():
    """DNS rebinding: without a key, a service of this machine answers under no other name."""
    with server(0.0) as (_, port):
        for path, method in (("/v1/model", "GET"), ("/v1/predict", "POST"), ("/", "GET")):
            request = http_bytes(path, method=method)
            for host, refused in (("evil.example", True), ("127.0.0.1.evil.example", True), (f"[::1]:{port}", False)):
                said = talk(port, request.replace(b"localhost", host.encode(), 1))
                assert (b" 421 " in said.split(b"\r\n")[0]) == refused, (path, host)
    with server(0.0, "s3cret") as (_, port):
        assert b" 200 " in talk(port, http_bytes("/", method="GET").replace(b"localhost", b"service.example"))


def test_routes_are_as_many_as_there_are():
    with serve() as client:
        for i in range(5):
            client.get(f"/nowhere/{i}")
            client.get(f"/v1/clusters/{i}/exemplars.png")
        routes = set(re.findall(r'maple_requests_total{route="([^"]*)"', client.get("/metrics").text))
    assert routes == {"other", "/v1/clusters/{cluster}/exemplars.png"}


def test_whoever_sends_too_much_still_hears_why():
    """Clients such as urllib read no answer before all is sent: the connection must last until then."""
    body, kind = as_form(bytes(2**25))
    with server(0.0) as (_, port):
        for path, sent_as, status in (
            ("v1/predict", kind, 413),
            ("v1/predict", "image/png", 413),
            ("healthz", kind, 405),
        ):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", body, {"Content-Type": sent_as})
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=20)
            assert caught.value.code == status and json.load(caught.value)["error"]
