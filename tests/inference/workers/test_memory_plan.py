"""How much memory a target needs, and what of a machine's it gets."""

from __future__ import annotations

from fastfold.data.targets import target_from_sequence
from fastfold.inference.config import InferConfig
from fastfold.inference.models import open_networks
from fastfold.inference.planning.planner import Planner
from fastfold.inference.workers.scheduler import PROCESS_BYTES, MemoryPlan
from fastfold.inference.workers.setup import smallest_memory, worker_bytes
from tests.helpers.command_line import CommandLine

GIB = 1 << 30


def test_what_is_shared_is_left_by_workers_and_a_tenth():
    plan = MemoryPlan(per_worker=GIB)
    assert plan.total(100 * GIB, 4) == 86 * GIB
    assert plan.total(1, 4) == 1


def test_a_limit_caps_what_a_fold_gets_so_that_it_stays_below_it():
    plan = MemoryPlan(per_worker=0, limit=3 * GIB)
    assert plan.share(100 * GIB, 4) == 3 * GIB
    assert plan.grant(9 * GIB, 100 * GIB, 4) == 3 * GIB


def test_a_long_target_gets_what_it_needs_up_to_all_there_is():
    plan = MemoryPlan(per_worker=0)
    assert plan.grant(2 * GIB, 40 * GIB, 4) == 10 * GIB
    assert plan.grant(15 * GIB, 40 * GIB, 4) == 15 * GIB
    assert plan.grant(50 * GIB, 40 * GIB, 4) == 40 * GIB


def test_what_a_target_needs_is_its_smallest_plan_by_the_network_that_needs_most(cli: CommandLine):
    networks = open_networks([cli.weights("model_1_ptm"), cli.weights("model_1_multimer_v3")])
    single, pair = (target_from_sequence(text) for text in ("MKT" * 30, "MKT" * 20 + ":" + "GSH" * 10))
    smallest = smallest_memory(networks, InferConfig())
    for target, network in ((single, networks[0]), (pair, networks[1])):
        planner = Planner(network.info.config, 4, parameters=4 * network.info.parameters, templates=0)
        assert smallest(target) == planner.smallest(90)
    assert smallest_memory(networks, InferConfig(precision="bf16"))(single) < smallest(single)


def test_a_worker_holds_all_networks_and_reads_one(cli: CommandLine):
    (network,) = open_networks([cli.weights()])
    parameters = network.info.parameters
    assert worker_bytes([network], "fp32") == PROCESS_BYTES + 8 * parameters
    assert worker_bytes([network] * 2, "bf16") == PROCESS_BYTES + (4 + 2 + 2) * parameters
