"""HTTP interface of a server: submit, poll, stream progress, and fetch files."""

# FastAPI reads the annotations of the routes, which name local types: so they are not texts here.
import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, StreamingResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException as StarletteError
from starlette.routing import Match, Route

from fastfold._version import __version__
from fastfold.errors import FastFoldError, WriteError
from fastfold.inference.report.write import NAME as REPORT
from fastfold.products.serve.limits import RequestLimits
from fastfold.products.serve.page import front_page
from fastfold.products.serve.queue import (
    FINAL,
    QueuedJob,
    QueueFullError,
    QueueUnavailableError,
    RepeatedKeyError,
)
from fastfold.products.serve.service import ID, Service
from fastfold.products.serve.submission import JobView, Problem, ServerView, Submission
from fastfold.products.serve.tokens import LOCAL_USER
from fastfold.utils.hashing import file_digest

_EVENTS = "/v1/jobs/{job}/events"  #: Address of a stream, whose end a HEAD request would wait for
POLL_S = 0.2  #: Seconds between two looks at a job whose progress is streamed
_HEARTBEAT_S = 15.0
_PRIVATE = {"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}
# Scripts of a page of results cannot read the storage of the front page, which has the token.
_OF_RESULTS = "sandbox allow-scripts allow-downloads allow-popups; frame-ancestors 'none'"
_KEY = re.compile(r"[A-Za-z0-9._-]{8,128}")
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in (
        (400, "invalid JSON, sequence, template or setting, or a target that does not fit"),
        (401, "missing or unknown token"),
        (404, "unknown job or file"),
        (413, "request larger than the limit"),
        (422, "body of another form, or another body with the key of an earlier one"),
        (429, "limit of unfinished jobs"),
        (
            503,
            "queue of jobs in use by another program; Retry-After tells the seconds until it is tried again",
        ),
        (507, "disk of the server is full"),
    )
}


