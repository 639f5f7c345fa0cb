"""Joining a Ray: what is checked first, and what is said of a failure."""

import socket
import threading
from contextlib import suppress

import pytest

from flowrl.errors import RunError, SettingError
from flowrl.runtime.joining import (
    check_address,
    place_to_join,
    saved_init,
    unreachable,
    with_way_out,
)


@pytest.fixture
def server():
    """Starts a server that answers each client with some bytes; returns its address."""
    listening = []

    def answers(reply):
        listener = socket.create_server(("127.0.0.1", 0))
        listening.append(listener)

        def serve():
            # The client, or the test, may have ended before.
            with suppress(OSError), listener.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield answers
    for listener in listening:
        listener.close()


def test_addresses_are_checked():
    for right in ("10.0.0.5:6379", "head-1.example:6379", "[::1]:6379", "auto", "local"):
        check_address(right)
    for wrong in ("head", ":6379", "head:0", "head:70000", "head:x", "http://head:6379", "", 6379):
        with pytest.raises(SettingError, match=r"address must be HOST:PORT of the head of a Ray"):
            check_address(wrong)
    with pytest.raises(SettingError, match=r"got 'ray://head:10001', for flowrl has to run on a"):
        check_address("ray://head:10001")


def test_what_does_not_answer_as_ray_does_is_found_at_once(server):
    settings_frame = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    assert unreachable(server(settings_frame)) is None
    for reply in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""):
        assert unreachable(server(reply)).startswith("what listens there is not Ray; check that")
    assert unreachable("127.0.0.1:1").startswith("nobody listens there (Connection refused); check")
    assert unreachable("no.such.machine.invalid:6379").startswith("no machine of the name no.such.")
    assert unreachable("auto") is None


def test_one_that_never_answers_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("flowrl.runtime.joining.ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert unreachable(f"127.0.0.1:{port}").startswith("there was no answer in 0.1 seconds; ch")


def test_encrypted_answers_are_left_to_ray(server, monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert unreachable(server(b"any")) is None


def test_the_environment_names_the_ray_where_nothing_else_does():
    assert place_to_join(None, {}, "ppo") == "local"
    assert place_to_join(None, {"RAY_ADDRESS": "auto", "RAY_AUTH_MODE": "TOKEN"}, "ppo") == "auto"
    assert place_to_join("local", {"RAY_ADDRESS": "127.0.0.1:1"}, "ppo") == "local"
    with pytest.raises(RunError, match=r"^ppo: Ray could not be joined at 127\.0\.0\.1:1: nobody"):
        place_to_join(None, {"RAY_ADDRESS": "127.0.0.1:1"}, "ppo")
    with pytest.raises(SettingError, match="RAY_ADDRESS must be HOST:PORT of .*, got 'head'"):
        place_to_join(None, {"RAY_ADDRESS": "head"}, "ppo")
    with pytest.raises(SettingError, match="RAY_AUTH_MODE must be token or disabled, got 'tokn'"):
        place_to_join(None, {"RAY_AUTH_MODE": "tokn"}, "ppo")


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("RPC error: InvalidAuthToken: Authentication token is missing", "RAY_AUTH_TOKEN_PATH"),
        (
            "RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty: /nonexist",
            "or unset it, so that Ray reads ~/.ray/auth_token",
        ),
        ("Version mismatch: The cluster was started with:", "install on every node what the head"),
        (
            "This node has an IP address of 10.0.0.7, and Ray expects",
            "start flowrl on a machine of",
        ),
        ("Failed to connect to Ray cluster at 10.0.0.5:6379", "check that `ray start --head` runs"),
    ],
)
def test_a_known_fault_comes_with_the_way_out(text, way):
    assert with_way_out(text).startswith(f"{text}; ") and way in with_way_out(text)


def test_any_other_fault_stays_as_it_is():
    assert with_way_out("Something else.") == "Something else."


def test_a_saved_run_notes_the_folder_that_is_copied_and_no_secret():
    folder = {"runtime_env": {"working_dir": ".", "env_vars": {"KEY": "secret"}}, "log": 1}
    assert saved_init(folder) == {"runtime_env": {"working_dir": "."}}
    for other in ({}, {"_redis_password": "x"}, {"runtime_env": {"working_dir": "s3://key@x"}}):
        assert saved_init(other) == {}
