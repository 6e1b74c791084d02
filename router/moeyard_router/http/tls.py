"""The certificate that the router shows, checked before anything starts and read again when it is renewed."""

import logging
import ssl
import threading

from moeyard_router.config import DoorConfig
from moeyard_router.http.files import FileStamp, stamp

log = logging.getLogger(__name__)


class Certificate:
    """A server's TLS context of PEM files: TLS 1.2 or newer with OpenSSL's default ciphers, HTTP/1.1 by ALPN.

    With `ssl_ca_certs` clients must show a certificate that it vouches for. Raises `ValueError` naming the file at
    fault.
    """

    def __init__(self, door: DoorConfig) -> None:
        assert door.ssl_certfile is not None
        self._keyfile = door.ssl_keyfile
        self._ca_certs = door.ssl_ca_certs
        self._files = (door.ssl_certfile, *([] if door.ssl_keyfile is None else [door.ssl_keyfile]))
        self._lock = threading.Lock()
        self._signature = self._sign()
        self._newest = self.context = self._open()
        # OpenSSL takes certificate and key one after the other; a handshake in between would fail. So a context that is
        # in use is never loaded again: every handshake is given the newest one.
        self.context.sni_callback = self._choose

    def refresh(self) -> None:
        """Take the files again if they have changed; connections that are open keep what they have. From any thread.

        Files that do not fit each other leave the certificate as it is and are logged, once for every change of them: a
        renewal writes two files, so the second change mends it.
        """
        with self._lock:
            try:
                signature = self._sign()
                if signature == self._signature:
                    return
                self._signature = signature
                self._newest = self._open()
            except ValueError as error:
                log.error("%s; the certificate stays as it was", error)
                return
            log.warning("%s: read again", self._files[0])

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called for every handshake, with a name or without one."""
        connection.context = self._newest

    def _open(self) -> ssl.SSLContext:
        """A context of the files as they are now."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        for path in self._files:  # OpenSSL does not say which one it could not open
            try:
                path.open("rb").close()
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}") from error
        try:
            context.load_cert_chain(self._files[0], self._keyfile, password=_no_password)
        except OSError as error:
            raise ValueError(f"{' with key '.join(map(str, self._files))}: {_reason(error)}") from error
        if self._ca_certs is not None:
            try:
                context.load_verify_locations(cafile=self._ca_certs)
            except OSError as error:  # ssl.SSLError among them
                raise ValueError(f"{self._ca_certs}: {_reason(error)}; PEM certificates are expected") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _sign(self) -> tuple[FileStamp, ...]:
        return tuple(stamp(path) for path in self._files)


def open_certificate(door: DoorConfig) -> Certificate | None:
    """The certificate of this door, None for plain HTTP; raises `ValueError` naming the file at fault."""
    if door.ssl_certfile is not None:
        return Certificate(door)
    if door.ssl_keyfile is not None or door.ssl_ca_certs is not None:
        raise ValueError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
    return None


def _no_password() -> str:
    """OpenSSL would ask for one at the terminal."""
    raise ValueError("the TLS key is encrypted; decrypt it first: openssl pkey -in KEY -out PLAIN_KEY")


def _reason(error: OSError) -> str:
    """OpenSSL's words for a bad file are its internal ones."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    return f"no usable PEM file ({(error.reason or str(error)).replace('_', ' ').lower()})"
