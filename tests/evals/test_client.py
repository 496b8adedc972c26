"""One request at a time against a server that follows a script, and the journal that keeps what came of it."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import pytest

from pipeline.evals.client import Transport
from pipeline.evals.journal import Journal, failed

GOOD = {"choices": [{"text": " 123 ", "finish_reason": "stop"}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


class Scripted(BaseHTTPRequestHandler):
    """Answers POSTs with the next (status, body) of the script; GET /health is always well."""

    def do_GET(self):
        self._send(200, b"")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body, *headers = self.server.script.pop(0)
        self._send(status, body if isinstance(body, bytes) else json.dumps(body).encode(), dict(headers))

    def _send(self, status, data, headers={}):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def ask(tmp_path):
    """``ask(script, retries)`` sends one request and returns its record and what is left of the script."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    journal = Journal(tmp_path / "journal", "run")

    def once(script, retries=2):
        server.script = list(script)

        async def send():
            transport = Transport(url, journal, deadline_s=5, retries=retries, failures_in_a_row=99, concurrency=1)
            async with aiohttp.ClientSession() as session:
                return await transport.ask(session, f"{url}/v1/completions", {}, {"prompt": [[1]]}, "h", 1)

        return asyncio.run(send()), server.script

    yield once
    journal.close(finished=True)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("script", [[(500, b"x"), (200, GOOD)], [(429, b""), (503, b""), (200, GOOD)]])
def test_a_server_that_stumbles_is_asked_again(ask, script):
    record, left = ask(script)
    assert record.failure is None and record.text == " 123 " and record.attempts == len(script) and not left
    assert (record.server_prompt_tokens, record.completion_tokens, record.finish_reason) == (7, 2, "stop")


def test_a_server_that_asks_to_wait_is_waited_for(ask, monkeypatch):
    """A proxy or an overloaded server says when: coming back earlier would use up the retries."""
    waited = []
    original = asyncio.sleep
    monkeypatch.setattr("asyncio.sleep", lambda seconds: (waited.append(seconds), original(0))[1])
    script = [(429, b"", ("Retry-After", "7")), (503, b"", ("Retry-After", "900")), (200, GOOD)]
    assert ask(script)[0].attempts == 3
    assert [seconds for seconds in waited if seconds >= 1] == [7.0, 60.0], "as long as asked, and a minute at most"


@pytest.mark.parametrize("reason", [None, "abort", "content_filter", "tool_calls"])
def test_an_answer_that_ended_otherwise_than_whole_or_at_its_limit_is_no_answer(ask, reason):
    """It would be scored as if the model had meant to stop there."""
    record, _ = ask([(200, GOOD | {"choices": [{"text": " 12", "finish_reason": reason}]})])
    assert record.failure == "error" and record.text is None and f"finish_reason {reason!r}" in record.message


def test_an_error_field_that_is_null_is_no_error(ask):
    assert ask([(200, GOOD | {"error": None})])[0].failure is None


def test_a_refused_request_is_not_repeated_and_keeps_the_reason(ask):
    record, left = ask([(400, b"prompt too long"), (200, GOOD)])
    assert record.failure == "error" and "HTTP 400: prompt too long" in record.message and len(left) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "EngineDeadError"}},
        b"<html>",
        {"choices": []},
        {"choices": [{}]},
        [],
        {"choices": [{"text": [1]}]},
    ],
)
def test_what_is_no_completion_is_an_error_not_an_answer(ask, body):
    record, _ = ask([(200, body)])
    assert record.failure == "error" and record.text is None and "not an OpenAI completion" in record.message


def test_a_server_that_is_up_but_never_answers_gives_an_error(ask):
    record, left = ask([(500, b"")] * 5, retries=1)
    assert record.failure == "error" and record.attempts == 2 and len(left) == 3


def test_a_failure_is_tried_again_and_replaced(ask):
    assert ask([(400, b"")])[0].failure == "error"
    assert ask([(200, GOOD)])[0].failure is None
    assert ask([])[0].text == " 123 "  # from the journal: the script is empty


def test_a_journal_survives_torn_lines_and_counts_no_failures(tmp_path):
    path = tmp_path / "journal"

    def reopen():
        return Journal(path, "run")

    journal = reopen()
    for name in ("a", "b"):
        journal.add(failed(name, "error", "x", 0.1, 1))
    journal.add(
        failed("c", "error", "x", 0.1, 1).__class__(
            **journal.records["a"].__dict__ | {"prompt_hash": "c", "failure": None, "message": None, "text": "t"}
        )
    )
    journal.close(finished=False)
    with open(path, "a") as stream:
        stream.write('\xff\n[1]\n{"prompt_hash": "z", "failure": null, "a field of another version": 1}\n')
        stream.write('{"prompt_hash": "torn')
    journal = reopen()
    assert journal.resumed == 1 and set(journal.records) == {"c"}
    good = journal.records["c"]
    journal.add(good.__class__(**good.__dict__ | {"prompt_hash": "d"}))
    journal.close(finished=False)
    journal = reopen()
    assert set(journal.records) == {"c", "d"}  # nothing was glued to the torn line
    journal.close(finished=False)
    other = Journal(path, "another run")
    assert other.resumed == 0 and not other.records
    other.close(finished=True)
    assert not path.exists()
