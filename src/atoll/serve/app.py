"""The application: endpoints, their errors, the page."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from atoll.serve import chat, completions, tokens
from atoll.serve.errors import ApiError, bad_request
from atoll.serve.guard import Guard
from atoll.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from atoll.serve.sending import ClientGone, Json, log
from atoll.serve.service import Service
from atoll.serve.settings import ServerSettings


def create_app(build: Callable[[], Service], settings: ServerSettings) -> Application:
    """`build` makes the `Service` when the event loop runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = build()
        yield
        await app.state.service.runner.close()

    # The documentation pages would load scripts from elsewhere.
    app = FastAPI(title="Atoll", lifespan=lifespan, docs_url=None, redoc_url=None)
    _endpoints(app)
    _admin(app)
    _page(app)
    _errors(app)
    return Application(app, settings)


def _endpoints(app: FastAPI) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        s: Service = request.app.state.service
        model = {"id": s.settings.name, "object": "model", "created": s.created, "owned_by": "atoll"}
        return Json({"object": "list", "data": [{**model, "max_model_len": s.settings.max_model_len}]})

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await chat.chat(request.app.state.service, body, request.state.salt, request.receive)

    @app.post("/v1/completions")
    async def text_completions(request: Request, body: CompletionRequest) -> Response:
        return await completions.complete(request.app.state.service, body, request.state.salt, request.receive)

    @app.post("/inference/v1/generate")
    async def generate(request: Request, body: GenerateRequest) -> Response:
        return await tokens.generate(request.app.state.service, body, request.state.salt, request.receive)

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        return await tokens.tokenize(request.app.state.service, body)

    @app.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        return await tokens.detokenize(request.app.state.service, body)

    @app.get("/health")
    async def health(request: Request) -> Response:
        runner = request.app.state.service.runner
        state = "failed" if runner.failed else "stopping" if runner.draining else "paused" if runner.paused else "ok"
        return Json({"status": state}, 200 if state in ("ok", "paused") else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        s: Service = request.app.state.service
        gauges = {"live_sequences": s.runner.live, "paused": s.runner.paused, "remembered_tokens": s.memory.held}
        return Response(s.metrics.text(**gauges), media_type="text/plain; version=0.0.4")


def _admin(app: FastAPI) -> None:
    @app.post("/admin/pause")
    async def pause(request: Request) -> Response:
        request.app.state.service.runner.pause()
        return Json({"status": "paused"})

    @app.post("/admin/resume")
    async def resume(request: Request) -> Response:
        request.app.state.service.runner.pause(False)
        return Json({"status": "ok"})

    @app.post("/admin/reload")
    async def reload(request: Request) -> Response:
        service: Service = request.app.state.service
        if service.reload is None:
            raise ApiError(501, "there is no folder to read weights from")
        return Json({"status": "ok", "version": await service.reload(service.runner)})


def _page(app: FastAPI) -> None:
    html = (resources.files("atoll.serve") / "page.html").read_text(encoding="utf-8")
    policy = content_policy(html)

    @app.get("/")
    async def page(request: Request) -> Response:
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
        return Response(html, media_type="text/html", headers=headers)


def content_policy(html: str) -> str:
    """What the page may do: run its own script and style, named by their hashes, and talk to this server. Nothing else."""

    def hashes(tag: str) -> str:
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inside)

    rules = {
        "default-src": "'none'",
        "script-src": hashes("script"),
        "style-src": hashes("style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


# ---------------------------------------------------------------- errors and books


def _errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return Json(error.body(), error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return Json(_validation(error).body(), 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        known = {404: f"no such endpoint: {request.url.path}", 405: f"{request.method} is not what {request.url.path} takes"}
        raised = ApiError(error.status_code, known.get(error.status_code, str(error.detail)))
        return Json(raised.body(), error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it; the count of requests does

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> Response:
        return Json(ApiError(500, "the server failed; its log says why").body(), 500)


def _validation(error: RequestValidationError) -> ApiError:
    """The first thing wrong with a body, its value left out."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return bad_request("the body is not JSON", code="invalid_json")
    places = [str(p) for p in first["loc"] if p != "body" and "[" not in str(p)]
    param = ".".join(places)[:100] or None  # names of the request's own may be among them
    return bad_request(f"{param or 'body'}: {first['msg']}", param)


class Application:
    """The endpoints behind their guard; counts requests by endpoint and status. ASGI."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        self._app, self._inside = app, Guard(app, settings)
        self._paths = {route.path for route in app.routes if isinstance(route, Route)}

    @property
    def service(self) -> Service:
        """Raises AttributeError before the application has started."""
        return self._app.state.service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on, and look at the status that goes out."""
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                endpoint = scope["path"] if scope["path"] in self._paths else "other"  # as many series as endpoints, whatever is asked for
                self.service.metrics.requests.add(endpoint=endpoint, status=str(message["status"]))
            await send(message)

        try:
            await self._inside(scope, receive, counted)
        except Exception:  # answered with 500 by the handler above; starlette raises it again for a server's log
            log.exception("%s failed", scope["path"])
