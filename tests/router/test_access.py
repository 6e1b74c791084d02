"""Access control over real sockets with real clients: keys, certificates, web pages and the access log."""

import contextlib
import hashlib
import json
import logging
import os
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import trustme
from tests.limits import HANG_SECONDS

from moeyard_router.config import AccessConfig
from moeyard_router.http.credentials import KeyRing, open_certificate
from moeyard_router.http.origins import Origins, is_loopback, parse_origins

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello world"}]
KEY, OTHER = "sk-Ein.Schluessel/0=", "another-key:with:colons"
PROBES = ("/livez", "/readyz", "/health", "/ping")
GUARDED = ("/v1/models", "/v1/models/tiny", "/v1/fleet", "/version", "/no/such/path", "/livez/")


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    path.write_text(f"# who may come in\n\n  team-a:{KEY}  \nteam-b:sha256:{digest.upper()}\nunnamed\n")
    return path


def bearer(key):
    return {"authorization": f"Bearer {key}"}


# Keys


def test_without_keys_any_key_is_accepted(service):
    """Clients must send some key, and many send nonsense."""
    assert service.client.get("/v1/models", headers=bearer("EMPTY")).status_code == 200


def test_keys(start, key_file):
    service = start(1, access=AccessConfig(api_key_file=key_file, api_keys=("from-the-environment",)))
    get = service.client.get
    for path in (*PROBES, "/metrics", "/metrics/targets", "/docs", "/openapi.json"):
        assert get(path).status_code == 200, path
    for path in GUARDED:
        answer = get(path)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["error"]["type"] == "authentication_error"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    for key in (KEY, OTHER, "unnamed", "from-the-environment"):
        assert get("/v1/models", headers=bearer(key)).status_code == 200
        assert get("/v1/models", headers={"x-api-key": key}).status_code == 200
        assert get("/v1/models", headers={"authorization": f"bearer  {key}"}).status_code == 200
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    for wrong in ("x", KEY[:-1], KEY + "x", KEY.upper(), digest, f"sha256:{digest}", "team-a", f"team-a:{KEY}"):
        assert get("/v1/models", headers=bearer(wrong)).status_code == 401, wrong
        assert get("/v1/models", headers={"x-api-key": wrong}).status_code == 401, wrong
    assert get("/v1/models", headers={"authorization": f"Basic {KEY}"}).status_code == 401
    assert get("/v1/models", headers=bearer("x" * 10_000)).status_code == 401
    assert service.post(COMPLETIONS, prompt="x").status_code == 401
    assert service.post("/tokenize", prompt="x").status_code == 401
    assert service.submits == []
    page = get("/metrics").text
    assert 'moeyard_rejections_total{model_name="tiny",reason="bad_key"}' in page
    assert 'path="/v1/models",status="401"}' in page
    assert KEY not in get("/v1/models", headers=bearer(KEY + "x")).text
    described = get("/openapi.json").json()
    assert described["paths"]["/v1/fleet"]["get"]["security"] == [{"bearer": []}, {"x_api_key": []}]
    assert "security" not in described["paths"]["/metrics"]["get"]


def test_metrics_can_be_protected(start, key_file):
    service = start(1, access=AccessConfig(api_key_file=key_file, protect_metrics=True))
    assert service.client.get("/metrics").status_code == 401
    assert service.client.get("/metrics", headers=bearer(KEY)).status_code == 200
    assert service.client.get("/readyz").status_code == 200


def test_changed_key_file_is_read_again(key_file, caplog):
    keys = KeyRing(AccessConfig(api_key_file=key_file))
    assert keys.name_of(KEY.encode()) == "team-a"
    assert keys.name_of(OTHER.encode()) == "team-b"
    assert keys.name_of(b"unnamed") == f"key-{hashlib.sha256(b'unnamed').hexdigest()[:8]}"
    with caplog.at_level(logging.WARNING):
        keys.refresh()
        assert caplog.messages == []
        new = key_file.with_name("new")
        new.write_text("team-a:new-key\n")
        os.replace(new, key_file)
        keys.refresh()
        assert keys.name_of(b"new-key") == "team-a"
        assert keys.name_of(KEY.encode()) is None
        for bad in ("", "team a:secret-key\n", "a:same\nb:same\n"):
            caplog.clear()
            key_file.write_text(bad)
            keys.refresh()
            keys.refresh()
            assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1, bad
            assert keys.name_of(b"new-key") == "team-a", "a bad key file must leave the old keys valid"
        caplog.clear()
        key_file.unlink()
        keys.refresh()
        keys.refresh()
        assert len(caplog.records) == 1
        key_file.write_text("last\n")
        keys.refresh()
        assert keys.name_of(b"last") is not None
        assert "secret-key" not in caplog.text


