"""`pointsman serve`: everything on one machine, stage by stage, looked after until it is told to end."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import redis

from pipeline.cli.data_directory import DataDirectory, kept_secret
from pipeline.cli.deployment import CLIENT_ONLY_NAMES, Deployment, refresh_flower
from pipeline.cli.embedded_redis import EmbeddedRedis
from pipeline.cli.errors import (
    CommandRefused,
    ModelUnusable,
    PortTaken,
    RedisUnreachable,
    StopRequested,
)
from pipeline.cli.flower import FLOWER_USER
from pipeline.cli.model_keeper import ModelKeeper
from pipeline.cli.model_store import ModelPlan, convert, plan_models
from pipeline.cli.redis_binary import REQUIRED_MAJOR, find_redis_binary
from pipeline.cli.resident_models import ResidentModels, make_keeper
from pipeline.cli.screen import Screen
from pipeline.cli.serve_options import ServeOptions
from pipeline.cli.signal_inbox import SignalInbox
from pipeline.cli.supervisor import Supervisor
from pipeline.cli.welcome import welcome_text
from pipeline.errors import SettingsInvalid, UnknownSettings
from pipeline.settings import ROOM_PREFIXES, PipelineSettings, read_settings

START_LIMIT_S = 60.0
# Loading and warming a large model takes its time; a death is noticed at once all the same.
WORKER_START_LIMIT_S = 600.0


def serve(options: ServeOptions, data_dir: DataDirectory, screen: Screen) -> None:
    """Start, watch and end the parts; returns when a signal has ended it.

    Raises:
        CommandRefused: something stood in the way; what was started has been ended again.
    """
    _refuse_nonsense(options)
    data_dir.create()
    with ExitStack() as stack:
        notice = "the parts of a pointsman serve that was killed are still ending; waiting for them"
        lock_fd = stack.enter_context(data_dir.locked(on_wait=lambda: screen.say(notice)))
        _require_free_ports(options)
        plans = plan_models(options.models, options.engine, data_dir.models)
        sockets = stack.enter_context(data_dir.socket_directory())
        inbox = stack.enter_context(SignalInbox())
        supervisor = Supervisor(data_dir, screen, inbox, lock_fd)
        stack.callback(screen.settle)
        stack.callback(supervisor.stop)
        try:
            deployment, keeper = _start(options, data_dir, screen, supervisor, (plans, sockets))
            screen.settle()
            screen.console.print(welcome_text(deployment), soft_wrap=True, highlight=False)
            _watch(deployment, supervisor, keeper)
        except StopRequested:
            screen.settle()
        except CommandRefused:
            screen.settle()
            raise
        screen.say("stopping, when what runs is finished; Ctrl-C again to hurry")


def _start(
    options: ServeOptions,
    data_dir: DataDirectory,
    screen: Screen,
    supervisor: Supervisor,
    found: tuple[list[ModelPlan], Path],
) -> tuple[Deployment, ModelKeeper | None]:
    plans, sockets = found
    server = EmbeddedRedis(data_dir.redis) if options.redis_url is None else None
    deployment = Deployment(
        options=options,
        data_dir=data_dir,
        redis_url=server.url if server is not None else (options.redis_url or ""),
        kvd_socket=sockets / "kvd.sock",
        plans=tuple(plans),
        flower_auth=kept_secret(data_dir.flower_auth, FLOWER_USER),
    )
    if names := deployment.passed_over():
        screen.say(f"passed over: {', '.join(names)}; serve decides these, see its options")
    if server is not None:
        server.prepare()
        supervisor.start([deployment.redis(server)], START_LIMIT_S)
    else:
        check_redis(deployment.redis_url)
        screen.say("redis: the given one answers")
    for plan in plans:
        _convert(plan, screen, supervisor)
    keeper = make_keeper(options, plans)
    if keeper is not None:
        deployment = replace(deployment, num_resident=keeper.num_resident)
    supervisor.start([deployment.kvd()], START_LIMIT_S)
    _start_workers(deployment, supervisor, keeper)
    supervisor.start([deployment.gateway()], START_LIMIT_S)
    if options.flower_port is not None:
        supervisor.start([deployment.flower()], START_LIMIT_S)
        refresh_flower(deployment)
    return deployment, keeper


def _start_workers(
    deployment: Deployment, supervisor: Supervisor, keeper: ModelKeeper | None
) -> None:
    """One model after the other: the node's cache is cut for the blocks of the first."""
    wanted = None if keeper is None else keeper.begin(time.monotonic())
    for plan in deployment.plans:
        parts = deployment.workers_of(plan)
        if wanted is None or plan.name in wanted:
            supervisor.start(parts, WORKER_START_LIMIT_S)
        else:
            supervisor.add(parts)


def _watch(deployment: Deployment, supervisor: Supervisor, keeper: ModelKeeper | None) -> None:
    if keeper is None:
        supervisor.watch()
        return
    parts = {
        plan.name: [part.name for part in deployment.workers_of(plan)] for plan in deployment.plans
    }
    with closing(ResidentModels(supervisor, keeper, parts, deployment.redis_url)) as residents:
        supervisor.watch(residents.tick)


def _convert(plan: ModelPlan, screen: Screen, supervisor: Supervisor) -> None:
    if plan.convert_from is None:
        return

    def show(text: str, percent: float) -> None:
        screen.update("model", text, percent)
        supervisor.pause(0.0)

    screen.begin("model", f"{plan.name}, converted once")
    try:
        convert(plan, show)
    except ModelUnusable:
        supervisor.pause(0.0)  # a terminal's Ctrl-C ends the converter as well
        raise
    screen.end("model", "ready")


def check_redis(url: str) -> None:
    """Make sure that the server at the URL answers and is new enough.

    Raises:
        RedisUnreachable: it does not, or is not; the message carries no password.
    """
    where = url.rpartition("@")[2].removeprefix("redis://")
    try:
        client = redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5)
        try:
            version = str(client.info("server").get("redis_version", "0"))
        finally:
            client.close()
    except (redis.RedisError, ValueError, OSError) as error:
        raise RedisUnreachable(where, str(error)) from error
    if int(version.split(".", maxsplit=1)[0]) < REQUIRED_MAJOR:
        raise RedisUnreachable(where, f"version {version}; {REQUIRED_MAJOR} or later is needed")


def _refuse_nonsense(options: ServeOptions) -> None:
    try:
        read_settings(PipelineSettings, other_prefixes=(*ROOM_PREFIXES, *CLIENT_ONLY_NAMES))
    except (UnknownSettings, SettingsInvalid) as error:
        raise CommandRefused(str(error)) from error
    if options.redis_url is None:
        find_redis_binary()
    if options.keys_file is not None and not options.keys_file.is_file():
        raise CommandRefused(f"--keys-file {options.keys_file}: no such file")


def _require_free_ports(options: ServeOptions) -> None:
    require_free_port(options.host, options.port, "--port")
    if options.flower_port is not None:
        require_free_port("127.0.0.1", options.flower_port, "--flower-port (or --no-flower)")


def require_free_port(host: str, port: int, option: str) -> None:
    """Make sure that we could listen there.

    Raises:
        PortTaken: somebody else does.
        CommandRefused: the address is not one of this machine's.
    """
    try:
        with _bound(host, port):
            return
    except socket.gaierror as error:
        raise CommandRefused(f"--host {host}: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(host, port, option) from error
        raise CommandRefused(f"--host {host}: {error.strerror}") from error


@contextmanager
def _bound(host: str, port: int) -> Iterator[None]:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
        yield
