"""Certificates made for a test, and TLS in front of a server that speaks none."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

_LIMIT_S = 10.0


@dataclass(frozen=True)
class Certificates:
    """An authority, and a server's certificate for 127.0.0.1 that it signed, in PEM."""

    authority: Path
    chain: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """Made by OpenSSL's command; a machine without it skips the test."""
        program = shutil.which("openssl")
        if program is None:
            pytest.skip("openssl is not installed")
        folder.mkdir(parents=True)
        made = cls(folder / "ca.pem", folder / "server.pem", folder / "server.key")
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        ca_key, request, extensions = (folder / name for name in ("ca.key", "server.csr", "ext"))
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        signed = (
            "-CA",
            made.authority,
            "-CAkey",
            ca_key,
            "-CAcreateserial",
            "-extfile",
            extensions,
        )
        for command in (
            (
                "req",
                "-x509",
                *new_key,
                "-keyout",
                ca_key,
                "-out",
                made.authority,
                "-subj",
                "/CN=ca",
            ),
            ("req", *new_key, "-keyout", made.key, "-out", request, "-subj", "/CN=127.0.0.1"),
            ("x509", "-req", "-in", request, *signed, "-out", made.chain, "-days", "2"),
        ):
            subprocess.run([program, *map(str, command)], check=True, capture_output=True)
        return made


class TlsFront:
    """Takes TLS connections on a port of its own and passes the bytes on to another port."""

    def __init__(self, certificates: Certificates, target_port: int) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificates.chain, certificates.key)
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.num_taken = 0
        self.port = 0

    def __enter__(self) -> TlsFront:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_S)
        self._loop.close()

    def _run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_LIMIT_S)  # type: ignore[arg-type]

    async def _open(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, ssl=self._context, ssl_handshake_timeout=_LIMIT_S
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_taken += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))
        for stream in (writer, back):
            stream.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()