def test_router_reads_changed_keys(start, key_file, wait_for):
    service = start(1, access=AccessConfig(api_key_file=key_file))
    key_file.write_text("fresh\n")
    wait_for(lambda: service.client.get("/v1/models", headers=bearer("fresh")).status_code == 200, "the key is unknown")
    assert service.client.get("/v1/models", headers=bearer(KEY)).status_code == 401


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("# nothing\n\n", "no API key"),
        ("a key\n", "line 1: a key is"),
        ("ok\nschlüssel\n", "line 2"),
        ("a b:key\n", "name"),
        (":key\n", "name"),
        ("sha256:abc\n", "64 hex"),
        ("n:sha256:" + "g" * 64 + "\n", "64 hex"),
        ("a:one\nb:one\n", "line 2: the key is a duplicate of 'a'"),
        ("x" * 600 + "\n", "512"),
        ("a:\n", "line 1"),
    ],
)
def test_bad_key_files(tmp_path, text, named):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=named) as caught:
        KeyRing(AccessConfig(api_key_file=path))
    assert str(path) in str(caught.value)
    assert "schlüssel" not in str(caught.value)


def test_unreadable_key_file(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        KeyRing(AccessConfig(api_key_file=tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        KeyRing(AccessConfig(api_key_file=tmp_path / "bytes"))
    assert "secret" not in repr(AccessConfig(api_keys=("secret",)))


# TLS


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def write_certificate(authority, folder, name="localhost"):
    issued = authority.issue_cert(name, "127.0.0.1")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


def trusting(authority, client=None):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if client is not None:
        client.configure_cert(context)
    return context


def test_tls(start, authority, tmp_path, wait_for):
    files = write_certificate(authority, tmp_path)
    service = start(1, access=AccessConfig(**files), ready=False)
    url = service.url.replace("http:", "https:")
    context = trusting(authority)
    with httpx.Client(base_url=url, verify=context, timeout=HANG_SECONDS) as client:
        wait_for(lambda: client.get("/readyz").status_code == 200, "the fleet must come up")
        answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4
        with client.stream("POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 4, "stream": True}) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
    with pytest.raises(httpx.TransportError):
        service.client.get("/livez")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/livez", verify=ssl.create_default_context(), timeout=HANG_SECONDS)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert old.check_hostname
    authority.configure_trust(old)
    port = int(url.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as sock,
        old.wrap_socket(sock, server_hostname="localhost") as tls,
    ):
        assert tls.version() in ("TLSv1.2", "TLSv1.3")
        before = tls.getpeercert()["serialNumber"]
    write_certificate(authority, tmp_path)  # renewed, as a cron job does

    def serial():
        with (
            socket.create_connection(("127.0.0.1", port)) as sock,
            context.wrap_socket(sock, server_hostname="localhost") as tls,
        ):
            return tls.getpeercert()["serialNumber"]

    wait_for(lambda: serial() != before, "the renewed certificate must be shown")


def test_tls_with_client_certificates(start, authority, tmp_path, wait_for):
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    access = AccessConfig(**write_certificate(authority, tmp_path), ssl_ca_certs=ca)
    service = start(1, access=access, ready=False)
    url = service.url.replace("http:", "https:")
    known = trusting(authority, authority.issue_cert("client@example.org"))
    with httpx.Client(verify=known, timeout=HANG_SECONDS) as client:
        wait_for(lambda: client.get(f"{url}/readyz").status_code == 200, "a client with a certificate must connect")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/livez", verify=trusting(authority), timeout=HANG_SECONDS)


def test_new_client_authority_takes_effect(authority, tmp_path, caplog):
    """The server's own certificate stays the same. A half-written file changes nothing."""
    first, second = trustme.CA(), trustme.CA()
    clients = [trusting(authority, each.issue_cert("client@example.org")) for each in (first, second)]
    ca = tmp_path / "ca.pem"
    first.cert_pem.write_to_path(str(ca))
    certificate = open_certificate(AccessConfig(**write_certificate(authority, tmp_path), ssl_ca_certs=ca))

    def served():
        found = []
        for client in clients:
            try:
                found.append(handshake(certificate.context, client, "localhost") is not None)
            except ssl.SSLError:
                found.append(False)
        return found

    assert served() == [True, False]
    ca.write_text("-----BEGIN CERTIFICATE-----")
    certificate.refresh()
    assert "ca.pem" in caplog.messages[-1]
    assert served() == [True, False]
    second.cert_pem.write_to_path(str(ca))
    certificate.refresh()
    assert served() == [False, True]


def test_bad_certificates(authority, tmp_path):
    good = write_certificate(authority, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    wrong_key = write_certificate(authority, other)["ssl_keyfile"]
    garbage = tmp_path / "garbage"
    garbage.write_text("nothing")
    certificate = good["ssl_certfile"]
    for access, named in (
        ({"ssl_certfile": tmp_path / "none"}, "none: No such file"),
        ({**good, "ssl_keyfile": tmp_path / "none"}, "none: No such file"),
        ({**good, "ssl_keyfile": wrong_key}, "does not belong"),
        ({"ssl_certfile": garbage}, "garbage: no usable PEM"),
        ({"ssl_certfile": certificate}, "cert.pem: "),
        ({**good, "ssl_ca_certs": garbage}, "garbage: "),
        ({"ssl_keyfile": wrong_key}, "need --ssl-certfile"),
    ):
        with pytest.raises(ValueError, match=named):
            open_certificate(AccessConfig(**access))
    assert open_certificate(AccessConfig()) is None


def test_encrypted_key_does_not_ask_at_the_terminal(authority, tmp_path):
    from cryptography.hazmat.primitives import serialization as form

    files = write_certificate(authority, tmp_path)
    key = form.load_pem_private_key(files["ssl_keyfile"].read_bytes(), None)
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"word"))
    files["ssl_keyfile"].write_bytes(pem)
    with pytest.raises(ValueError, match="encrypted"):
        open_certificate(AccessConfig(**files))


def test_partial_renewal_changes_nothing(authority, tmp_path, caplog):
    files = write_certificate(authority, tmp_path)
    certificate = open_certificate(AccessConfig(**files))
    key = files["ssl_keyfile"].read_bytes()
    write_certificate(authority, tmp_path)
    new_key = files["ssl_keyfile"].read_bytes()
    files["ssl_keyfile"].write_bytes(key)
    certificate.refresh()
    certificate.refresh()
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    files["ssl_keyfile"].write_bytes(new_key)
    certificate.refresh()
    assert "read again" in caplog.messages[-1]


def handshake(server, client, name):
    """Return the serial number of the certificate that `client` receives; both ends are in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    shown = None
    ends = [client.wrap_bio(back, there, server_hostname=name), server.wrap_bio(there, back, server_side=True)]
    while ends:
        for end in tuple(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)
                shown = shown if end.server_side else end.getpeercert()["serialNumber"]
    return shown


def test_handshakes_during_renewals_succeed(authority, tmp_path):
    """OpenSSL gets certificate and key one after the other; no connection may fall in between."""
    files = write_certificate(authority, tmp_path)
    certificate = open_certificate(AccessConfig(**files))
    context, nameless = trusting(authority), trusting(authority)
    nameless.check_hostname = False
    renewed = [handshake(certificate.context, context, "localhost")]

    def renew():
        renewals = 0
        while renewals < 40 or len(set(renewed)) < 3:
            renewals += 1
            write_certificate(authority, tmp_path)
            certificate.refresh()

    with ThreadPoolExecutor(1) as pool:
        renewing = pool.submit(renew)
        while not renewing.done():
            renewed.append(handshake(certificate.context, context, "localhost"))
        renewing.result()
    assert len(set(renewed)) > 2
    newest = handshake(certificate.context, context, "localhost")
    assert newest == handshake(certificate.context, nameless, None), "must be new without a server name, too"
    assert newest != renewed[0]


# Web pages


def test_page_of_another_site_runs_nothing(service):
    """A browser sends text/plain without a preflight, so text/plain must not run."""
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
        headers = {"origin": "https://evil.example", "content-type": kind}
        answer = service.client.post(COMPLETIONS, content=body, headers=headers)
        assert answer.status_code == 403
        assert "--allowed-origins" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers
    ask = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    preflight = service.client.options(COMPLETIONS, headers=ask)
    assert preflight.status_code == 403
    assert not any(name.startswith("access-control") for name in preflight.headers)
    assert service.client.get("/v1/fleet", headers={"origin": "null"}).status_code == 403
    assert service.submits == []


def test_post_requires_json(service):
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"):
        answer = service.client.post(COMPLETIONS, content=body, headers={"content-type": kind})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert service.client.post(COMPLETIONS, content=body, headers={"content-type": kind}).status_code == 200
    assert service.client.post(COMPLETIONS, content=body).status_code == 200  # scripts send no type at all
    for coding, status in (("gzip", 415), ("br", 415), ("identity", 200)):
        answer = service.client.post(COMPLETIONS, content=body, headers={"content-encoding": coding})
        assert answer.status_code == status
        assert status == 200 or f"Content-Encoding '{coding}'" in answer.json()["error"]["message"]


def test_names_of_other_servers_are_refused_on_loopback(service):
    """DNS rebinding: a page's own name resolves to this machine, so its origin and the Host header agree."""
    port = service.url.rpartition(":")[2]
    headers = {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"}
    for each in (headers, {"host": headers["host"]}):
        assert service.client.get("/v1/fleet", headers=each).status_code == 403
        answer = service.client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers=each)
        assert answer.status_code == 403
    assert service.submits == []
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "api.localhost", socket.gethostname()):
        assert service.client.get("/v1/fleet", headers={"host": host}).status_code == 200, host
        same = {"host": host, "origin": f"http://{host}"}
        assert service.client.get("/v1/fleet", headers=same).status_code == 200, host
    assert service.client.get("/livez", headers={"host": "evil.example"}).status_code == 200


def test_allowed_origins(start):
    service = start(1, access=AccessConfig(allowed_origins=("https://chat.example", "http://localhost:3000")))
    body = {"prompt": "x", "max_tokens": 2}
    for origin in ("https://chat.example", "http://localhost:3000"):
        ask = {"origin": origin, "access-control-request-method": "POST"}
        ask["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
        preflight = service.client.options(CHAT, headers=ask)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-headers"] == ask["access-control-request-headers"]
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["vary"] == "Origin"
        answer = service.client.post(COMPLETIONS, json=body, headers={"origin": origin})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["access-control-expose-headers"] == "*"
        with service.client.stream("POST", COMPLETIONS, json={**body, "stream": True}, headers={"origin": origin}) as s:
            assert s.headers["access-control-allow-origin"] == origin
            s.read()
        bad = service.client.post(COMPLETIONS, json={}, headers={"origin": origin})
        assert (bad.status_code, bad.headers["access-control-allow-origin"]) == (400, origin)
    for origin in ("http://chat.example", "https://chat.example:444", "https://chat.example.evil.example", "https://"):
        assert service.client.post(COMPLETIONS, json=body, headers={"origin": origin}).status_code == 403


def test_preflight_needs_no_key_and_allowed_pages_see_a_401(start, key_file):
    service = start(1, access=AccessConfig(api_key_file=key_file, allowed_origins=("*",)))
    origin = {"origin": "https://anybody.example"}
    ask = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "bad/header"}
    preflight = service.client.options(CHAT, headers=ask)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, "*")
    assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
    refused = service.client.get("/v1/models", headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
    assert service.client.get("/v1/models", headers={**origin, **bearer(KEY)}).status_code == 200


def test_valid_origins():
    assert parse_origins(["https://A.example/", '["*", "http://b:1"]']) == ["https://a.example", "*", "http://b:1"]
    assert parse_origins(["app://obsidian.md", "null"]) == ["app://obsidian.md", "null"]
    for bad in ("a.example", "https://a/b", "https://u@a", "[1]", "[]", "[", ""):
        with pytest.raises(ValueError, match="--allowed-origins"):
            parse_origins([bad])
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "127.9.9.9")] == [True] * 4
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "example.org")] == [False] * 4
    # A server cannot know all its external names; a page's origin must still be an address or a known name.
    wide = Origins([], host="0.0.0.0", needs_key=False)
    assert wide.is_ours(b"whatever.example:8000")
    assert wide.permits(b"http://10.0.0.1:8000", b"10.0.0.1:8000")
    assert not wide.permits(b"http://evil.example:8000", b"evil.example:8000")
    guarded = Origins([], host="0.0.0.0", needs_key=True)
    assert guarded.permits(b"https://api.example", b"api.example"), "own page behind a proxy"
    assert not guarded.permits(b"https://evil.example", b"api.example")


