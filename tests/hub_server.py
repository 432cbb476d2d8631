"""A local stand-in for the Hugging Face Hub: reading model repositories, and small commits.

It speaks what the real client asks when it resolves, lists and fetches a model: model info, file
tree, `resolve` with redirects of large files to another host name, ranges, and the error codes of
missing, private and gated models. Every answer is recorded, so that tests can count requests and
bytes. One thing no test server shows is the real Hub's rate limits and replication delays.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

NAME = r"([\w.-]+/[\w.-]+)"
LARGE_FILES = (".safetensors", ".bin", ".pt")


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: dict = {}


class Request(NamedTuple):
    method: str
    path: str
    status: int
    sent_bytes: int
    has_token: bool


@dataclass
class Model:
    """One repository: every commit is a whole tree, every branch the name of a commit."""

    readers: set = field(default_factory=set)
    is_private: bool = False
    is_gated: bool = False
    commits: dict = field(default_factory=dict)
    branches: dict = field(default_factory=dict)

    def commit(self, files, branch="main"):
        seed = repr((branch, len(self.commits), sorted(files.items())))
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def sha_of(self, revision):
        return self.branches.get(revision, revision if revision in self.commits else None)


def failure(status, code="", message="", **headers):
    fields = {"X-Error-Code": code, "X-Error-Message": message, **headers}
    body = json.dumps({"error": message}).encode()
    return Answer(status, body, {name: value for name, value in fields.items() if value})


class HubServer:
    """Serve models over HTTP until the `with` block ends.

    `models` maps names to `Model`; `tokens` are the tokens of existing accounts; `is_failing`
    makes every answer a 503.
    """

    def __init__(self, tokens=()):
        self.models = {}
        self.tokens = set(tokens)
        self.requests = []
        self.is_failing = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub._serve(self)

            do_HEAD = do_POST = do_GET  # noqa: N815

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # Another host name, as on the real Hub: a token must not follow a redirect there.
        self.storage_url = f"http://localhost:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    def add(self, name, files, **settings):
        """Create a model with one commit on main and return the commit's sha."""
        self.models[name] = Model(**settings)
        return self.models[name].commit(files)

    def _serve(self, handler):
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        path = urlsplit(handler.path).path
        sent = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if self.is_failing:
            answer = failure(503)
        elif handler.command == "POST":
            answer = self._change(path, token, sent)
        else:
            answer = self._answer(path, token, handler.headers)
        body = b"" if handler.command == "HEAD" else answer.body
        self.requests.append(
            Request(handler.command, path, answer.status, len(body), has_token=bool(token))
        )
        handler.send_response(answer.status)
        for name, value in {"Content-Length": len(answer.body), **answer.headers}.items():
            handler.send_header(name, str(value))
        handler.end_headers()
        handler.wfile.write(body)

    def _answer(self, path, token, headers):
        if match := re.fullmatch(r"/storage/([0-9a-f]{64})", path):
            return self._stored(match[1], headers)
        if token and token not in self.tokens:
            return failure(401, message="Invalid credentials in Authorization header")
        routes = {
            rf"/api/models/{NAME}(?:/revision/([^/]+))?": self._info,
            rf"/api/models/{NAME}/tree/([^/]+)": self._tree,
            rf"/{NAME}/resolve/([^/]+)/(.+)": self._file,
        }
        for pattern, view in routes.items():
            if match := re.fullmatch(pattern, path):
                name, revision, *rest = (unquote(part or "main") for part in match.groups())
                model = self.models.get(name)
                if model is None or (model.is_private and token not in model.readers):
                    return self._hidden(token)
                sha = model.sha_of(revision)
                if sha is None:
                    return failure(404, "RevisionNotFound", f"Invalid rev id: {revision}")
                return view(name, model, sha, token, headers, *rest)
        return failure(404, message=f"no such page: {path}")

    def _change(self, path, token, sent):
        """Create a repository or commit to one; every file travels inside its commit."""
        if token not in self.tokens:
            return failure(401, message="Invalid credentials in Authorization header")
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(sent)
            name = f"{asked['organization']}/{asked['name']}"
            if name not in self.models:
                self.add(name, {})
            return self._json({"url": f"{self.url}/{name}", "name": name})
        match = re.fullmatch(rf"/api/models/{NAME}/(preupload|commit)/([^/]+)", path)
        if match is None or match[1] not in self.models:
            return failure(404, message=f"no such page: {path}")
        if match[2] == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(sent)["files"]
            ]
            return self._json({"files": files})
        changes = [json.loads(line) for line in sent.splitlines()]
        added = {
            change["value"]["path"]: base64.b64decode(change["value"]["content"])
            for change in changes
            if change["key"] == "file"
        }
        model = self.models[match[1]]
        sha = model.commit(model.commits[model.sha_of("main")] | added)
        return self._json({"commitOid": sha, "commitUrl": f"{self.url}/{match[1]}/commit/{sha}"})

    @staticmethod
    def _json(content):
        return Answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    @staticmethod
    def _hidden(token):
        if token:
            return failure(404, "RepoNotFound", "Repository not found")
        return failure(401, "RepoNotFound", "Invalid username or password.")

    def _info(self, name, model, sha, token, headers):
        files = [{"rfilename": path} for path in sorted(model.commits[sha])]
        return self._json({"id": name, "sha": sha, "private": model.is_private, "siblings": files})

    def _tree(self, name, model, sha, token, headers):
        entries = []
        for path, data in sorted(model.commits[sha].items()):
            digest = hashlib.sha256(data).hexdigest()
            entry = {"type": "file", "path": path, "size": len(data), "oid": digest[:40]}
            if path.endswith(LARGE_FILES):
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return self._json(entries)

    def _file(self, name, model, sha, token, headers, path):
        if model.is_gated and token not in model.readers:
            status = 403 if token else 401
            return failure(status, "GatedRepo", f"Access to model {name} is restricted.")
        data = model.commits[sha].get(path)
        if data is None:
            return failure(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
        digest = hashlib.sha256(data).hexdigest()
        described = {"X-Repo-Commit": sha, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if not path.endswith(LARGE_FILES):
            return self._part(data, headers, described)
        described |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": len(data)}
        return Answer(302, b"", described | {"Location": f"{self.storage_url}/storage/{digest}"})

    def _stored(self, digest, headers):
        trees = [tree for model in self.models.values() for tree in model.commits.values()]
        for data in (data for tree in trees for data in tree.values()):
            if hashlib.sha256(data).hexdigest() == digest:
                return self._part(data, headers, {"ETag": f'"{digest}"'})
        return failure(404)

    @staticmethod
    def _part(data, headers, described):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
        if wanted is None:
            return Answer(200, data, described)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return failure(416, **{"Content-Range": f"bytes */{len(data)}"})
        described["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return Answer(206, data[first : last + 1], described)
