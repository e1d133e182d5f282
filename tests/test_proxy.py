"""The proxy does to connections what it says; tests of workers rely on it."""

import psycopg
import pytest

from .helpers import InThread, here, wait_until
from .proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def proxy():
    with Proxy.to_database() as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    with psycopg.connect(proxy.url, autocommit=True) as client:
        yield client


def marks():
    return here("SELECT note FROM app_mark ORDER BY note")


def leave_mark(client, note):
    client.execute("BEGIN")
    client.execute("INSERT INTO app_mark (note, made_by) VALUES (%s, '')", [note])
    client.execute("COMMIT")


def test_it_forwards(client):
    leave_mark(client, "forwarded")

    assert marks() == [("forwarded",)]
    assert len(client.execute("SELECT repeat('x', 1000000)").fetchone()[0]) == 1_000_000


def test_a_deaf_connection_answers_nothing_and_stays_deaf(proxy, client):
    backend = client.execute("SELECT pg_backend_pid()").fetchone()[0]

    proxy.go_deaf(new=False)
    asking = InThread(lambda: client.execute("SELECT 1"))
    with psycopg.connect(proxy.url, autocommit=True) as another:
        assert another.execute("SELECT 1").fetchone() == (1,)
    proxy.forward()

    assert asking.is_running
    assert here("SELECT state FROM pg_stat_activity WHERE pid = %s", [backend]) == [("idle",)]
    proxy.release_deaf()
    with pytest.raises(psycopg.OperationalError):
        asking.result()
    wait_until(lambda: not here("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [backend]), "the backend's end")


def test_a_new_connection_to_a_deaf_server_gets_no_answer_in_time(proxy):
    proxy.go_deaf()

    with pytest.raises(psycopg.errors.ConnectionTimeout):
        psycopg.connect(proxy.url, connect_timeout=2)


def test_cut_connections_are_noticed_and_refused_ones_are_not_made(proxy, client):
    proxy.reset()
    with pytest.raises(psycopg.OperationalError):
        client.execute("SELECT 1")

    proxy.refuse()
    with pytest.raises(psycopg.OperationalError, match="refused"):
        psycopg.connect(proxy.url)
    proxy.forward()

    with psycopg.connect(proxy.url) as again:
        assert again.execute("SELECT 1").fetchone() == (1,)


def test_a_commit_whose_answer_is_lost_has_happened(proxy, client):
    lost = proxy.lose_commit_answer("INSERT INTO app_mark")
    client.execute("BEGIN")
    client.execute("SELECT 1")
    client.execute("COMMIT")

    with pytest.raises(psycopg.OperationalError):
        leave_mark(client, "unknown")

    assert lost.happened
    assert marks() == [("unknown",)]
    with psycopg.connect(proxy.url, autocommit=True) as another:
        leave_mark(another, "next")
    assert marks() == [("next",), ("unknown",)]


def test_the_answer_of_a_commit_that_was_refused_is_not_lost(proxy, client):
    lost = proxy.lose_commit_answer("INSERT INTO app_mark")
    client.execute("BEGIN")
    with pytest.raises(psycopg.errors.DivisionByZero):
        client.execute("INSERT INTO app_mark (note, made_by) SELECT (1/0)::text, ''")
    client.execute("COMMIT")

    assert not lost.happened
    with pytest.raises(psycopg.OperationalError):
        leave_mark(client, "committed")
    assert lost.happened
