"""An HTTP server that makes pictures: POST /generate, GET /health, GET /metrics. Standard library of Python 3.8.

It behaves as a server with one GPU behind it should: so many requests at once, so many waiting, and a quick 503 with
Retry-After for the rest; limits that are checked before any work; one key; a request id that is never worked on twice.
"""

import argparse
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from picture import draw

MAX_BODY_BYTES = 64 * 1024
MAX_PROMPT_CHARACTERS = 1000
SIDE = range(16, 513)
STEPS = range(1, 9)
SEED = range(0, 2**32)
DEFAULTS = {"seed": 0, "width": 128, "height": 128, "steps": 4}
REMEMBERED = 64  # results by request id
DRAIN_S = 30


class Refusal(Exception):
    """An answer other than a picture: status, a code for programs, a sentence for people."""

    def __init__(self, status, code, message, **headers):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


class Studio:
    """Makes pictures, `workers` at a time, with at most `queue` requests waiting."""

    def __init__(self, workers, queue, step_seconds):
        self.room, self.step_seconds = workers + queue, step_seconds
        self.places = threading.Semaphore(workers)
        self.lock = threading.Lock()
        self.inside = self.working = 0
        self.counts = {"requests": 0, "pictures": 0, "refused": 0, "shed": 0}
        self.durations_s = deque(maxlen=512)
        self.known = OrderedDict()  # request id -> (order, Event, [picture])
        self.began = time.monotonic()

    def picture(self, order, request_id=None):
        """The picture of an order. The same request id again waits for the first one's picture and gets that."""
        if request_id is None:
            return self.make(order)
        with self.lock:
            theirs, done, made = self.known.get(request_id) or (None, None, None)
            if theirs is None:
                self.known[request_id] = order, threading.Event(), []
                while len(self.known) > REMEMBERED:
                    self.known.popitem(last=False)
        if theirs is None:
            return self.make_once(order, request_id)
        if theirs != order:
            raise Refusal(409, "id_reused", "this Idempotency-Key was given with another order")
        done.wait(DRAIN_S)
        if not made:
            raise Refusal(503, "busy", "the first request with this Idempotency-Key has no picture", retry_after=1)
        return made[0]

    def make_once(self, order, request_id):
        _, done, made = self.known[request_id]
        try:
            made.append(self.make(order))
            return made[0]
        except BaseException:
            with self.lock:
                self.known.pop(request_id, None)  # it may be tried again
            raise
        finally:
            done.set()

    def make(self, order):
        began = time.monotonic()
        with self.lock:
            if self.inside >= self.room:
                self.counts["shed"] += 1
                raise Refusal(503, "busy", "the queue is full", retry_after=self.wait_s())
            self.inside += 1
        try:
            with self.places:
                with self.lock:
                    self.working += 1
                try:
                    result = draw(**order)
                    time.sleep(self.step_seconds * order["steps"])
                finally:
                    with self.lock:
                        self.working -= 1
            with self.lock:
                self.counts["pictures"] += 1
                self.durations_s.append(time.monotonic() - began)
            return result
        finally:
            with self.lock:
                self.inside -= 1

    def wait_s(self):
        """When there will be room: the usual time of one picture, in whole seconds. The lock is held."""
        return max(1, round(quantile(self.durations_s, 0.5) or 0))

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def metrics(self):
        with self.lock:
            return {
                **self.counts,
                "working": self.working,
                "waiting": self.inside - self.working,
                "room": self.room,
                "p50_s": quantile(self.durations_s, 0.5),
                "p95_s": quantile(self.durations_s, 0.95),
                "up_s": round(time.monotonic() - self.began, 3),
            }