def create_app(service: Service) -> FastAPI:
    """Return the application of a server, whose state the caller starts and stops."""
    app = FastAPI(
        title="FastFold",
        version=__version__,
        description="Fold proteins with AlphaFold 2 networks.",
        docs_url=None,  # its scripts come from another server
        redoc_url=None,
        responses=_REFUSALS,
    )
    scheme: Any = (lambda: None) if service.tokens is None else HTTPBearer(auto_error=False)

    def user(request: Request, _: Annotated[Any, Depends(scheme)]) -> str:
        if service.tokens is None:
            return LOCAL_USER
        if (name := service.tokens.user(request.headers.get("authorization"))) is None:
            raise HTTPException(
                401,
                "missing or unknown token; send it as 'Authorization: Bearer TOKEN'",
                {"WWW-Authenticate": 'Bearer, Basic realm="FastFold"'},
            )
        return name

    User = Annotated[str, Depends(user)]

    def user_of(headers: Mapping[bytes, bytes]) -> str | None:
        if service.tokens is None:
            return LOCAL_USER
        return service.tokens.user(headers.get(b"authorization", b"").decode("latin-1"))

    def own_job(job: str, owner: User) -> QueuedJob:
        own = service.queue.get(job, owner) if ID.fullmatch(job) else None
        if own is None:
            raise HTTPException(404, "no such job of this user; GET /v1/jobs lists them")
        return own

    Job = Annotated[QueuedJob, Depends(own_job)]

    @app.post("/v1/jobs", status_code=201, tags=["jobs"])
    def submit(
        submission: Submission,
        owner: User,
        request: Request,
        response: Response,
        idempotency_key: Annotated[str | None, Header(description="repeats of a key are one job")] = None,
    ) -> JobView:
        """Submit a target; a repeated request with the same key returns the same job."""
        if not request.headers.get("content-type", "").startswith("application/json"):
            # A page of another site can send other types, or none, without asking.
            raise HTTPException(415, "expected the header Content-Type: application/json")
        if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
            raise HTTPException(400, "Idempotency-Key: expected 8 to 128 letters, digits and ._-")
        job = service.submit(submission, owner, idempotency_key)
        response.headers["Location"] = f"/v1/jobs/{job.id}"
        return service.view(job)

    @app.get("/v1/jobs", tags=["jobs"])
    def jobs(
        owner: User,
        state: Literal["queued", "running", "done", "failed", "cancelled"] | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> list[JobView]:
        """List jobs of the user in the order of admission, the last ones."""
        return [service.view(one) for one in service.queue.jobs(owner, state=state, limit=limit)]

    @app.get("/v1/jobs/{job}", tags=["jobs"])
    def poll(own: Job) -> JobView:
        """Return a job."""
        return service.view(own)

    @app.delete("/v1/jobs/{job}", status_code=204, tags=["jobs"], responses={409: {"model": Problem}})
    def remove(own: Job) -> None:
        """Cancel a waiting job, or remove an answered one with its files."""
        if not service.remove(own):
            raise HTTPException(409, "the job is running; remove it after its answer")

    @app.get(_EVENTS, tags=["jobs"], response_class=StreamingResponse)
    async def events(
        own: Job, last_event_id: Annotated[str | None, Header(description="resume after it")] = None
    ) -> StreamingResponse:
        """Stream progress and changes of state as server-sent events, until the answer."""
        offset = int(last_event_id) if last_event_id and re.fullmatch(r"\d{1,15}", last_event_id) else 0
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            _events(service, own, offset), media_type="text/event-stream", headers=headers
        )

    @app.get("/v1/jobs/{job}/files/{name}", tags=["results"], response_class=FileResponse)
    def file(own: Job, name: str) -> FileResponse:
        """Fetch a file that the job lists."""
        return _file(service, own, name, attached=True)

    @app.get("/v1/jobs/{job}/page", tags=["results"], status_code=303, response_class=RedirectResponse)
    def page(own: Job) -> RedirectResponse:
        """Go to the page of results, at an address that needs no token until the end of the next day."""
        _listed(own, REPORT)
        return RedirectResponse(service.address(own, REPORT), 303)

    @app.get("/v1/results/{link}/{name}", tags=["results"], response_class=FileResponse)
    def result(link: str, name: str) -> FileResponse:
        """Fetch a file of a job by its signed address; the page is shown, and its links lead here."""
        name_of_job = service.links.job(link)
        job = None if name_of_job is None else service.queue.get(name_of_job)
        if job is None:
            raise HTTPException(
                404, "no such results; the address may be too old, open them from the list of jobs"
            )
        return _file(service, job, name, attached=name != REPORT)

    @app.get("/v1/server", tags=["server"])
    def state(owner: User) -> ServerView:
        """Return the state of the server, with numbers of jobs of all users."""
        return service.state(owner)

    @app.get("/", include_in_schema=False, response_class=HTMLResponse)
    def front() -> HTMLResponse:
        """Show the front page, which is the same for all."""
        document = front_page(has_tokens=service.tokens is not None)
        return HTMLResponse(document.html, headers=_PRIVATE | {"Content-Security-Policy": document.policy})

    @app.get("/metrics", tags=["server"], response_class=Response)
    def metrics(_: User) -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/healthz", tags=["server"], responses={503: {"model": Problem}})
    def health() -> dict[str, str]:
        """Tell if the server can fold."""
        if service.dispatcher.problem:
            raise HTTPException(503, service.dispatcher.problem)
        return {"status": "ok"}

    app.openapi()  # describes the routes before each GET also takes HEAD
    for route in app.routes:
        if isinstance(route, Route) and route.methods == {"GET"} and route.path != _EVENTS:
            route.methods.add("HEAD")
    _add_refusals(app, service)
    options = service.options
    app.add_middleware(
        RequestLimits,
        max_body=options.max_body,
        body_seconds=options.body_seconds,
        send_seconds=options.send_seconds,
        max_requests=options.max_connections,
        max_own=options.max_connections if service.tokens is None else max(1, options.max_connections // 4),
        hosts={"localhost", "127.0.0.1", "::1", options.host} if service.tokens is None else None,
        user=user_of,
        answered=lambda method, status: service.metrics.submitted(status) if method == "POST" else None,
    )
    return app


def _add_refusals(app: FastAPI, service: Service) -> None:
    """Answer every refusal with one line of JSON."""

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        status, text, headers = _describe(error)
        if status == 405:  # the router names the methods of one route, and another may have the same address
            routes = (one for one in app.routes if one.matches(request.scope)[0] is not Match.NONE)
            methods = {name for one in routes if isinstance(one, Route) for name in one.methods or ()}
            headers = {"Allow": ", ".join(sorted(methods))}
        return JSONResponse({"error": " ".join(service.hide_paths(text).split())}, status, headers=headers)

    for kind in (FastFoldError, StarletteError, RequestValidationError, Exception):
        app.add_exception_handler(kind, refuse)


def _describe(error: Exception) -> tuple[int, str, Any]:
    """Return status, text and headers of the answer to an error."""
    if isinstance(error, QueueFullError):
        return 429, str(error), {"Retry-After": "30"}
    if isinstance(error, RepeatedKeyError):
        return 422, str(error), None
    if isinstance(error, QueueUnavailableError):
        return 507 if error.is_full else 503, str(error), {"Retry-After": "10"}
    if isinstance(error, FastFoldError):
        return 507 if isinstance(error, WriteError) else 400, str(error), None
    if isinstance(error, StarletteError):
        unknown = error.detail == "Not Found"
        text = "no such address; /openapi.json lists all" if unknown else str(error.detail)
        return error.status_code, text, error.headers
    if not isinstance(error, RequestValidationError):
        return 500, f"internal error, {type(error).__name__}; the log of the server has more", None
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return 400, f"the body is not JSON: {first.get('ctx', {}).get('error', 'invalid')}", None
    if place := ".".join(str(one) for one in first["loc"] if one != "body"):
        return 422, f"{place[:100]}: {first['msg']}", None
    return 422, "the body: expected JSON with the header Content-Type: application/json", None


def _listed(job: QueuedJob, name: str) -> None:
    """Refuse a name that is not among the files of an answered job."""
    if name not in job.result_fields.get("files", []):
        raise HTTPException(404, "no such file of this job; its files are listed with its answer")


def _file(service: Service, job: QueuedJob, name: str, *, attached: bool) -> FileResponse:
    """Return a file of an answered job, only if the job lists its name."""
    _listed(job, name)
    path = service.file(job, name)
    if not path.is_file() or path.is_symlink():
        raise HTTPException(404, "the file was removed from the server")
    status = path.stat()
    headers = {"Repr-Digest": f"sha-256=:{_digest(path, status.st_mtime_ns, status.st_size)}:"} | _PRIVATE
    if not attached:
        headers["Content-Security-Policy"] = _OF_RESULTS
    kind = "attachment" if attached else "inline"
    return FileResponse(path, filename=name, headers=headers, content_disposition_type=kind)


@lru_cache(1 << 12)
def _digest(path: Path, changed: int, size: int) -> str:
    """Return a file's SHA-256 in base64, computed once for a time of its last change and its size."""
    return base64.b64encode(bytes.fromhex(file_digest(path))).decode()


async def _events(service: Service, job: QueuedJob, offset: int) -> AsyncIterator[str]:
    """Yield the events of a job: each line of progress, and its view at every change of state."""
    told, quiet = "", 0.0
    while not service.stopping.is_set():
        # The state first: lines that were written before the answer are read after it.
        now = await asyncio.to_thread(service.queue.get, job.id)
        if now is None:
            return
        lines, offset = await asyncio.to_thread(service.progress, now, offset)
        for end, line in lines:
            yield f"id: {end}\nevent: progress\ndata: {json.dumps({'line': service.hide_paths(line)})}\n\n"
        if now.state != told:
            told = now.state
            view = await asyncio.to_thread(service.view, now)
            yield f"event: state\ndata: {view.model_dump_json()}\n\n"
        if now.state in FINAL:
            return
        quiet = 0.0 if lines else quiet + POLL_S
        if quiet >= _HEARTBEAT_S:
            quiet = 0.0
            yield ": waiting\n\n"
        await asyncio.sleep(POLL_S)