# Request ids and the access log


def test_request_ids(service):
    assert service.client.get("/livez").headers["x-request-id"].startswith("req-")
    given = service.client.get("/v1/models", headers={"x-request-id": "trace/7:a.b"})
    assert given.headers["x-request-id"] == "trace/7:a.b"
    ids = {
        service.client.get("/livez", headers={"x-request-id": bad}).headers["x-request-id"]
        for bad in ("x" * 129, "a b", 'a"')
    }
    assert len(ids) == 3
    assert all(each.startswith("req-") for each in ids)
    for answer in (service.post(COMPLETIONS), service.client.get("/none"), service.client.put(COMPLETIONS)):
        assert answer.status_code in (400, 404, 405)
        assert answer.headers["x-request-id"].startswith("req-")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "moeyard.access")
    return lambda: [r.fields for r in caplog.records if r.name == "moeyard.access"]


def test_access_log(start, key_file, lines, wait_for, caplog):
    service = start(1, access=AccessConfig(api_key_file=key_file, access_log=True))
    service.client.headers.update(bearer(KEY))

    def written(count):
        wait_for(lambda: len(lines()) >= count, "the access log must have a line after the answer")
        assert len(lines()) == count
        return lines()[-1]

    prompt = "a secret prompt"
    answer = service.client.post(
        COMPLETIONS, json={"prompt": prompt, "max_tokens": 5}, headers={"x-request-id": "mine"}
    ).json()
    line = written(1)
    assert (line["client"], line["method"], line["path"], line["status"]) == ("127.0.0.1", "POST", COMPLETIONS, 200)
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert line["output_tokens"] == 5
    assert 0 < line["ttft_ms"] <= line["ms"] < 1000 * HANG_SECONDS
    assert (line["request_id"], line["key"], line["reply_id"]) == ("mine", "team-a", answer["id"])
    service.client.get("/livez")
    service.client.get("/metrics")
    service.client.get("/v1/models", headers=bearer("wrong-key"))
    line = written(2)  # probes and scrapes are not logged
    assert (line["path"], line["status"]) == ("/v1/models", 401)
    assert "key" not in line
    service.client.get("/a%0Ab/" + "x" * 500 + "?key=in-the-query")
    assert written(3)["path"] == ("/a%0Ab/" + "x" * 500)[:100]
    service.client.get("/v1/models", headers={"x-forwarded-for": "1.2.3.4 status=200"})
    assert " " not in written(4)["client"]
    service.post(COMPLETIONS, prompt=prompt, max_tokens=-1)
    assert written(5)["status"] == 400
    for secret in (prompt, KEY, "wrong-key", "in-the-query"):
        assert secret not in caplog.text
        assert not any(secret in str(line) for line in lines())