def quantile(values, share):
    """The smallest value that at least this share does not exceed; None without values."""
    ordered = sorted(values)
    return round(ordered[max(0, -int(-share * len(ordered) // 1) - 1)], 6) if ordered else None


def order_of(body):
    """What a body asks for, defaults filled in. Refusal names the first field that is wrong."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "not_json", "the body is no JSON") from None
    if not isinstance(asked, dict):
        raise Refusal(400, "not_an_object", "the body is no JSON object")
    order = {**DEFAULTS, **asked}
    if unknown := sorted(set(order) - {"prompt", *DEFAULTS}):
        raise Refusal(400, "unknown_field", f"there is no field {unknown[0][:80]!r}")
    prompt = order.get("prompt")
    if not isinstance(prompt, str) or not 0 < len(prompt) <= MAX_PROMPT_CHARACTERS:
        raise Refusal(422, "prompt", f"prompt is a text of 1 to {MAX_PROMPT_CHARACTERS} characters")
    for name, allowed in (("width", SIDE), ("height", SIDE), ("steps", STEPS), ("seed", SEED)):
        if type(order[name]) is not int or order[name] not in allowed:
            raise Refusal(422, name, f"{name} is a whole number from {allowed[0]} to {allowed[-1]}")
    return order


class Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "image-server", ""
    timeout = 30  # a client that says nothing gives its thread back

    def do_GET(self):
        self.answer(self.get)

    def do_POST(self):
        self.answer(self.post)

    def get(self):
        if self.path == "/health":
            is_up = not self.server.is_stopping
            return (200 if is_up else 503), {"status": "ready" if is_up else "stopping"}
        self.check_key()
        if self.path == "/metrics":
            return 200, self.server.studio.metrics()
        raise Refusal(404, "not_found", "there are /generate, /health and /metrics")

    def post(self):
        self.server.studio.count("requests")
        body = self.body()  # first, whatever the answer: closing with unread bytes would take it from the client
        self.check_key()
        if self.path != "/generate":
            raise Refusal(404, "not_found", "there are /generate, /health and /metrics")
        if self.server.is_stopping:
            raise Refusal(503, "stopping", "the server is about to end", retry_after=5)
        return 200, self.server.studio.picture(order_of(body), self.headers.get("Idempotency-Key"))

    def check_key(self):
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.key):
            raise Refusal(
                401, "unauthorized", "Authorization: Bearer KEY is missing or wrong", www_authenticate="Bearer"
            )

    def body(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or len(length) > 12:
            raise Refusal(411, "length_required", "Content-Length is missing")
        if int(length) > MAX_BODY_BYTES:
            self.rfile.read(min(int(length), 16 * MAX_BODY_BYTES))
            raise Refusal(413, "too_large", f"a body has at most {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def answer(self, handle):
        headers = {}
        with self.server.busy():
            try:
                status, content = handle()
            except Refusal as no:
                if no.status != 503:
                    self.server.studio.count("refused")
                status, content = no.status, {"error": {"code": no.code, "message": str(no)}}
                headers = {name.replace("_", "-").title(): str(value) for name, value in no.headers.items()}
            is_picture = isinstance(content, bytes)
            data = content if is_picture else (json.dumps(content) + "\n").encode()
            self.send_response(status)
            self.send_header("Content-Type", "image/png" if is_picture else "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, form, *values):
        """One line a request on stderr. It has no prompt in it, and nothing that moves a terminal."""
        line = f"{time.strftime('%H:%M:%S')} {form % values}\n"
        sys.stderr.write(line.encode("ascii", "backslashreplace").decode().replace("\x1b", "\\x1b"))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address, studio, key):
        super().__init__(address, Handler)
        self.studio, self.key = studio, key
        self.is_stopping = False
        self.active = 0
        self.quiet = threading.Condition()

    def busy(self):
        return Counted(self)

    def server_bind(self):
        """As a plain TCP server: HTTPServer looks up the host's name here, for minutes where no DNS answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def stop(self, *_):
        """Take nothing new, finish what was begun."""
        self.is_stopping = True
        threading.Thread(target=self.shutdown).start()  # it waits for the loop that this signal interrupted

    def drain(self, timeout_s):
        with self.quiet:
            return self.quiet.wait_for(lambda: self.active == 0, timeout_s)

    def handle_error(self, request, client_address):
        kind = sys.exc_info()[0]
        if not issubclass(kind, (ConnectionError, socket.timeout)):  # the client went away
            super().handle_error(request, client_address)


class Counted:
    """A request that `drain` waits for, until its answer is written."""

    def __init__(self, server):
        self.server = server

    def __enter__(self):
        with self.server.quiet:
            self.server.active += 1

    def __exit__(self, *_):
        with self.server.quiet:
            self.server.active -= 1
            self.server.quiet.notify_all()


def main():
    options = argparse.ArgumentParser(description="Makes pictures. The key comes from IMAGE_SERVER_KEY.")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8600, help="0: any that is free")
    options.add_argument("--workers", type=int, default=1, help="pictures at once")
    options.add_argument("--queue", type=int, default=4, help="requests that may wait")
    options.add_argument("--step-seconds", type=float, default=0.0, help="wait so long a step, as a model would")
    chosen = options.parse_args()
    key = os.environ.get("IMAGE_SERVER_KEY", "").encode()
    if not key:
        sys.exit("image-server: set IMAGE_SERVER_KEY to the key that requests have to bring")
    server = Server((chosen.host, chosen.port), Studio(chosen.workers, chosen.queue, chosen.step_seconds), key)
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, server.stop)
    host, port = server.server_address[:2]
    print(f"image-server: http://{host}:{port}", flush=True)
    server.serve_forever(poll_interval=0.1)
    is_done = server.drain(DRAIN_S)
    server.server_close()
    print("image-server: ended" if is_done else "image-server: ended with requests unanswered", flush=True)


if __name__ == "__main__":
    main()
