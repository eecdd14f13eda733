"""URLs of Redis: every form that is read, every one that is refused, and that no password is ever repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import signed_certificates

from distributed_state.cold.connections import parse_url
from distributed_state.errors import ConfigurationError
from distributed_state.port.addresses import host_and_port, node_name, read_address

pytestmark = pytest.mark.unit

SECRET = "hunter2"
FORMS = {
    "redis://": ("plain", "redis://localhost:6379", ("localhost:6379",)),
    "redis://h": ("plain", "redis://h:6379", ("h:6379",)),
    "redis://h:7/": ("plain", "redis://h:7", ("h:7",)),
    "redis://h:7/3": ("plain", "redis://h:7", ("h:7",)),
    "redis://:@h:7/3": ("plain", "redis://h:7", ("h:7",)),
    "redis://[::1]:7/0": ("plain", "redis://[::1]:7", ("::1:7",)),
    "rediss://h:7": ("plain", "rediss://h:7", ("h:7",)),
    "unix:///run/r.sock": ("plain", "unix:///run/r.sock", ("/run/r.sock",)),
    "unix://u:p@/run/r.sock?db=2": ("plain", "unix:///run/r.sock", ("/run/r.sock",)),
    "redis+cluster://a,b:7,[fe80::1]:8": (
        "cluster",
        "redis+cluster://a:6379,b:7,[fe80::1]:8",
        ("a:6379", "b:7", "fe80::1:8"),
    ),
    "redis+cluster://a:7/": ("cluster", "redis+cluster://a:7", ("a:7",)),
    "rediss+cluster://a:7/0": ("cluster", "rediss+cluster://a:7", ("a:7",)),
    "redis+sentinel://a,b:7/mymaster": (
        "sentinel",
        "redis+sentinel://a:26379,b:7/mymaster",
        ("a:26379", "b:7"),
    ),
    "rediss+sentinel://[::1]:7/my.mas-ter_2/4": (
        "sentinel",
        "rediss+sentinel://[::1]:7/my.mas-ter_2",
        ("::1:7",),
    ),
}


@pytest.mark.parametrize("url", FORMS)
def test_every_form_is_read(url: str) -> None:
    address = read_address(url)
    assert (address.kind, address.place, address.seeds) == FORMS[url]
    assert address.tls is url.startswith("rediss")
    assert address.unix is url.startswith("unix")


def test_a_server_is_called_as_a_redirection_has_it() -> None:
    for host, port in (("h", 7), ("::1", 7), ("10.0.0.1", 6379)):
        assert host_and_port(node_name(host, port)) == (host, port)


def test_the_database_is_read_in_every_form() -> None:
    found = {
        url: read_address(url).options.get("db")
        for url in ("redis://h/3", "redis://h?db=3", "unix:///s?db=3", "redis+sentinel://h/m/3", "redis+sentinel://h/m")
    }
    assert list(found.values()) == [3, 3, 3, 3, 0]


@pytest.mark.parametrize("kind", ["redis", "redis+cluster", "redis+sentinel"])
def test_a_login_and_options_stand_where_they_always_stand(kind: str) -> None:
    path = "/mymaster" if kind == "redis+sentinel" else ""
    address = read_address(f"{kind}://joe%40x:p%2Fa%3Fs%23s@h:7{path}?client_name=me&socket_keepalive=yes")
    assert address.options["username"] == "joe@x"
    assert address.options["password"] == "p/a?s#s"
    assert address.options["client_name"] == "me"
    assert address.options["socket_keepalive"] is True
    assert "joe" not in address.place
    assert "p/a" not in repr(address)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster"])
@pytest.mark.parametrize("path", ["", "/", "/0"])
def test_a_file_may_be_named_with_or_without_a_database(scheme: str, path: str, certificates: Path) -> None:
    """Without one the first slash of the url is that of the file."""
    file = certificates / "ca.crt"
    address = read_address(f"{scheme}://u:p@h:7{path}?ssl_ca_certs={file}")
    assert address.seeds == ("h:7",)
    assert address.options["ssl_ca_certs"] == str(file)


def test_a_relative_file_means_the_folder_in_which_the_url_was_read(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates are read for each connection, and a program may change its folder meanwhile."""
    monkeypatch.chdir(certificates)
    address = read_address("rediss+sentinel://h/m?ssl_ca_certs=ca.crt&sentinel_ssl_ca_path=.")
    archive = parse_url("postgresql://h/d?sslrootcert=ca.crt&passfile=pass")
    system = parse_url("postgresql://h/d?sslrootcert=system")
    monkeypatch.chdir("/")
    assert address.options["ssl_ca_certs"] == str(certificates / "ca.crt")
    assert address.sentinel_options["ssl_ca_path"] == str(certificates)
    assert archive.query == {"sslrootcert": str(certificates / "ca.crt"), "passfile": str(certificates / "pass")}
    assert system.query == {"sslrootcert": "system"}


