"""The server of the page refuses every request that the page itself would not make."""

import http.client
import json
import logging
import resource
import socket
import time

import pytest

import flowrl as fl
from flowrl.core.profile import Profile
from flowrl.observe.history import Entry
from flowrl.page.guard import POLICY, users_key
from flowrl.page.server import CONNECTIONS, STREAMS, Page, Streams, application
from small_runs import small

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")
PARTS = {
    "name": "main.js", "run": "run", "other": "run", "verb": "pause", "node": "sample",
    "number": "0",
}  # fmt: skip
SERVED = {
    route.path.format(**PARTS): "POST" if "POST" in route.methods else "GET"
    for route in application({}, Streams()).routes
}
"""Of every route that there is, one path that it serves, and its method."""
PATHS = list(SERVED)
PROFILE = Profile(seconds=1.5).plain()


class Counting:
    """A source that only counts how often it is asked."""

    asked = controlled = number = 0
    every = 1.0

    def control(self, verb, node=""):
        self.controlled += 1
        return verb == "pause"

    def item(self, node):
        return {"brief": "a Batch"} if node == "sample" else None

    def summary(self):
        return {"name": "g", "state": "running"}

    def graph(self):
        return small()

    def facts(self):
        return {"graph": {"name": "g"}}

    def entries(self):
        return [Entry(0, 1.5, 64, 2, json.dumps({"profile": PROFILE, "counts": []}))]

    def row(self, number):
        return {"env_steps": 64}

    def since(self, cursor):
        self.asked += 1
        return cursor._replace(rows=self.asked), {
            "state": "running",
            "rows": [{"asked": self.asked}],
        }


@pytest.fixture(scope="module")
def page():
    made = Page()
    made.runs["run"] = Counting()
    yield made
    made.close()


@pytest.fixture(scope="module")
def cookie(page):
    return cookie_of(page)


