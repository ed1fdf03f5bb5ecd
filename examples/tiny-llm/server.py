"""Speaks the OpenAI API around a tiny model: models, chat and completions, whole or streamed.

The model learns corpus.txt when the server starts. The same request with the same seed gets the same answer.
Standard library of Python 3.8.
"""

import argparse
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, islice
from pathlib import Path
from socketserver import TCPServer

from model import NOTE_END, Model

NAME = "tiny-llm"
MAX_BODY_BYTES = 256 * 1024
MAX_TOKENS = 4096
USUAL_TOKENS = 256
AT_ONCE = 16
DRAIN_S = 30


class ApiError(Exception):
    """An error as the API has them: status, message, code, and the parameter that is wrong."""

    def __init__(self, status, message, code=None, param=None, **headers):
        super().__init__(message)
        kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
        self.status, self.headers = status, headers
        self.document = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Answer:
    """The text that the model writes, piece by piece, up to a stop text. `finish` and `tokens` hold when it is over."""

    def __init__(self, characters, stops):
        self.characters, self.stops = characters, stops
        self.finish, self.tokens = "length", 0

    def __iter__(self):
        held, longest = "", max(map(len, self.stops), default=1)
        for character in self.characters:
            self.tokens += 1
            held += character
            at = min((held.find(stop) for stop in self.stops if stop in held), default=None)
            if at is not None:
                self.finish, held = "stop", held[:at]
                break
            if len(held) >= longest:  # what is left could still become a stop text
                yield held[: 1 - longest or None]
                held = held[1 - longest :] if longest > 1 else ""
        if held:
            yield held


class Asked:
    """A request of either kind, checked. ApiError names the first parameter that is wrong."""

    def __init__(self, body, is_chat):
        if body.get("model") != NAME:
            raise ApiError(404, f"the only model here is {NAME}", "model_not_found", "model")
        self.is_chat, self.is_stream = is_chat, flag(body, "stream")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise ApiError(400, "stream_options is an object", param="stream_options")
        self.with_usage = flag(options, "include_usage")
        number(body, "n", 1, 1, 1, whole=True)
        limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        self.limit = number(body, limit, USUAL_TOKENS, 1, MAX_TOKENS, whole=True)
        self.temperature = number(body, "temperature", 1.0, 0, 2)
        self.top_p = number(body, "top_p", 1.0, 0, 1)
        self.seed = number(body, "seed", secrets.randbits(63), -(2**63), 2**63 - 1, whole=True)
        self.stops = stops_of(body.get("stop"))
        self.prompt = chat_text(body.get("messages")) if is_chat else prompt_text(body.get("prompt"))
        self.prompt_tokens = sum(map(len, self.prompt)) if is_chat else len(self.prompt)

    def answer(self, model):
        """A chat's answer begins with words of the note that the last message is closest to, and ends with a note."""
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        if not self.is_chat:
            return Answer(model.go_on(self.prompt, self.limit, **drawn), self.stops)
        opening = model.topic(self.prompt[-1])
        characters = chain(opening, model.go_on(NOTE_END + opening, self.limit, **drawn))
        return Answer(islice(characters, self.limit), [*self.stops, NOTE_END])


def flag(body, name):
    if body.get(name) not in (None, True, False):
        raise ApiError(400, f"{name} is true or false", param=name)
    return bool(body.get(name))


def number(body, name, usual, least, most, whole=False):
    value = body.get(name)
    if value is None:
        return usual
    allowed = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise ApiError(400, f"{name} is {kind} from {least} to {most}", param=name)
    return value


def stops_of(value):
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(s, str) and 0 < len(s) < 100 for s in stops):
        raise ApiError(400, "stop is a text, or a list of up to four", param="stop")
    return stops


def prompt_text(prompt):
    if not isinstance(prompt, str):
        raise ApiError(400, "prompt is a text", param="prompt")
    return prompt


def chat_text(messages):
    """The texts of the messages, in order."""
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is a list of at least one", param="messages")
    texts = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer", "user", "assistant"):
            raise ApiError(400, "a message has a role: system, developer, user or assistant", param="messages")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
            raise ApiError(400, "the content of a message is text", param="messages")
        texts.append("".join(part["text"] for part in parts))
    return texts