def test_a_relative_path_in_a_folder_that_was_deleted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigurationError, match=r"a\.db: is relative, and the current folder was deleted"):
        parse_url("sqlite:///a.db")
    assert parse_url("sqlite:////b/a.db").database == "/b/a.db"


def test_sentinels_have_a_login_of_their_own_and_never_that_of_the_servers(certificates: Path) -> None:
    file = certificates / "ca.crt"
    address = read_address(
        f"rediss+sentinel://u:p@h/m?sentinel_username=su&sentinel_password=s%2Bp&ssl_ca_certs={file}"
        "&ssl_check_hostname=no&sentinel_ssl_check_hostname=yes&client_name=me"
    )
    assert address.sentinel_options == {
        "username": "su",
        "password": "s+p",
        "ssl_ca_certs": str(file),
        "ssl_check_hostname": True,
    }
    assert not any(name.startswith("sentinel_") for name in address.options)
    assert (address.options["username"], address.options["password"]) == ("u", "p")
    bare = read_address(f"rediss+sentinel://u:p@h/m?ssl_ca_certs={file}")
    assert bare.sentinel_options == {"ssl_ca_certs": str(file)}


def test_an_option_of_sentinels_is_read_as_the_servers_is() -> None:
    """As a word, "no" would be true."""
    address = read_address("rediss+sentinel://h/m?sentinel_ssl_check_hostname=no")
    assert address.sentinel_options == {"ssl_check_hostname": False}


