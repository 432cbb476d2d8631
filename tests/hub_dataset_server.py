"""A local stand-in for the Hugging Face Hub's dataset repositories: reading, uploading, committing.

It speaks what the real client asks: creating repositories and branches, upload modes, the large
file store in one and in several pieces, commits with a parent, trees in pages, paths' info, and
`resolve` with ranges and redirects of large files to another host name. Faults are made on demand.
What it does not show are the real Hub's limits, delays between its machines, and scopes of tokens.
"""

import base64
import fnmatch
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

from tests.hub_http import Answer, HttpServer, RefusalError, json_answer, ranged_answer

NAME = r"([\w.-]+/[\w.-]+?)"
ATTRIBUTES = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
PAGE = 1_000


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
    is_private: bool = False
    commits: dict = field(default_factory=dict)
    branches: dict = field(default_factory=lambda: {"main": []})
    titles: dict = field(default_factory=dict)
    large: dict = field(default_factory=dict)

    def commit(self, files, title="", branch="main"):
        """Put a commit with exactly these files on a branch."""
        seed = repr((branch, title, len(self.commits), sorted(files)))
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[sha], self.titles[sha] = dict(files), title
        self.branches.setdefault(branch, []).append(sha)
        return sha

    def sha_of(self, revision):
        if revision in self.commits:
            return revision
        if revision not in self.branches:
            raise RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.branches[revision][-1]

    def tree(self, revision="main"):
        return self.commits[self.sha_of(revision)]


class DatasetServer(HttpServer):
    """Serves repositories until the `with` block ends; `chunk_bytes` cuts uploads."""

    def __init__(self, token, chunk_bytes=None):
        super().__init__()
        self.token = token
        self.chunk_bytes = chunk_bytes
        self.repos, self.uploads, self._pieces = {}, [], {}

    def add(self, name, files=(), **settings):
        """Create a repository as the Hub does, with one commit; returns it."""
        repo = self.repos[name] = Repo(name, **settings)
        repo.commit({".gitattributes": File(ATTRIBUTES), **dict(files)}, "initial commit")
        return repo

    def _answer(self, call):
        repo_routes = {
            rf"GET /api/datasets/{NAME}(?:/revision/([^/]+))?": self._info,
            rf"GET /api/datasets/{NAME}/tree/([^/]+)(?:/(.+))?": self._tree,
            rf"POST /api/datasets/{NAME}/paths-info/([^/]+)": self._paths_info,
            rf"POST /api/datasets/{NAME}/preupload/([^/]+)": self._modes,
            rf"POST /api/datasets/{NAME}/commit/([^/]+)": self._commit,
            rf"POST /api/datasets/{NAME}/branch/(.+)": self._branch,
            rf"POST /datasets/{NAME}\.git/info/lfs/objects/batch": self._batch,
            rf"(?:GET|HEAD) /datasets/{NAME}/resolve/([^/]+)/(.+)": self._resolve,
        }
        routes = {
            "POST /api/repos/create": self._create,
            "POST /api/validate-yaml": lambda body: json_answer({"errors": [], "warnings": []}),
            rf"PUT /upload/{NAME}/(\w+)": self._store,
            rf"PUT /piece/{NAME}/(\w+)/(\d+)": self._store_piece,
            rf"POST /complete/{NAME}/(\w+)": self._complete,
            rf"POST /verify/{NAME}": self._verify,
        }
        line = f"{call.method} {call.path}"
        if match := re.fullmatch(rf"GET /store/{NAME}/(\w+)", line):
            return ranged_answer(self.repos[match[1]].large[match[2]], call, {})
        for pattern, view in routes.items():
            if match := re.fullmatch(pattern, line):
                if line.startswith("POST /api") and call.token != self.token:
                    raise RefusalError(401, "Invalid credentials in Authorization header")
                return view(*map(unquote, match.groups()), call.body)
        for pattern, view in repo_routes.items():
            if match := re.fullmatch(pattern, line):
                name, *rest = match.groups()
                is_written = call.method == "POST" and "paths-info" not in line
                repo = self._repo(name, call.token, is_written)
                rest = [None if part is None else unquote(part) for part in rest]
                return view(repo, *rest, call)
        raise RefusalError(404, f"no such page: {line}")

    def _repo(self, name, token, is_written):
        repo = self.repos.get(name)
        if repo is None or (repo.is_private and token != self.token):
            raise RefusalError(404 if token == self.token else 401, "Not found", "RepoNotFound")
        if is_written and token != self.token:
            raise RefusalError(403, "Forbidden: you need to write here")
        return repo

    def _create(self, sent):
        asked = json.loads(sent)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repos:
            return json_answer({"error": "It is there", "url": f"{self.url}/datasets/{name}"}, 409)
        self.add(name, is_private=asked.get("visibility") == "private")
        return json_answer({"url": f"{self.url}/datasets/{name}", "name": name})

    def _info(self, repo, revision, call):
        return json_answer({"id": repo.name, "sha": repo.sha_of(revision or "main")})

    def _branch(self, repo, branch, call):
        if branch in repo.branches:
            raise RefusalError(409, "Reference already exists")
        repo.branches[branch] = [repo.sha_of("main")]
        return json_answer({})

    def _modes(self, repo, revision, call):
        tree = repo.tree(revision)
        lines = [line.split() for line in tree[".gitattributes"].data.decode().splitlines()]
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

    def _store(self, name, oid, data):
        if hashlib.sha256(data).hexdigest() != oid:
            raise RefusalError(400, "the content has another digest")
        self.repos[name].large[oid] = data
        self.uploads.append(oid)
        return Answer(200)

    def _store_piece(self, name, oid, number, data):
        self._pieces[oid, int(number)] = data
        return Answer(200, b"", {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def _complete(self, name, oid, sent):
        numbers = [part["partNumber"] for part in json.loads(sent)["parts"]]
        return self._store(name, oid, b"".join(self._pieces.pop((oid, n)) for n in numbers))

    def _verify(self, name, sent):
        asked = json.loads(sent)
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
        url = f"{self.url}/datasets/{repo.name}/commit/{sha}"
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
            where = f"{self.url}/api/datasets/{repo.name}/tree/{revision}"
            where += f"/{folder}" if folder else ""
            headers["Link"] = f'<{where}?{query}>; rel="next"'
        return json_answer(entries[start : start + PAGE], headers=headers)

    def _paths_info(self, repo, revision, call):
        tree = repo.tree(revision)
        paths = parse_qs(call.body.decode()).get("paths", [])
        return json_answer([_entry(path, tree[path]) for path in paths if path in tree])

    def _resolve(self, repo, revision, path, call):
        sha = repo.sha_of(revision)
        file = repo.commits[sha].get(path)
        if file is None:
            raise RefusalError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": sha})
        described = {"X-Repo-Commit": sha, "ETag": f'"{file.blob}"'}
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
