"""A local stand-in for the Hugging Face Hub, and the HTTP server under it and that of S3.

It speaks what the real client asks of models and datasets: creating repositories and branches,
upload modes, the large file store in one and in several pieces, commits with a parent, info, trees
in pages, paths' info, `resolve` with ranges and redirects of large files to another host name, and
the error codes of missing, private and gated repositories. Every answer is recorded, and faults
are made on demand. What it does not show are the real Hub's limits, delays between its machines,
and scopes of tokens.
"""

import base64
import fnmatch
import hashlib
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

NAME = r"([\w.-]+/[\w.-]+?)"
ATTRIBUTES = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
LARGE_FILES = (".safetensors", ".bin", ".pt")
PAGE = 1_000


class Call(NamedTuple):
    """What a client sends."""

    method: str
    path: str
    query: dict
    headers: Message
    token: str
    body: bytes
    target: str


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: dict = {}


class Request(NamedTuple):
    """What is recorded of a call and its answer; `host` is the name that the client asked for."""

    method: str
    path: str
    status: int
    sent_bytes: int
    has_token: bool
    host: str


class RefusalError(Exception):
    def __init__(self, status, message="", code="", headers=()):
        fields = {"X-Error-Code": code, "X-Error-Message": message, **dict(headers)}
        told = {name: value for name, value in fields.items() if value}
        self.answer = Answer(status, json.dumps({"error": message}).encode(), told)


def json_answer(content, status=200, headers=()):
    described = {"Content-Type": "application/json", **dict(headers)}
    return Answer(status, json.dumps(content).encode(), described)


def ranged_answer(data, call, described):
    """All of the data, or the range that the call asks for."""
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("Range", ""))
    if wanted is None:
        return Answer(200, data, described)
    first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
    if first >= len(data):
        raise RefusalError(416, headers={"Content-Range": f"bytes */{len(data)}"})
    described = {**described, "Content-Range": f"bytes {first}-{last}/{len(data)}"}
    return Answer(206, data[first : last + 1], described)


def cut_to(kept, **headers):
    """An outcome for `HttpServer.fail`: the answer's first bytes, to an index as of a slice.

    Without a Content-Length, no client can see that more was to come.
    """

    def cut(answer):
        body = answer.body[: kept if isinstance(kept, int) else int(len(answer.body) * kept)]
        described = {**answer.headers, "Content-Length": len(body), **headers}
        return answer._replace(body=body, headers=described)

    return lambda: cut


CLOSED = {"Content-Length": None, "Connection": "close"}
# Ways in which a store's answer can end too early: at half and at nothing, announced or not.
CUTS = {
    "half": cut_to(0.5, **CLOSED),
    "half, announced": cut_to(0.5),
    "nothing": cut_to(0, **CLOSED),
    "nothing, announced": cut_to(0),
}


