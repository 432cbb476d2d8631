"""What the stand-ins for the Hugging Face Hub share: answers over HTTP, and faults on demand."""

import json
import re
import sys
import threading
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit


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
        is called before the request is answered as usual.
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
            if callable(outcome):
                outcome()
            answer = self._answer(call)
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
