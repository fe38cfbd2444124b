"""A Hugging Face hub on loopback, as far as reading files of data sets and models goes: listing, sizes, ranges."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
REVISIONS = ("main", COMMIT)


@contextmanager
def hub_server(repositories: dict[str, dict[str, bytes]], token: str | None = None) -> Iterator[str]:
    """Files by path of each repository OWNER/NAME, data set or model, at main; the server's URL, for HF_ENDPOINT."""

    class Hub(_Hub):
        files = repositories
        wants = token

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, dict[str, bytes]]
    wants: str | None

    def do_GET(self) -> None:
        names = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.wants and self.headers.get("Authorization") != f"Bearer {self.wants}":
            return self._answer(401, {"error": "Access to this repository is restricted"}, code="GatedRepo")
        if names[0] == "api" and names[1] in ("datasets", "models"):
            return self._api("/".join(names[2:4]), names[4:])
        names = names[names[0] == "datasets" :]  # a model's files have no such word before them
        if names[2:3] == ["resolve"]:
            return self._resolve("/".join(names[:2]), names[3], "/".join(names[4:]))
        return self._answer(404, {"error": "Not Found"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        names = unquote(urlsplit(self.path).path).strip("/").split("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        entries = self._entries("/".join(names[2:4]), "", recursive=True)
        return self._answer(200, [entry for entry in entries if entry["path"] in paths])

    def _api(self, repository: str, rest: list[str]) -> None:
        if repository not in self.files:
            return self._answer(404, {"error": "Repository not found"}, code="RepoNotFound")
        if rest and rest[1] not in REVISIONS:
            return self._answer(404, {"error": "Invalid rev id"}, code="RevisionNotFound")
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": path} for path in self.files[repository]]
            return self._answer(200, {"id": repository, "sha": COMMIT, "siblings": siblings, "tags": []})
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = self._entries(repository, "/".join(rest[2:]), recursive)
        if not entries:
            return self._answer(404, {"error": "Entry not found"}, code="EntryNotFound")
        return self._answer(200, entries)

    def _entries(self, repository: str, below: str, recursive: bool) -> list[dict[str, object]]:
        prefix = f"{below}/" if below else ""
        entries: dict[str, dict[str, object]] = {}
        for path, content in self.files[repository].items():
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            depths = range(1, len(parts)) if recursive else range(1, min(2, len(parts)))
            for depth in depths:
                folder = prefix + "/".join(parts[:depth])
                entries[folder] = {"type": "directory", "path": folder, "oid": sha1(folder.encode()).hexdigest()}
            if recursive or len(parts) == 1:
                oid = sha1(content).hexdigest()
                entries[path] = {"type": "file", "path": path, "size": len(content), "oid": oid}
        return [entries[path] for path in sorted(entries)]

    def _resolve(self, repository: str, revision: str, path: str) -> None:
        content = self.files.get(repository, {}).get(path)
        if content is None or revision not in REVISIONS:
            return self._answer(404, {"error": "Entry not found"}, code="EntryNotFound")
        headers = {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if (range_header := self.headers.get("Range")) is None:
            return self._send(200, content, headers)
        first, last = range_header.removeprefix("bytes=").split("-")
        piece = content[int(first) : int(last or len(content) - 1) + 1]
        span = f"bytes {first}-{int(first) + len(piece) - 1}/{len(content)}"
        return self._send(206, piece, {**headers, "Content-Range": span})

    def _answer(self, status: int, body: object, code: str | None = None) -> None:
        headers = {"Content-Type": "application/json"} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps(body).encode(), headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests are quiet."""