class HttpServer:
    """Answers calls until the `with` block ends; subclasses say how, in `_answer`.

    `requests` are all that were answered; `fail` makes faults. Large files lie at `store_url`.
    """

    def __init__(self):
        self.requests = []
        self._faults, self._lock = [], threading.RLock()
        self._server = _Server(self._serve)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # Another host name, as on the real Hub: a token must not follow a redirect there.
        self.store_url = f"http://localhost:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    def fail(self, method, pattern, *outcomes, **headers):
        """What the next matching requests get, one each.

        An outcome is a status, "drop" (the work is done, and no answer comes), or a function that
        is called before the request is answered as usual. If it returns a function, that one
        changes the answer; a header of None is not sent.
        """
        self._faults.append((method, pattern, list(outcomes), headers))

    def count(self, method, pattern):
        """How many requests there were so far."""
        return sum(r.method == method and bool(re.search(pattern, r.path)) for r in self.requests)

    def _answer(self, call):
        raise NotImplementedError

    def _serve(self, handler):
        call = _read_call(handler)
        outcome, headers = self._outcome(call)
        try:
            if isinstance(outcome, int):
                raise RefusalError(outcome, "a fault was made", headers=headers)
            change = outcome() if callable(outcome) else None
            answer = self._answer(call)
            answer = change(answer) if callable(change) else answer
        except RefusalError as refusal:
            answer = refusal.answer
        body = b"" if call.method == "HEAD" else answer.body
        host = call.headers["Host"].partition(":")[0]
        self.requests.append(
            Request(call.method, call.path, answer.status, len(body), bool(call.token), host)
        )
        if outcome == "drop":
            handler.close_connection = True
            return
        handler.send_response(answer.status)
        for name, value in {"Content-Length": len(answer.body), **answer.headers}.items():
            if value is not None:
                handler.send_header(name, str(value))
        handler.end_headers()
        handler.wfile.write(body)

    def _outcome(self, call):
        with self._lock:
            for method, pattern, outcomes, headers in self._faults:
                if outcomes and method == call.method and re.search(pattern, call.path):
                    return outcomes.pop(0), {k.replace("_", "-"): v for k, v in headers.items()}
        return None, {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet an answer: a second one would wait for the first

    def do_GET(self):
        self.server.serve(self)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def handle_expect_100(self):
        is_expected = super().handle_expect_100()
        self.wfile.flush()  # the client sends no body before
        return is_expected

    def log_message(self, *args):
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, serve):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.serve = serve

    def handle_error(self, *arguments):
        """A client that is killed hears no answer; other errors are this server's own."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*arguments)


def _read_call(handler):
    url = urlsplit(handler.path)
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
    body = _read_body(handler)
    return Call(handler.command, url.path, query, handler.headers, token, body, handler.path)


def _read_body(handler):
    if "chunked" not in handler.headers.get("Transfer-Encoding", ""):
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length)
        if len(body) < length:
            raise ConnectionResetError("the client went in the middle of its request")
        return body
    body = b""
    while length := int(handler.rfile.readline(), 16):
        body += handler.rfile.read(length)
        handler.rfile.readline()
    handler.rfile.readline()
    return body


class File(NamedTuple):
    data: bytes
    is_large: bool = False

    @property
    def digest(self):
        return hashlib.sha256(self.data).hexdigest()

    @property
    def blob(self):
        data = self.digest.encode() if self.is_large else self.data
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """Every commit is a whole tree; every branch a list of commits."""

    name: str
    kind: str = "models"
    readers: set = field(default_factory=set)
    is_private: bool = False
    is_gated: bool = False
    commits: dict = field(default_factory=dict)
    branches: dict = field(default_factory=lambda: {"main": []})
    titles: dict = field(default_factory=dict)
    large: dict = field(default_factory=dict)

    def commit(self, files, title="", branch="main"):
        """Put a commit with exactly these files on a branch, and return its sha."""
        tree = {
            path: file if isinstance(file, File) else File(file, path.endswith(LARGE_FILES))
            for path, file in dict(files).items()
        }
        seed = repr((branch, title, len(self.commits), sorted(tree.items())))
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[sha], self.titles[sha] = tree, title
        self.branches.setdefault(branch, []).append(sha)
        return sha

    def sha_of(self, revision="main"):
        if revision in self.commits:
            return revision
        if revision not in self.branches:
            raise RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.branches[revision][-1]

    def tree(self, revision="main"):
        return self.commits[self.sha_of(revision)]


class HubServer(HttpServer):
    """Serve repositories by name until the `with` block ends.

    `tokens` are those of existing accounts, `kind` that of repositories which are added, and
    `chunk_bytes` cuts uploads; `is_failing` makes every answer a 503.
    """

    def __init__(self, tokens=(), kind="models", chunk_bytes=None):
        super().__init__()
        self.tokens, self.kind, self.chunk_bytes = set(tokens), kind, chunk_bytes
        self.repos, self.uploads, self._pieces = {}, [], {}
        self.is_failing = False

    def add(self, name, files=(), kind=None, **settings):
        """Create a repository, with one commit; return it. Every account reads a dataset."""
        kind = kind or self.kind
        first = {}
        if kind == "datasets":
            first, settings = {".gitattributes": ATTRIBUTES}, {"readers": self.tokens} | settings
        repo = self.repos[name] = Repo(name, kind, **settings)
        repo.commit(first | dict(files), "initial commit")
        return repo

    def _answer(self, call):
        if self.is_failing:
            raise RefusalError(503)
        api = rf"/api/(models|datasets)/{NAME}"
        routes = {
            rf"GET {api}(?:/revision/([^/]+))?": self._info,
            rf"GET {api}/tree/([^/]+)(?:/(.+))?": self._tree,
            rf"POST {api}/paths-info/([^/]+)": self._paths_info,
            rf"POST {api}/preupload/([^/]+)": self._modes,
            rf"POST {api}/commit/([^/]+)": self._commit,
            rf"POST {api}/branch/(.+)": self._branch,
            rf"POST /(?:(datasets)/)?{NAME}\.git/info/lfs/objects/batch": self._batch,
            rf"(?:GET|HEAD) /(?:(datasets)/)?{NAME}/resolve/([^/]+)/(.+)": self._resolve,
        }
        plain_routes = {
            rf"GET /store/{NAME}/(\w+)": self._stored,
            rf"PUT /upload/{NAME}/(\w+)": self._store,
            rf"PUT /piece/{NAME}/(\w+)/(\d+)": self._store_piece,
            rf"POST /complete/{NAME}/(\w+)": self._complete,
            rf"POST /verify/{NAME}": self._verify,
            "POST /api/repos/create": self._create,
            "POST /api/validate-yaml": lambda _: json_answer({"errors": [], "warnings": []}),
        }
        line = f"{call.method} {call.path}"
        is_written = line.startswith("POST /api") and "/paths-info/" not in line
        is_refused = is_written or (call.token and "/datasets/" not in line)
        if call.token not in self.tokens and is_refused:  # reading a dataset: it is not there
            raise RefusalError(401, "Invalid credentials in Authorization header")
        for pattern, view in plain_routes.items():
            if match := re.fullmatch(pattern, line):
                return view(*map(unquote, match.groups()), call)
        for pattern, view in routes.items():
            if match := re.fullmatch(pattern, line):
                kind, name, *rest = match.groups()
                rest = [None if part is None else unquote(part) for part in rest]
                return view(self._repo(kind or "models", name, call.token), *rest, call)
        raise RefusalError(404, f"no such page: {line}")

    def _repo(self, kind, name, token):
        repo = self.repos.get(name)
        if repo and repo.kind == kind and (not repo.is_private or token in repo.readers):
            return repo
        if token in self.tokens:
            raise RefusalError(404, "Repository not found", "RepoNotFound")
        raise RefusalError(401, "Invalid username or password.", "RepoNotFound")

    def _create(self, call):
        asked = json.loads(call.body)
        name, kind = f"{asked['organization']}/{asked['name']}", f"{asked.get('type', 'model')}s"
        url = f"{self.url}/{'datasets/' * (kind == 'datasets')}{name}"
        if name in self.repos:
            return json_answer({"error": "It is there", "url": url}, 409)
        is_private = asked.get("visibility") == "private"
        self.add(name, kind=kind, is_private=is_private, readers=self.tokens)
        return json_answer({"url": url, "name": name})

    def _info(self, repo, revision, call):
        sha = repo.sha_of(revision or "main")
        files = [{"rfilename": path} for path in sorted(repo.commits[sha])]
        described = {"id": repo.name, "sha": sha, "private": repo.is_private}
        return json_answer(described | {"siblings": files})

    def _branch(self, repo, branch, call):
        if branch in repo.branches:
            raise RefusalError(409, "Reference already exists")
        repo.branches[branch] = [repo.sha_of("main")]
        return json_answer({})

    def _modes(self, repo, revision, call):
        tree = repo.tree(revision)
        lines = [
            line.split()
            for line in tree.get(".gitattributes", File(b"")).data.decode().splitlines()
        ]
        patterns = [pattern for pattern, *flags in lines if "filter=lfs" in flags]
        sent, files = json.loads(call.body), []
        ignored = tree.get(".gitignore", File(b"")).data.decode()
        ignored = sent.get("gitIgnore", ignored).split()
        for asked in sent["files"]:
            name = asked["path"].rpartition("/")[2]
            is_large = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
            there = tree.get(asked["path"])
            oid = there and (there.digest if there.is_large else there.blob)
            mode = "lfs" if is_large else "regular"
            is_ignored = any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
            described = {"uploadMode": mode, "shouldIgnore": is_ignored, "oid": oid}
            files.append({"path": asked["path"], **described})
        return json_answer({"files": files})

    def _batch(self, repo, call):
        name, objects = repo.name, []
        for asked in json.loads(call.body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            found = {"oid": oid, "size": size}
            if oid not in repo.large:
                upload = {"href": f"{self.url}/upload/{name}/{oid}", "header": {}}
                if self.chunk_bytes and size > self.chunk_bytes:
                    count = -(-size // self.chunk_bytes)
                    pieces = {
                        str(i): f"{self.url}/piece/{name}/{oid}/{i}" for i in range(1, count + 1)
                    }
                    upload = {
                        "href": f"{self.url}/complete/{name}/{oid}",
                        "header": {"chunk_size": str(self.chunk_bytes), **pieces},
                    }
                verify = {"href": f"{self.url}/verify/{name}", "header": {}}
                found["actions"] = {"upload": upload, "verify": verify}
            objects.append(found)
        return json_answer({"transfer": "basic", "objects": objects})

    def _stored(self, name, oid, call):
        return ranged_answer(self.repos[name].large[oid], call, {"ETag": f'"{oid}"'})

    def _store(self, name, oid, call):
        return self._keep(name, oid, call.body)

    def _keep(self, name, oid, data):
        if hashlib.sha256(data).hexdigest() != oid:
            raise RefusalError(400, "the content has another digest")
        self.repos[name].large[oid] = data
        self.uploads.append(oid)
        return Answer(200)

    def _store_piece(self, name, oid, number, call):
        self._pieces[oid, int(number)] = call.body
        return Answer(200, b"", {"ETag": f'"{hashlib.md5(call.body).hexdigest()}"'})

    def _complete(self, name, oid, call):
        numbers = [part["partNumber"] for part in json.loads(call.body)["parts"]]
        return self._keep(name, oid, b"".join(self._pieces.pop((oid, n)) for n in numbers))

    def _verify(self, name, call):
        asked = json.loads(call.body)
        if len(self.repos[name].large.get(asked["oid"], b"")) != asked["size"]:
            raise RefusalError(404, "no such object")
        return json_answer({})

    def _commit(self, repo, branch, call):
        header, *changes = (json.loads(line) for line in call.body.splitlines())
        with self._lock:
            head, tree = repo.sha_of(branch), dict(repo.tree(branch))
            parent = header["value"].get("parentCommit")
            if parent and parent != head:
                raise RefusalError(
                    412, "A commit has happened since. Please refresh and try again."
                )
            for change in changes:
                self._change(repo, tree, change["key"], change["value"])
            sha = repo.commit(tree, header["value"]["summary"], branch)
        kind = "datasets/" * (repo.kind == "datasets")
        url = f"{self.url}/{kind}{repo.name}/commit/{sha}"
        return json_answer({"commitOid": sha, "commitUrl": url})

    @staticmethod
    def _change(repo, tree, key, value):
        path = value["path"]
        if key == "file":
            tree[path] = File(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if value["oid"] not in repo.large:
                raise RefusalError(
                    400, f"LFS pointer pointed to a file that does not exist: {path}"
                )
            tree[path] = File(repo.large[value["oid"]], is_large=True)
        elif tree.pop(path, None) is None:
            raise RefusalError(404, "A file with this name doesn't exist", "EntryNotFound")

    def _tree(self, repo, revision, folder, call):
        tree, prefix = repo.tree(revision), f"{folder.rstrip('/')}/" if folder else ""
        is_recursive = call.query.get("recursive", "").lower() in ("true", "1")
        found = {}
        for path in sorted(path for path in tree if path.startswith(prefix)):
            steps = path[len(prefix) :].split("/")
            for depth in range(1, len(steps) if is_recursive else min(len(steps), 2)):
                name = prefix + "/".join(steps[:depth])
                found[name] = {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
            if is_recursive or len(steps) == 1:
                found[path] = _entry(path, tree[path])
        if folder and not found:
            raise RefusalError(404, f"{folder} does not exist", "EntryNotFound")
        start, entries = int(call.query.get("cursor", 0)), list(found.values())
        headers = {}
        if start + PAGE < len(entries):
            query = f"recursive={is_recursive}&cursor={start + PAGE}"
            where = f"{self.url}/api/{repo.kind}/{repo.name}/tree/{revision}"
            where += f"/{folder}" if folder else ""
            headers["Link"] = f'<{where}?{query}>; rel="next"'
        return json_answer(entries[start : start + PAGE], headers=headers)

    def _paths_info(self, repo, revision, call):
        tree = repo.tree(revision)
        paths = parse_qs(call.body.decode()).get("paths", [])
        return json_answer([_entry(path, tree[path]) for path in paths if path in tree])

    def _resolve(self, repo, revision, path, call):
        if repo.is_gated and call.token not in repo.readers:
            status = 403 if call.token else 401
            message = f"Access to {repo.kind[:-1]} {repo.name} is restricted."
            raise RefusalError(status, message, "GatedRepo")
        sha = repo.sha_of(revision)
        file = repo.commits[sha].get(path)
        if file is None:
            raise RefusalError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": sha})
        described = {"X-Repo-Commit": sha, "ETag": f'"{file.blob}"', "Accept-Ranges": "bytes"}
        if not file.is_large:
            return ranged_answer(file.data, call, described)
        repo.large[file.digest] = file.data
        where = f"{self.store_url}/store/{repo.name}/{file.digest}"
        described |= {"X-Linked-Etag": f'"{file.digest}"', "X-Linked-Size": len(file.data)}
        return Answer(302, b"", {**described, "Location": f"{where}?signature=secret"})


def _entry(path, file):
    entry = {"type": "file", "path": path, "size": len(file.data), "oid": file.blob}
    if file.is_large:
        entry["lfs"] = {"oid": file.digest, "size": len(file.data), "pointerSize": 130}
    return entry
