"""Run a server: networks, workers, queue and HTTP."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from filelock import Timeout

from fastfold.errors import ConfigError
from fastfold.evoformer.precision import about_missing_units
from fastfold.inference.models import about_mini, requested_networks
from fastfold.inference.planning.fit import host_memory_bytes
from fastfold.inference.prepare import check_request, with_precision
from fastfold.inference.request import InferRequest
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.setup import Setup
from fastfold.products.serve.admission import Admission
from fastfold.products.serve.app import create_app
from fastfold.products.serve.limits import patient_protocol
from fastfold.products.serve.options import ServeOptions, is_loopback
from fastfold.products.serve.service import Backend, Service
from fastfold.products.serve.tokens import read_tokens
from fastfold.products.serve.worker import GroupWorker
from fastfold.utils.atomic_files import prepare_output_directory
from fastfold.utils.device import choose_device
from fastfold.utils.locks import held
from fastfold.utils.machine import host_available_bytes

Say = Callable[[str], None]
_KEEP_ALIVE_S = 5
_GRACE_S = 3


def serve(options: ServeOptions, request: InferRequest, where: ScreenOptions, say: Say) -> None:
    """Serve until a signal ends the process, or raise FastFoldError if the server cannot start.

    The networks and settings are those of a request without targets; clients may change some settings of folds and
    options of runs. Workers with limits of time or memory get one job at a time.
    """
    if where.has_limits:
        options = replace(options, group=1)
    if options.tokens is not None:
        read_tokens(options.tokens)  # refuses an invalid file before the networks are opened
    with _alone(options.data), _listening(options) as listener:
        run_server(options, _backend(options, request, where, say), listener, say)


def run_server(options: ServeOptions, backend: Backend, listener: socket.socket, say: Say) -> None:
    """Serve on a socket by any backend until a signal ends the process."""
    service = Service(options, backend, say)
    server = _Server(service)
    service.start()
    try:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        say(f"serving on http://{shown}:{port}, results in {options.data}; Ctrl-C ends")
        if not is_loopback(options.host):
            say("requests are not encrypted: let clients reach the server by a proxy with TLS only")
        server.run(sockets=[listener])
    finally:
        service.stop()


class _Server(uvicorn.Server):
    """Server whose streams of events end with it."""

    def __init__(self, service: Service) -> None:
        super().__init__(server_config(service))
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end of the server at a signal."""
        self._service.stopping.set()
        super().handle_exit(sig, frame)


def server_config(service: Service) -> uvicorn.Config:
    """Return uvicorn's configuration of a server, with its limits."""
    options = service.options
    return uvicorn.Config(
        create_app(service),
        http=patient_protocol(options.head_seconds, options.max_connections),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )


def _backend(options: ServeOptions, request: InferRequest, where: ScreenOptions, say: Say) -> Backend:
    check_request(request.config, request.options)
    here = None if where.ray is not None else choose_device(request.config.device)
    config, chosen = with_precision(request.config, here)
    device = "cpu" if here is None else here.type
    networks = requested_networks(request.weights, request.options.num_models)
    setup = Setup(networks, replace(request, config=config), where, search=None, say=say, adapt=GroupWorker)
    plan, count = setup.memory_plan(), where.workers or 1
    budget = memory = config.budget
    if where.ray is None and device == "cuda":
        devices = range(torch.cuda.device_count())
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in devices)
    elif where.ray is None:
        memory = plan.total(host_available_bytes(), count)
        if count > 1:
            budget = memory = plan.share(memory, count)
    admission = Admission(
        networks,
        setup.request,
        device=device,
        memory=memory,
        host_memory=host_memory_bytes(device),
        max_residues=options.max_residues,
    )
    workers = setup.start()
    slow = "" if here is None else about_missing_units(config.precision or "fp32", here)
    for line in ("" if request.weights else about_mini(networks[0]), chosen, slow, workers.text):
        if line:
            say(line)
    return Backend(admission.check, lambda: workers.executor, budget)


@contextlib.contextmanager
def _alone(data: Path) -> Iterator[None]:
    """Lock the server's folder, or raise ConfigError if another server uses it."""
    prepare_output_directory(data)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(data / ".lock", timeout=0))
        except Timeout:
            raise ConfigError(f"another server uses {data}; stop it, or give another `data`") from None
        yield


@contextlib.contextmanager
def _listening(options: ServeOptions) -> Iterator[socket.socket]:
    """Bind a socket to the server's address, or raise ConfigError."""
    host = "127.0.0.1" if options.host == "localhost" else options.host
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, options.port))
            listener.listen(options.max_connections)  # clients may connect while the networks are opened
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {options.port}: {error.strerror}; choose another `port`"
            ) from error
        yield listener