class Handler(BaseHTTPRequestHandler):
    server_version, sys_version = NAME, ""
    timeout = 30  # a client that says nothing gives its thread back

    def do_GET(self):
        self.answer(self.get)

    def do_POST(self):
        self.answer(self.post)

    def get(self):
        if self.path == "/health":
            if self.server.is_stopping:
                raise ApiError(503, "the server is about to end")
            return {"status": "ok"}
        self.check_key()
        card = {"id": NAME, "object": "model", "created": self.server.began, "owned_by": "examples"}
        if self.path == "/v1/models":
            return {"object": "list", "data": [card]}
        if self.path == f"/v1/models/{NAME}":
            return card
        raise ApiError(404, "there is no such path")

    def post(self):
        body = self.body()  # first, whatever the answer: closing with unread bytes would take it from the client
        self.check_key()
        kinds = {"/v1/chat/completions": True, "/v1/completions": False}
        if self.path not in kinds:
            raise ApiError(404, "there is no such path")
        if self.server.is_stopping:
            raise ApiError(503, "the server is about to end", retry_after=5)
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is no JSON") from None
        if not isinstance(asked, dict):
            raise ApiError(400, "the body is no JSON object")
        return self.generate(Asked(asked, kinds[self.path]))

    def generate(self, asked):
        if not self.server.places.acquire(blocking=False):
            raise ApiError(429, f"{AT_ONCE} requests are being answered", "rate_limit_exceeded", retry_after=1)
        try:
            answer = asked.answer(self.server.model)
            frame = Frame(asked)
            if asked.is_stream:
                return self.stream(asked, answer, frame)
            text = "".join(self.paced(answer))
            return frame.whole(text, answer)
        finally:
            self.server.places.release()

    def stream(self, asked, answer, frame):
        """Server-sent events: one a piece, the end with its reason, the usage if it was asked for, `[DONE]`."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        for piece in self.paced(answer):
            self.event(frame.piece(piece))
        self.event(frame.piece(None, answer.finish))
        if asked.with_usage:
            self.event(frame.usage(answer))
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, document):
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")

    def paced(self, pieces):
        for piece in pieces:
            yield piece
            if self.server.pause_s:
                time.sleep(self.server.pause_s)

    def check_key(self):
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.key):
            raise ApiError(401, "the API key is missing or wrong", "invalid_api_key", www_authenticate="Bearer")

    def body(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or len(length) > 12:
            raise ApiError(411, "Content-Length is missing")
        if int(length) > MAX_BODY_BYTES:
            self.rfile.read(min(int(length), 4 * MAX_BODY_BYTES))
            raise ApiError(413, f"a body has at most {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def answer(self, handle):
        """Answer with what `handle` returns, or with its error; None: it has answered already."""
        with self.server.busy:
            status, headers = 200, {}
            try:
                document = handle()
            except ApiError as error:
                status, document = error.status, error.document
                headers = {name.replace("_", "-").title(): str(value) for name, value in error.headers.items()}
            if document is None:
                return
            data = json.dumps(document).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, form, *values):
        """One line a request on stderr, without texts and keys, and without anything that moves a terminal."""
        line = f"{time.strftime('%H:%M:%S')} {form % values}\n"
        sys.stderr.write(line.encode("ascii", "backslashreplace").decode().replace("\x1b", "\\x1b"))


class Frame:
    """The documents around an answer, in the words of its kind."""

    def __init__(self, asked):
        self.asked, self.is_first = asked, True
        word = "chatcmpl" if asked.is_chat else "cmpl"
        self.head = {"id": f"{word}-{secrets.token_hex(12)}", "created": int(time.time()), "model": NAME}

    def whole(self, text, answer):
        said = {"message": {"role": "assistant", "content": text}} if self.asked.is_chat else {"text": text}
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": [self.choice(said, answer.finish)], "usage": self.count(answer)}

    def piece(self, text, finish=None):
        if self.asked.is_chat:
            delta = {"role": "assistant"} if self.is_first else {}
            said = {"delta": {**delta, **({} if text is None else {"content": text})}}
        else:
            said = {"text": text or ""}
        self.is_first = False
        return self.chunk([self.choice(said, finish)])

    def usage(self, answer):
        return {**self.chunk([]), "usage": self.count(answer)}

    def chunk(self, choices):
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices}

    def choice(self, said, finish):
        return {"index": 0, **said, "logprobs": None, "finish_reason": finish}

    def count(self, answer):
        given, made = self.asked.prompt_tokens, answer.tokens
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


class Busy:
    """Counts the requests that are being answered, so that an end can wait for them."""

    def __init__(self):
        self.active, self.changed = 0, threading.Condition()

    def __enter__(self):
        self.add(1)

    def __exit__(self, *_):
        self.add(-1)

    def add(self, change):
        with self.changed:
            self.active += change
            self.changed.notify_all()

    def wait_for_none(self, timeout_s):
        with self.changed:
            return self.changed.wait_for(lambda: self.active == 0, timeout_s)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address, model, key, pause_s):
        super().__init__(address, Handler)
        self.model, self.key, self.pause_s = model, key, pause_s
        self.places, self.busy = threading.Semaphore(AT_ONCE), Busy()
        self.began, self.is_stopping = int(time.time()), False

    def server_bind(self):
        """As a plain TCP server: HTTPServer looks up the host's name here, for minutes where no DNS answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def stop(self, *_):
        """Take nothing new, finish what was begun."""
        self.is_stopping = True
        threading.Thread(target=self.shutdown).start()  # it waits for the loop that this signal interrupted

    def handle_error(self, request, client_address):
        if not issubclass(sys.exc_info()[0], (ConnectionError, socket.timeout)):  # the client went away
            super().handle_error(request, client_address)


def main():
    options = argparse.ArgumentParser(description="The OpenAI API of a tiny model. The key comes from TINY_LLM_KEY.")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8700, help="0: any that is free")
    options.add_argument("--pause", type=float, default=0.0, help="seconds after each piece, as a larger model takes")
    chosen = options.parse_args()
    key = os.environ.get("TINY_LLM_KEY", "").encode()
    if not key:
        sys.exit("tiny-llm: set TINY_LLM_KEY to the key that requests have to bring")
    model = Model(Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8"))
    server = Server((chosen.host, chosen.port), model, key, chosen.pause)
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, server.stop)
    host, port = server.server_address[:2]
    print(f"tiny-llm: http://{host}:{port}", flush=True)
    server.serve_forever(poll_interval=0.1)
    is_done = server.busy.wait_for_none(DRAIN_S)
    server.server_close()
    print("tiny-llm: ended" if is_done else "tiny-llm: ended with requests unanswered", flush=True)


if __name__ == "__main__":
    main()
