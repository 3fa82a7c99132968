"""A worker process, put together: settings are read here and nowhere else below."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid

import structlog
from celery import signals

from pipeline.errors import SettingsInvalid, StoreLossy, StoreUnavailable, UnknownSettings
from pipeline.intake.errors import ModelFilesUnusable
from pipeline.ledger.drain_orders import DrainOrder
from pipeline.ledger.keys import model_slug, unplaced_queue
from pipeline.ledger.store import connect
from pipeline.ledger.store_check import refuse_lossy_store
from pipeline.logs import configure_logs
from pipeline.scheduling.fleet import Fleet, Role, WorkerState, queues_of
from pipeline.scheduling.router import choose_decode, choose_entry
from pipeline.settings import (
    PipelineSettings,
    load_pipeline_settings,
    read_settings,
    split_names,
)
from pipeline.tasks.app import make_app, transport_options
from workers.canary import Canary
from workers.engine_pool import EnginePool, install_safe_qos
from workers.engine_stats import tier_loads
from workers.heartbeat import ControlListener, Heartbeat
from workers.kv_mover import KvMover, NoCache
from workers.look_ahead import LookAhead
from workers.models.errors import ModelError
from workers.node_daemon import NodeDaemon
from workers.peer_book import PeerBook
from workers.request_desk import RequestDesk
from workers.served_model import ServedModel
from workers.settings import WorkerSettings
from workers.store_links import StoreLinks

log = structlog.get_logger(__name__)

# Prompts worth this many full steps may be on their way to a worker; the rest waits in fair order.
AHEAD_STEPS = 4
# So many times `max_waiting` may come in during one step where sequences decode.
BURST_FACTOR = 4
# An engine that is stuck for so many limits will not come back; its requests shall go on elsewhere.
ENDS_AFTER_LIMITS = 3


class Worker:
    """One worker process."""

    def __init__(self, shared: PipelineSettings, settings: WorkerSettings) -> None:
        self._shared = shared
        self._settings = settings
        name = settings.name or f"{settings.role}-{os.getpid()}"
        self.hostname = f"{name}@{shared.node}"
        # A restarted worker is another one: its old name must not protect what the dead one owned.
        self.worker_id = f"{self.hostname}#{uuid.uuid4().hex[:8]}"
        self._slug = model_slug(shared.served_model_name)
        self._queues = queues_of(settings.role, self._slug, shared.node)
        self._is_draining = False
        self._leaves_with_node = False
        self._drain_s = settings.drain_s
        self._is_consuming = threading.Event()
        self._links = StoreLinks(shared, self.worker_id, self._slug)
        self._model = ServedModel(shared, settings)
        self._daemon = self._find_daemon()
        peers = PeerBook(
            shared.node, self._model.namespace, self._links.overview(), self._links.board()
        )
        self._desk = RequestDesk(
            self.worker_id,
            self._queues,
            hands_over=settings.role is Role.PREFILL,
            ledger=self._links.ledger(),
            key_root_for=self._model.key_root,
            grammar_for=self._model.start_grammar,
            peers_for=peers.peers_for,
        )
        self._sink = self._links.token_sink(self._desk, self._model.namespace)
        self._engine = self._model.engine(self._make_mover(), self._sink)
        self._desk.engine, self._desk.sink = self._engine, self._sink
        self._canary = Canary(
            self._engine,
            self._model.key_root("canary"),
            settings.canary_idle_s,
            settings.stuck_s,
        )
        self._heartbeat = Heartbeat(
            self.worker_id,
            self._links.ledger(),
            shared.lease_s,
            self._state,
            self._check_engine,
            lambda: not self._engine.failed.is_set(),
            self._engine.cancel,
            self._on_drain,
            self._desk.compare,
            self._engine.expect,
        )
        self._control = ControlListener(
            self.worker_id, connect(shared.redis_url), self._engine.cancel
        )
        self._upkeep = self._links.upkeep()
        self._look_ahead = self._make_look_ahead()
        self._reporter = (
            self._daemon.reporter(shared.node, self._links.board(), self._engine.forget_cached)
            if self._daemon
            else None
        )

    def _find_daemon(self) -> NodeDaemon | None:
        """None where the worker has no cache daemon."""
        socket_path = self._settings.kvd_socket
        if not self._settings.kvd or socket_path is None:
            return None
        return NodeDaemon(socket_path, self.worker_id, self._model.layout, self._model.namespace)

    def _make_mover(self) -> KvMover:
        if self._daemon is None:
            return NoCache()
        max_pending_blocks = max(32, self._model.engine_settings.num_blocks // 4)
        settings = self._settings
        return self._daemon.mover(max_pending_blocks, settings.loads, settings.long_share)

    def _make_look_ahead(self) -> LookAhead:
        model, ledger = self._model, self._links.ledger()
        return LookAhead(self._queues, ledger, self._engine, model.engine_settings, model.key_root)

    def _check_engine(self) -> None:
        self._canary.look(time.monotonic())
        if self._canary.waited_s > ENDS_AFTER_LIMITS * self._settings.stuck_s:
            log.critical("engine_stuck_worker_ends", worker=self.worker_id)
            os._exit(1)

    def _state(self) -> WorkerState:
        stats = self._engine.stats()
        return WorkerState(
            worker=self.worker_id,
            node=self._shared.node,
            role=self._settings.role,
            model=self._shared.served_model_name,
            build=self._model.build,
            engine=self._shared.engine,
            model_path=str(self._shared.model.absolute()) if self._shared.model else "",
            model_aliases=split_names(self._shared.model_aliases),
            text_digest=self._model.text_digest,
            max_context=self._model.max_context,
            namespace=self._model.namespace,
            queues=self._queues,
            capacity=self._model.engine_settings.max_batch_sequences,
            is_draining=self._is_draining,
            is_stuck=self._canary.is_stuck,
            num_running=stats.running + stats.loading + stats.storing,
            num_waiting=stats.waiting,
            peer_address=self._reporter.peer_address if self._reporter is not None else "",
            num_blocks=stats.total_blocks,
            num_used_blocks=stats.used_blocks,
            num_cached_blocks=stats.cached_blocks,
            num_steps=stats.num_steps,
            num_prefill_tokens=stats.num_prefill_tokens,
            num_decode_tokens=stats.num_decode_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_preemptions=stats.num_preemptions,
            num_spills=stats.num_spills,
            num_prefetched_blocks=stats.mover.num_prefetched_blocks,
            load_reasons=dict(stats.mover.load_reasons),
            tier_loads=tier_loads(stats.mover),
            max_ahead_tokens=AHEAD_STEPS * self._model.engine_settings.max_batch_tokens,
            prefill_tokens_per_s=self._model.engine_settings.max_batch_tokens / stats.prefill_step_s
            if stats.prefill_step_s
            else 0.0,
            measured_prefill_tokens_per_s=stats.prefill_tokens_per_s,
        )

    def run(self) -> int:
        """Serve until told to stop; the exit status."""
        self._engine.start()
        self._engine.ready.wait()
        if self._engine.failed.is_set():
            log.error("worker_engine_did_not_start", worker=self.worker_id)
            return 1
        self._sink.start()
        self._control.start()
        self._heartbeat.start()
        if self._reporter is not None:
            self._reporter.start()
            self._look_ahead.start()
        self._upkeep.start()
        threading.Thread(target=self._watch_engine, name="watchdog", daemon=True).start()
        return self._consume()

    def _consume(self) -> int:
        install_safe_qos()
        app = make_app(self._shared.redis_url)
        app.conf.broker_transport_options = transport_options(self.worker_id)
        engine_settings = self._model.engine_settings
        celery_worker = app.Worker(
            hostname=self.hostname,
            pool_cls=EnginePool.bound_to(self._desk, self._drain, engine_settings),
            concurrency=self._max_unadmitted,
            queues=list(self._queues),
            loglevel=self._shared.log_level.upper(),
            task_events=True,
            without_gossip=True,
            without_mingle=True,
        )

        def announce(**_: object) -> None:
            self._is_consuming.set()
            log.info(
                "worker_ready",
                worker=self.worker_id,
                role=str(self._settings.role),
                queues=list(self._queues),
                pool_tokens=engine_settings.num_blocks * engine_settings.block_tokens,
            )

        signals.worker_ready.connect(announce, weak=False)
        celery_worker.start()
        return int(celery_worker.exitcode or 0)

    @property
    def _max_unadmitted(self) -> int:
        """How many messages may be on their way into the engine.

        Celery prefetches as much as it may run at once, and a sequence stops counting when the engine
        admits it, once per step. Many short sequences end in one step, so that where they decode as
        many may come in. Prompts are better off in the broker, where a worker that is free sooner
        finds them.
        """
        max_waiting = self._model.engine_settings.max_waiting
        is_prefill = self._settings.role is Role.PREFILL
        return max_waiting if is_prefill else BURST_FACTOR * max_waiting

    def _on_drain(self, order: DrainOrder) -> None:
        """The node is drained: end as if told by a signal, and send nothing to its other workers."""
        if self._is_draining or not self._is_consuming.is_set():
            return  # before Celery has taken the signal over it would kill; the next beat asks again
        # By the event's name `pointsman serve` knows whether to start another.
        event = "worker_drained_to_come_back" if order.comes_back else "worker_drained_for_good"
        log.info(event, worker=self.worker_id, limit_s=order.limit_s)
        self._drain_s, self._leaves_with_node, self._is_draining = order.limit_s, True, True
        os.kill(os.getpid(), signal.SIGTERM)

    def _drain(self) -> None:
        """Finish what runs, give back what does not finish in time, strike the worker off."""
        self._is_draining = True
        self._desk.refuse_more()
        self._look_ahead.close()
        left = self._engine.stop(self._drain_s)
        self._sink.close()
        if left:
            self._desk.give_back(left, self._queue_elsewhere())
        self._upkeep.close()
        if self._reporter is not None:
            self._reporter.close()
        self._control.close()
        self._heartbeat.close()

    def _queue_elsewhere(self) -> str:
        slug = self._slug
        try:
            now_ms, beats = self._upkeep.overview.beats()
        except StoreUnavailable:
            return unplaced_queue(slug)
        everyone = Fleet.decode(beats, now_ms)
        fleet = (
            everyone.without_node(self._shared.node)
            if self._leaves_with_node
            else everyone.without(self.worker_id)
        )
        if self._settings.role is Role.DECODE:
            return choose_decode(fleet, slug, self._model.namespace) or unplaced_queue(slug)
        return choose_entry(fleet, slug)

    def _watch_engine(self) -> None:
        """A worker without its engine is of no use: end, so that the supervisor starts another."""
        self._engine.failed.wait()
        log.critical("engine_failed_worker_ends", worker=self.worker_id)
        os._exit(1)


def _end_with_thread(args: threading.ExceptHookArgs) -> None:
    """A worker that lost a thread looks alive and is not: end it, and let it be started again."""
    info = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    name = args.thread.name if args.thread is not None else ""
    log.critical("thread_ended_worker_ends", thread=name, exc_info=info)
    os._exit(1)


def main() -> int:
    """Entry of `python -m workers`; 2 for settings or a model that make no sense."""
    try:
        settings, shared = read_settings(WorkerSettings), load_pipeline_settings()
        configure_logs(shared.log_level, shared.log_format)
        threading.excepthook = _end_with_thread
        refuse_lossy_store(shared.redis_url)
        # Both are read by OpenMP when torch is loaded, which happens with the model. Threads that wait
        # by spinning take the cores from whoever has work.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        if settings.threads is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
        worker = Worker(shared, settings)
    except (UnknownSettings, SettingsInvalid, StoreLossy, ModelError, ModelFilesUnusable) as error:
        sys.stderr.write(f"worker: {error}\n")
        return 2
    return worker.run()