def test_access_log_of_streams_that_end_early(start, lines, wait_for):
    service = start(1, recovery_timeout=0.0, access=AccessConfig(access_log=True))
    service.workers[0].pace = 0.005
    body = {"prompt": "x", "max_tokens": 200, "stream": True}
    with service.client.stream("POST", COMPLETIONS, json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: lines(), "the access log must have a line after the client left")
    assert (lines()[0]["status"], lines()[0]["left"]) == (200, 1)
    assert 0 < lines()[0]["output_tokens"] < 200
    service.wait_idle()
    with service.client.stream("POST", COMPLETIONS, json=body) as answer:
        events = answer.iter_lines()
        next(events)
        service.workers[0].fail("spoilt")
        list(events)
    wait_for(lambda: len(lines()) > 1 and "failure" in lines()[-1], "the access log must name the failure")
    assert (lines()[-1]["status"], lines()[-1]["failure"]) == (200, 503)


def test_access_log_is_off_by_default(service, lines):
    service.complete(prompt="x", max_tokens=1)
    assert lines() == []


# Small pages


def test_version_and_ping(start, wait_for):
    service = start(1, version="1.2.3", fingerprint="ab12")
    assert service.client.get("/version").json() == {"version": "1.2.3", "system_fingerprint": "fp_ab12"}
    assert service.client.get("/ping").status_code == service.client.post("/ping").status_code == 200
    service.workers[0].fail("spoilt")
    wait_for(lambda: service.client.post("/ping").status_code == 503, "a broken fleet must fail the ping")