def ask(page, method="GET", path="/", **headers):
    """The status, the headers and the body of an answer; of a stream its first event."""
    connection = http.client.HTTPConnection(page.host, page.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{page.port}", **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    got = connection.getresponse()
    stream = got.headers.get("content-type", "").startswith("text/event-stream")
    body = got.readline() if stream else got.read()
    connection.close()
    return got.status, got.headers, body.decode()


def cookie_of(page):
    """The cookie that the link gives to a browser."""
    status, headers, _ = ask(page, path=page.link.partition(str(page.port))[2])
    assert status == 303 and headers["location"] == "/"
    found = headers["set-cookie"]
    assert "HttpOnly" in found and "SameSite=strict" in found
    return found.partition(";")[0]


def test_a_link_lets_one_browser_in_and_only_once():
    page = Page()
    page.runs["run"] = Counting()
    link = page.link
    cookie = cookie_of(page)
    status, _, text = ask(page, path=link.partition(str(page.port))[2])
    assert status == 401 and "was used already" in text and "FLOWRL_UI_TOKEN" in text
    assert "no token: open the link" in ask(page)[2]
    assert "flowrl" in ask(page, Cookie=cookie)[2]
    _, _, facts = ask(page, path="/runs/run", Cookie=cookie)
    assert json.loads(facts)["graph"] == {"name": "g"}
    assert json.loads(ask(page, path="/runs", Cookie=cookie)[2]) == [
        {"id": "run", "name": "g", "state": "running"}
    ]
    assert json.loads(ask(page, path="/runs/run/past", Cookie=cookie)[2])[0]["env_steps"] == 64
    moment = json.loads(ask(page, path="/runs/run/past/0", Cookie=cookie)[2])
    assert moment["seconds"] == 1.5 and moment["row"] == {"env_steps": 64}
    event = ask(page, path="/runs/run/stream", Cookie=cookie)[2]
    assert json.loads(event.removeprefix("data: "))["rows"][0]["asked"] >= 1
    page.close()
    with pytest.raises(OSError):
        ask(page)


def test_a_browser_may_look_at_two_pages(page, cookie):
    other = Page()
    # A browser sends the cookies of all ports of a machine.
    both = f"{cookie_of(other)}; {cookie}"
    assert ask(other, Cookie=both)[0] == ask(page, Cookie=both)[0] == 200
    assert ask(other, Cookie=cookie)[0] == 401
    other.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", METHODS)
def test_every_route_refuses_what_the_page_would_not_ask(page, cookie, path, method):
    own = {"Cookie": cookie, "Origin": f"http://127.0.0.1:{page.port}"}
    served = ask(page, method, path, **own)[0]
    assert (served == 200) == (method == SERVED[path]) and served in (200, 404, 405)
    refused = {
        "no token": {},
        "wrong token": {"Cookie": f"{page.guard.cookie}=x"},
        "foreign host": {**own, "Host": "evil.example"},
        "no host of this port": {**own, "Host": "127.0.0.1:1"},
        "foreign origin": {**own, "Origin": "http://evil.example"},
        "an origin that hides": {**own, "Origin": "null"},
        "another site": {**own, "Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:1"},
    }
    before = page.runs["run"].controlled
    for what, headers in refused.items():
        status, _, body = ask(page, method, path, **headers)
        assert status in (401, 403, 405, 421), what
        assert "asked" not in body and "flowrl-page" not in body, what
    assert page.runs["run"].controlled == before


@pytest.mark.parametrize("path", PATHS)
def test_a_page_of_another_site_can_neither_show_nor_read_it(page, cookie, path):
    method, own = SERVED[path], {"Cookie": cookie, "Origin": f"http://127.0.0.1:{page.port}"}
    status, headers, _ = ask(page, method, path, **own)
    assert status == 200 and headers["content-security-policy"] == POLICY
    assert headers["cache-control"] == "no-store" and headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers
    crossed = ask(page, method, path, **own, **{"Sec-Fetch-Site": "cross-site"})[0]
    assert crossed == (200 if path == "/" else 403)


@pytest.mark.parametrize(
    "path",
    [
        "/static/..", "/static/../main.js", "/static/%2e%2e/server.py", "/static/..%2fserver.py",
        "/static/%252e%252e%252fserver.py", "/static//etc/passwd", "/runs/../../etc/passwd",
        "/runs/%2e%2e%2f", "/runs/run/items/%2e%2e",
        "/runs/run/items/../..", "/runs/run/items/", "/runs/run/diff/%2e%2e", "/runs/other",
        "/runs/other/stream", "/nothing", "/static/server.py",
        "/runs/other/past", "/runs/other/past/0", "/runs/run/past/1", "/runs/run/past/-1",
        "/runs/run/past/0x0", "/runs/run/past/0.0", "/runs/run/past/%D9%A0", "/runs/run/past/",
        "/runs/run/past/0/0", f"/runs/run/past/{'9' * 5000}",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_what_is_served(page, cookie, path):
    status, _, body = ask(page, path=path, Cookie=cookie)
    assert status == 404 and "root:" not in body and "import" not in body


def test_what_changes_something_must_name_its_origin(page, cookie):
    before = page.runs["run"].controlled
    assert ask(page, "POST", "/runs/run/pause", Cookie=cookie)[0] == 403
    own = {"Cookie": cookie, "Origin": f"http://127.0.0.1:{page.port}"}
    assert ask(page, "POST", "/runs/run/pause", **own)[0] == 200
    for path in ("/runs/run/__class__", "/runs/run/wait", "/runs/other/pause"):
        assert ask(page, "POST", path, **own)[0] == 404
    assert page.runs["run"].controlled == before + 3


def test_long_headers_end_the_connection(page):
    with pytest.raises((http.client.HTTPException, OSError, AssertionError)):
        assert ask(page, X_Long="x" * 1_000_000)[0] in (200, 401)
    assert ask(page)[0] == 401


def test_a_thousand_idle_connections_are_ended_and_others_served_again(page):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    place = page.host, page.port
    idle = [socket.create_connection(place, timeout=5) for _ in range(1_000)]
    # The run beside it needs files, too.
    assert len(page._server.server_state.connections) <= CONNECTIONS
    for connection in idle:
        connection.close()
    for _ in range(50):
        try:
            assert ask(page)[0] == 401
            break
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
    else:
        pytest.fail("it serves nothing any more")


def test_too_many_pages_at_once_are_refused(page, cookie):
    open_ones = []
    for _ in range(STREAMS):
        connection = socket.create_connection((page.host, page.port), timeout=5)
        connection.sendall(
            f"GET /runs/run/stream HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n"
            f"Cookie: {cookie}\r\n\r\n".encode()
        )
        assert b"200" in connection.recv(4096)
        open_ones.append(connection)
    assert ask(page, path="/runs/run/stream", Cookie=cookie)[0] == 503
    for connection in open_ones:
        connection.close()
    assert ask(page, path="/runs", Cookie=cookie)[0] == 200


def test_the_handlers_of_a_users_logs_stay_open(tmp_path):
    handler = logging.FileHandler(tmp_path / "own.log")
    Page().close()
    assert handler in [ref() for ref in logging._handlerList] and handler.stream is not None
    handler.close()


def test_a_port_in_use_is_an_error_with_the_way_out(page):
    with pytest.raises(
        fl.errors.SettingError, match=f"can't serve a page at .*:{page.port}: .*0 for"
    ):
        Page(port=page.port)


def test_other_machines_need_a_token_which_works_as_often_as_it_is_given(monkeypatch):
    for token in (None, "short", "\u00e4" * 20):
        with pytest.raises(fl.errors.SettingError, match="token"):
            Page("0.0.0.0", 0, token)
    monkeypatch.setenv("FLOWRL_UI_TOKEN", "a token of my own")
    page = Page("0.0.0.0")
    try:
        assert page.link.endswith("?token=a%20token%20of%20my%20own")
        assert page.link.startswith(f"http://{socket.gethostname()}:{page.port}/")
        page.host, path = "127.0.0.1", page.link.partition(str(page.port))[2]
        for _ in range(2):
            assert ask(page, path=path)[0] == 303
        assert ask(page, path="/?token=a token of mine".replace(" ", "%20"))[0] == 401
        assert ask(page, path=path, Host="example.com")[0] == 421
        assert ask(page, path=path, Host=f"{socket.gethostname()}:{page.port}")[0] == 303
    finally:
        page.close()


def test_a_browser_is_known_to_a_server_that_is_started_again():
    first = Page()
    cookie = cookie_of(first)
    assert first.link == f"http://127.0.0.1:{first.port}/", "the token was used"
    first.close()
    second = Page(port=first.port)
    assert ask(second, path="/runs", Cookie=cookie)[0] == 200
    second.close()
    with_token = Page(port=first.port, token="a token of my own")
    assert ask(with_token, path="/runs", Cookie=cookie)[0] == 401
    with_token.close()
    other = Page()
    renamed = cookie.replace(str(first.port), str(other.port))
    assert ask(other, path="/runs", Cookie=renamed)[0] == 401, "a cookie is of one port"
    other.close()


def test_the_key_of_a_users_pages_is_read_by_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key, file = users_key(), tmp_path / "flowrl" / "page.key"
    assert key == users_key() == file.read_bytes() and file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(b"cut")
    assert users_key() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert users_key() is None
