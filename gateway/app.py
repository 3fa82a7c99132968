"""The composition root of the gateway: settings in, ASGI app out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI

from gateway.batch_desk import BatchDesk
from gateway.body import BodyReader
from gateway.drain import Drain
from gateway.edge import Edge
from gateway.http_errors import install_error_handlers
from gateway.keys_file import KeysFile
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
from pipeline.intake.intake_loader import IntakeLoader
from pipeline.intake.model_catalog import ModelCatalog
from pipeline.settings import PipelineSettings

log = structlog.get_logger(__name__)


def make_catalog(
    gateway: GatewaySettings, pipeline: PipelineSettings, client: PipelineClient
) -> ModelCatalog:
    """The models that are served; the main one, if there is one, is loaded.

    Raises:
        ModelFilesUnusable: its directory is incomplete.
        OSError, ValueError: its script book cannot be read.
    """
    loader = IntakeLoader(pipeline, gateway.models_dir or pipeline.data_dir / "models")
    configured = loader.configured(gateway.more_models)
    models = ModelCatalog(configured, client, loader.load)
    if pipeline.served_model_name in models.by_name:
        models.load_now(pipeline.served_model_name)
    return models


def make_services(gateway: GatewaySettings, pipeline: PipelineSettings) -> Services:
    """What the routes work with, nothing of it started. Raises as `create_app`."""
    client = PipelineClient(pipeline)
    return Services(
        settings=gateway,
        client=client,
        models=make_catalog(gateway, pipeline, client),
        keys_file=KeysFile(gateway.keys_file),
        rates=RateLimiter(pipeline.redis_url),
        bodies=BodyReader(
            gateway.max_body_bytes, gateway.max_pending_body_bytes, gateway.read_timeout_s
        ),
        metrics=GatewayMetrics(),
        drain=Drain(gateway.drain_s),
        encoding=ThreadPoolExecutor(gateway.encode_threads, thread_name_prefix="encode"),
        started_s=int(time.time()),
    )


def create_app(gateway: GatewaySettings, pipeline: PipelineSettings) -> FastAPI:
    """The app, with everything made but nothing started; its lifespan starts and closes the client.

    Raises:
        ModelFilesUnusable, KeysFileBroken, OSError: files that the settings name.
        DatabaseUnusable: the settings' database is of no kind that can be opened.
    """
    services = make_services(gateway, pipeline)
    webhooks = WebhookSender(
        services.client.webhooks, services.metrics, allows_private=gateway.webhook_private
    )
    desk = BatchDesk(pipeline, services.client, services.models)
    services.metrics.batch_lines.set_function(lambda: desk.num_lines_in_flight)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        await services.client.start()
        await desk.start()
        webhooks.start()
        log.info("gateway_started", models=list(services.models.by_name))
        try:
            yield
        finally:
            await webhooks.close()
            await desk.close()
            await services.client.close()
            await services.rates.close()
            services.encoding.shutdown(wait=False)
            services.models.close()
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
