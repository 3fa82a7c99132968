"""The composition root of the gateway: settings in, ASGI app out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI

from gateway.auth import KeyRing
from gateway.batch_desk import BatchDesk
from gateway.drain import Drain
from gateway.edge import Edge
from gateway.http_errors import install_error_handlers
from gateway.metrics import GatewayMetrics
from gateway.rate_limits import RateLimiter
from gateway.routes.batches import batch_routes
from gateway.routes.files import file_routes
from gateway.routes.generations import generation_routes
from gateway.routes.jobs import job_routes
from gateway.routes.models import model_routes
from gateway.routes.ops import ops_routes
from gateway.routes.responses import response_routes
from gateway.routes.tokens import token_routes
from gateway.services import Services
from gateway.settings import GatewaySettings
from gateway.webhooks import WebhookSender
from pipeline.client import PipelineClient
from pipeline.intake.build import Intake
from pipeline.intake.chat_template import ChatTemplate
from pipeline.intake.vocabulary import load_vocabulary
from pipeline.settings import PipelineSettings, split_names

log = structlog.get_logger(__name__)


def load_intake(settings: PipelineSettings) -> Intake:
    """Vocabulary and chat template of the served model.

    Raises:
        ModelFilesUnusable: the model directory is incomplete.
    """
    vocabulary = load_vocabulary(settings.engine, settings.model)
    intake = Intake(
        vocabulary,
        _load_template(settings),
        settings.served_model_name,
        queue_deadline_s=settings.queue_deadline_s,
        total_deadline_s=settings.total_deadline_s,
        batch_deadline_s=settings.batch_deadline_s,
    )
    intake.add_aliases(split_names(settings.model_aliases))
    return intake


def _load_template(settings: PipelineSettings) -> ChatTemplate:
    directory = settings.model if settings.engine == "torch" else None
    return ChatTemplate.load(
        directory, settings.chat_template, takes_kwargs=settings.chat_template_kwargs
    )


def make_services(gateway: GatewaySettings, pipeline: PipelineSettings) -> Services:
    """What the routes work with, nothing of it started. Raises as `create_app`."""
    return Services(
        settings=gateway,
        client=PipelineClient(pipeline),
        intake=load_intake(pipeline),
        keys=KeyRing.load(gateway.keys_file),
        rates=RateLimiter(pipeline.redis_url),
        metrics=GatewayMetrics(),
        drain=Drain(gateway.drain_s),
        encoding=ThreadPoolExecutor(gateway.encode_threads, thread_name_prefix="encode"),
        started_s=int(time.time()),
    )


def create_app(gateway: GatewaySettings, pipeline: PipelineSettings) -> FastAPI:
    """The app, with everything made but nothing started; its lifespan starts and closes the client.

    Raises:
        ModelFilesUnusable, KeysFileBroken, OSError: files that the settings name.
    """
    services = make_services(gateway, pipeline)
    webhooks = WebhookSender(
        services.client.webhooks, services.metrics, allows_private=gateway.webhook_private
    )
    desk = BatchDesk(pipeline, services.client, services.intake)
    services.metrics.batch_lines.set_function(lambda: desk.num_lines_in_flight)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        await services.client.start()
        await desk.start()
        webhooks.start()
        log.info("gateway_started", model=services.intake.model)
        try:
            yield
        finally:
            await webhooks.close()
            await desk.close()
            await services.client.close()
            await services.rates.close()
            services.encoding.shutdown(wait=False)
            log.info("gateway_stopped")

    app = FastAPI(
        title="Pointsman",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.services = services
    makers = (
        generation_routes,
        response_routes,
        token_routes,
        model_routes,
        job_routes,
        ops_routes,
    )
    routers = [make_routes(services) for make_routes in makers]
    routers += [make_routes(services, desk) for make_routes in (file_routes, batch_routes)]
    for router in routers:
        app.include_router(router)
    install_error_handlers(app, routers)
    app.add_middleware(Edge, metrics=services.metrics)
    return app
