"""A small Hugging Face Hub on this machine: the endpoints that huggingface_hub uses for models, kept in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_test"
Files = dict[str, bytes]


class Hub:
    """Repositories: commits by their id, and the commit of each branch."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}  # by repository and commit
        self.branches: dict[str, dict[str, str]] = {}
        self.private: dict[str, bool] = {}
        self.stored: Files = {}  # large files, by SHA-256
        self.asked: list[str] = []  # method and path of every request
        self.sizes: dict[str, int] = {}  # to lie about, by name
        self.url = ""

    def create(self, repository: str, private: bool = False) -> None:
        if repository not in self.commits:
            self.commits[repository], self.branches[repository] = {}, {}
            self.private[repository] = private
            self.commit(repository, "main", {})

    def commit(self, repository: str, branch: str, files: Files) -> str:
        number = f"{repository} {len(self.commits[repository])}"
        identity = hashlib.sha1(number.encode(), usedforsecurity=False).hexdigest()
        self.commits[repository][identity] = files
        self.branches[repository][branch] = identity
        return identity

    def find(self, repository: str, revision: str) -> tuple[str, Files]:
        """Commit and files of a revision; KeyError if there is none."""
        identity = self.branches[repository].get(revision, revision)
        return identity, self.commits[repository][identity]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.reply({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path.partition("?")[0])
        self.hub.asked.append(f"{self.command} {path}")
        is_free = self.command in ("GET", "HEAD") or path.startswith(("/lfs/", "/verify", "/api/validate-yaml"))
        if not is_free and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "Unauthorized")
        for pattern, answer in ROUTES.items():
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                return answer(self, body, *found.groups())
        return self.refuse(404, "EntryNotFound")

    do_GET = do_POST = do_PUT = do_HEAD = do_any

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repository = f"{asked['organization']}/{asked['name']}"
        self.hub.create(repository, asked.get("visibility") == "private" or bool(asked.get("private")))
        self.reply({"url": f"{self.hub.url}/{repository}", "name": repository, "id": repository})

    def branch(self, body: bytes, repository: str, name: str) -> None:
        main = self.hub.branches[repository]["main"]
        self.hub.branches[repository].setdefault(name, main)
        self.reply({})

    def validate(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        self.reply({"errors": [] if content.startswith("---\n") else [{"message": "no metadata"}], "warnings": []})

    def preupload(self, body: bytes, repository: str, revision: str) -> None:
        large = {each["path"]: each["path"].endswith(".safetensors") for each in json.loads(body)["files"]}
        modes = [{"path": path, "uploadMode": "lfs" if is_large else "regular"} for path, is_large in large.items()]
        self.reply({"files": [{**mode, "shouldIgnore": False} for mode in modes]})

    def batch(self, body: bytes, repository: str) -> None:
        def actions(identity: str) -> dict[str, Any]:
            return {"upload": {"href": f"{self.hub.url}/lfs/{identity}"}, "verify": {"href": f"{self.hub.url}/verify"}}

        objects = json.loads(body)["objects"]
        self.reply({"transfer": "basic", "objects": [{**each, "actions": actions(each["oid"])} for each in objects]})

    def store(self, body: bytes, identity: str) -> None:
        assert hashlib.sha256(body).hexdigest() == identity
        self.hub.stored[identity] = body
        self.reply({})

    def verify(self, body: bytes) -> None:
        self.reply({})

    def commit(self, body: bytes, repository: str, revision: str) -> None:
        files = dict(self.hub.find(repository, revision)[1])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        identity = self.hub.commit(repository, revision, files)
        self.reply({"commitUrl": f"{self.hub.url}/{repository}/commit/{identity}", "commitOid": identity})

    def info(self, body: bytes, repository: str, revision: str | None) -> None:
        if repository not in self.hub.commits:
            return self.refuse(404, "RepoNotFound")
        try:
            identity, files = self.hub.find(repository, revision or "main")
        except KeyError:
            return self.refuse(404, "RevisionNotFound")
        listed = [
            {"rfilename": name, "size": self.hub.sizes.get(name, len(content)), "blobId": name}
            for name, content in files.items()
        ]
        return self.reply({"id": repository, "modelId": repository, "sha": identity, "siblings": listed, "tags": []})

    def resolve(self, body: bytes, repository: str, revision: str, name: str) -> None:
        identity, files = self.hub.find(repository, revision)
        content = files[name]
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": identity, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        self.reply(content, headers=headers)


REPOSITORY = r"([\w.-]+/[\w.-]+)"
ROUTES = {
    r"POST /api/repos/create": Handler.create,
    rf"POST /api/models/{REPOSITORY}/branch/(\S+)": Handler.branch,
    r"POST /api/validate-yaml": Handler.validate,
    rf"POST /api/models/{REPOSITORY}/preupload/(\S+)": Handler.preupload,
    rf"POST /{REPOSITORY}\.git/info/lfs/objects/batch": Handler.batch,
    r"PUT /lfs/(\w+)": Handler.store,
    r"POST /verify": Handler.verify,
    rf"POST /api/models/{REPOSITORY}/commit/(\S+)": Handler.commit,
    rf"GET /api/models/{REPOSITORY}(?:/revision/(\S+))?": Handler.info,
    rf"(?:GET|HEAD) /{REPOSITORY}/resolve/(\w+)/(\S+)": Handler.resolve,
}


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A hub in another thread, at its ``url``."""
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()