REFUSED = {
    "http://h": "url must name Redis or Valkey",
    "postgresql://h": "archive=",
    "redis://h:notaport": "cannot be read",
    "redis://h:0": "cannot be read",
    "redis://h:70000": "cannot be read",
    "redis://a:1,b:2": "several servers need",
    "redis://h/three": "number of the database",
    "redis://h/3/4": "number of the database",
    "redis://h?db=three": "'db' of the url is wrong.*number of a database",
    "redis://h?db=-1": "'db' of the url is wrong.*number of a database",
    "redis://h?db=": "'db' of the url is wrong.*empty",
    "redis://h?db=1&db=2": "'db' of the url is wrong.*twice",
    "redis://h?socket_keepalive=perhaps": "'socket_keepalive' of the url is wrong.*yes or no",
    "redis://h?client_name=a b": "'client_name' of the url is wrong.*without spaces",
    "redis://h?path=/tmp/other.sock": "no option 'path'",
    "redis://h?host=other": "no option 'host'",
    "redis://h?connection_class=x": "no option 'connection_class'",
    "redis://h?decode_responses=yes": "no option 'decode_responses'",
    "redis://h?socket_timeout=3": "no option 'socket_timeout': use the setting timeout=",
    "redis://h?retry_on_timeout=yes": "no option 'retry_on_timeout': use the setting retry_for=",
    "redis://h?ssl_ca_certs=/etc/hostname": "'ssl_ca_certs' of the url is wrong.*rediss://",
    "redis://h#5": "must not contain #",
    "unix://": "path of a Unix socket is missing",
    "unix:///run/r.sock?socket_keepalive=yes": "a Unix socket does not support it",
    "rediss://h?ssl_cert_reqs=x": "'ssl_cert_reqs' of the url is wrong.*none, optional, required",
    "rediss://h?ssl_check_hostname=x": "'ssl_check_hostname' of the url is wrong.*yes or no",
    "rediss://h?ssl_min_version=1": "'ssl_min_version' of the url is wrong.*771",
    "rediss://h?ssl_ciphers=none-of-these": "ssl_ciphers",
    "rediss://h?ssl_ca_certs=/etc/hostname": "ssl_ca_certs",
    "rediss://h?ssl_keyfile=/etc/hostname": "ssl_certfile: a key without its certificate",
    "redis+sentinel://h/m?sentinel_db=1": "no option 'sentinel_db'",
    "redis+sentinel://h/m?sentinel_ssl_cert_reqs=none": "'sentinel_ssl_cert_reqs' of the url is wrong.*rediss",
    "rediss+sentinel://h/m?sentinel_ssl_cert_reqs=x": "'sentinel_ssl_cert_reqs' of the url is wrong",
    "redis://h?sentinel_username=me": "need redis\\+sentinel",
    "redis+cluster://h/1": "only database 0, not 1",
    "redis+cluster://h?db=2": "only database 0, not 2",
    "redis+cluster://a,,b": "cannot be read",
    "redis+cluster://": "cannot be read",
    "redis+cluster://h/mymaster": "number of the database",
    "redis+sentinel://h": "name of the service",
    "redis+sentinel://h/": "name of the service",
    "redis+sentinel://h/a b": "name of the service",
    "redis+sentinel://h/m/x": "name of the service",
    "redis+sentinel:///m": "cannot be read",
    "rediss://h?ssl_ca_certs=/no/such/file": "ssl_ca_certs.*No such file",
    "rediss+sentinel://h/m?sentinel_ssl_certfile=/no/such/file": "ssl_certfile.*No such file",
}


@pytest.mark.parametrize("url", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(url: str) -> None:
    with pytest.raises(ConfigurationError, match=REFUSED[url]):
        read_address(url)


def test_no_refusal_repeats_what_an_option_was_given() -> None:
    """It may be a password whose name was misspelt."""
    for query in (f"pasword={SECRET}", f"db={SECRET}", f"ssl_password={SECRET}", f"socket_keepalive={SECRET}"):
        with pytest.raises(ConfigurationError) as caught:
            read_address(f"redis://h?{query}")
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", REFUSED)
@pytest.mark.parametrize(
    "password", [SECRET, f"{SECRET}/x", f"{SECRET}?x", f"{SECRET}#x", f"{SECRET}@x", f"{SECRET}:[x"]
)
def test_no_refusal_repeats_a_password_or_a_part_of_it(url: str, password: str) -> None:
    scheme, _, rest = url.partition("://")
    for login in (f"user:{password}@", f":{password}@"):
        with pytest.raises(ConfigurationError) as caught:
            read_address(f"{scheme}://{login}{rest}")
        error: BaseException | None = caught.value
        while error is not None:
            assert SECRET not in str(error)
            error = error.__cause__


@pytest.mark.parametrize("url", FORMS)
@pytest.mark.parametrize("password", [f"{SECRET}/x", f"{SECRET}?x", f"{SECRET}#x", f"{SECRET}@x"])
def test_a_password_that_was_not_escaped_is_refused_or_read_whole(url: str, password: str) -> None:
    """What is shown of the place never has a part of it."""
    if "@" in url:
        return
    scheme, _, rest = url.partition("://")
    address, said = None, ""
    try:
        address = read_address(f"{scheme}://:{password}@{rest}")
    except ConfigurationError as error:
        said = str(error)
    assert SECRET not in said + repr(address)
    assert address is None or address.options["password"] == password