def test_docs_need_no_other_server(service):
    page = service.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "//" not in page.text.replace("// Everything", ""), "the page must name no other server"
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert sink not in page.text


# /tokenize and /detokenize


def test_tokenize(service, codec):
    text = "Hello world 你好 🙂"
    answer = service.post("/tokenize", prompt=text).json()
    ids = codec.encode(text, add_special_tokens=True)
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    plain = service.post(
        "/tokenize", model="tiny", prompt=text, add_special_tokens=False, return_token_strs=True
    ).json()
    assert plain["tokens"] == ids[1:]
    assert plain["token_strs"] == [codec._tokenizer.id_to_token(i) for i in ids[1:]]
    assert service.post("/detokenize", tokens=plain["tokens"]).json() == {"prompt": text}
    assert service.post("/detokenize", tokens=ids).json() == {"prompt": "<|bos|>" + text}
    assert service.post("/tokenize", prompt="").json()["tokens"] == [0]
    assert service.post("/tokenize", prompt="", add_special_tokens=False).json()["count"] == 0
    assert service.post("/detokenize", tokens=[]).json() == {"prompt": ""}
    assert service.submits == []


@pytest.mark.parametrize("extra", [{}, {"add_generation_prompt": False}, {"add_special_tokens": True}])
def test_tokenize_counts_the_tokens_of_a_chat(service, extra):
    tokens = service.post("/tokenize", messages=HELLO, **extra).json()
    service.chat(messages=HELLO, max_tokens=1, **extra)
    assert tuple(tokens["tokens"]) == service.submits[0].prompt_token_ids
    going_on = [*HELLO, {"role": "assistant", "content": "The"}]
    extra = {"continue_final_message": True}
    tokens = service.post("/tokenize", messages=going_on, **extra).json()
    service.chat(messages=going_on, max_tokens=1, **extra)
    assert tuple(tokens["tokens"]) in [s.prompt_token_ids for s in service.submits]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "bogus": 1}, 400, "bogus"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [400]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [0] * 257}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)
def test_bad_tokenize(service, path, body, status, param):
    answer = service.post(path, **body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_tokenize_refuses_prompts_that_are_too_long(service):
    most = 64 * 1024 + 32 * 256
    for path, body in (("/tokenize", {"prompt": "x" * most}), ("/detokenize", {"tokens": [1] * most})):
        assert service.post(path, **body).status_code == 413
    assert service.post("/tokenize", prompt="x" * 60_000).status_code in (200, 400)  # by length, or counted


def test_without_a_tokenizer_tokenize_is_refused(start):
    service = start(1, model_path=None)
    for path, body in (("/tokenize", {"prompt": "x"}), ("/tokenize", {"prompt": ""}), ("/detokenize", {"tokens": [1]})):
        answer = service.post(path, **body)
        assert answer.status_code == 400
        assert "no tokenizer" in answer.json()["error"]["message"]
