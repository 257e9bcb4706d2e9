"""Placements of the guides and of everybody else: modes, ranks, transfers, meshes, and one line for what cannot be."""

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from vla_algos.disaggregated.placement import Placement, dealt

HYBRID, SHARED, APART = (
    "env: 0-3\nrollout: 4-7\nactor: 0-7",
    "env: all\nrollout: all\nactor: all",
    "env: 0-1\nrollout: 2-5\nactor: 6-7",
)
TWO_NODES, TWO_APART = "env: 0-7\nrollout: 8-15\nactor: 0-15", "env: 0-3\nrollout: 4-7\nactor: 8-15"
# Guide, its component_placement, its num_nodes, and what becomes of it on nodes of 8 GPUs. RoboTwin's guide has none.
GUIDES = [
    ("calvin", HYBRID, 1, "hybrid, 8 GPUs: actor 0-7, rollout 4-7, env 0-3"),
    ("calvin", SHARED, 1, "collocated, 8 GPUs: actor 0-7, rollout 0-7, env 0-7"),
    ("calvin", APART, 1, "disaggregated, 8 GPUs: actor 6-7, rollout 2-5, env 0-1; 0-1 only draw"),
    ("metaworld", HYBRID, 1, "hybrid, 8 GPUs: actor 0-7, rollout 4-7, env 0-3"),
    ("metaworld", SHARED, 1, "collocated, 8 GPUs: actor 0-7, rollout 0-7, env 0-7"),
    ("metaworld", APART, 1, "disaggregated, 8 GPUs: actor 6-7, rollout 2-5, env 0-1; 0-1 only draw"),
    ("libero", TWO_NODES, 2, None),
    ("libero", SHARED, 1, "collocated, 8 GPUs: actor 0-7, rollout 0-7, env 0-7"),
    ("libero", TWO_APART, 2, "disaggregated, 16 GPUs on 2 nodes: actor 8-15, rollout 4-7, env 0-3; 0-3 only draw"),
    ("maniskill", TWO_NODES, 2, None),
    ("maniskill", SHARED, 1, "collocated, 8 GPUs: actor 0-7, rollout 0-7, env 0-7"),
    ("maniskill", TWO_APART, 2, "disaggregated, 16 GPUs on 2 nodes: actor 8-15, rollout 4-7, env 0-3; 0-3 only draw"),
]


def read(settings, processes=8, per_node=8):
    return Placement.read(yaml.safe_load(settings) if isinstance(settings, str) else settings, processes, per_node)


@pytest.mark.parametrize(("guide", "settings", "nodes", "described"), GUIDES)
def test_every_placement_of_the_guides_is_taken_or_refused_in_one_line(guide, settings, nodes, described):
    if described is not None:
        assert read(settings, 8 * nodes).describe() == described
        return
    with pytest.raises(ValueError, match=r"type placement.env=same \(that is 8-15\)") as refused:
        read(settings, 8 * nodes)
    assert str(refused.value) == (
        "placement: env 0-7 has no rollout on its node and rollout 8-15 has no env on its node (16 GPUs on 2 nodes), "
        "and simulators share memory with their rollout; type placement.env=same (that is 8-15), or have both on each "
        "node"
    )
    assert read(settings, 16, 16).mode == "hybrid"  # as they are on a node of 16
    assert read({"env": "0-3,8-11", "rollout": "4-7,12-15"}, 16).mode == "hybrid"


def test_hybrid():
    """The guides' ``env: 0-3, rollout: 4-7, actor: 0-7``."""
    placement = read(HYBRID)
    assert placement.members == tuple(range(8))
    assert (placement.actors, placement.rollouts, len(placement.members)) == (tuple(range(8)), (4, 5, 6, 7), 8)
    assert [placement.env_gpus(rank) for rank in placement.rollouts] == [(0,), (1,), (2,), (3,)]
    assert placement.batch_transfers() == {4: (4, 0), 5: (5, 1), 6: (6, 2), 7: (7, 3)}


def test_disaggregated():
    """The guides' ``env: 0-1, rollout: 2-5, actor: 6-7``: of eight processes two have no part."""
    placement = read(APART)
    assert placement.members == (6, 7, 2, 3, 4, 5)
    assert (placement.actors, placement.rollouts, len(placement.members)) == ((0, 1), (2, 3, 4, 5), 6)
    assert [placement.env_gpus(rank) for rank in placement.rollouts] == [(0,), (0,), (1,), (1,)]
    assert placement.batch_transfers() == {2: (0,), 3: (0,), 4: (1,), 5: (1,)}


def test_two_nodes():
    placement = read(TWO_APART, 16)
    assert placement.members == (*range(8, 16), *range(4, 8))
    assert [placement.env_gpus(rank) for rank in placement.rollouts] == [(0,), (1,), (2,), (3,)]
    assert placement.batch_transfers() == {8: (0, 1), 9: (2, 3), 10: (4, 5), 11: (6, 7)}
    spread = read({"actor": "all", "rollout": "2-3,6-7", "env": "0-1,4-5"}, 8, 4)
    assert [spread.env_gpus(rank) for rank in spread.rollouts] == [(0,), (1,), (0,), (1,)]  # as numbered on the node


def test_one_process_and_defaults():
    for settings in ({}, {"actor": 0, "rollout": "0", "env": "same"}):
        placement = read(settings, 1, 1)
        assert placement.describe() == "collocated, 1 GPU: actor 0, rollout 0, env 0"
        assert (placement.members, placement.env_gpus(0), placement.batch_transfers()) == ((0,), (0,), {0: (0,)})
    shared = read({})
    assert [shared.env_gpus(rank) for rank in range(8)] == [(rank,) for rank in range(8)]
    assert shared.batch_transfers() == {rank: (rank,) for rank in range(8)}


@pytest.mark.parametrize(
    ("value", "numbers"),
    [("0-1,4-5", (0, 1, 4, 5)), (" 3 ", (3,)), (3, (3,)), ([0, "2-3"], (0, 2, 3)), ("all", tuple(range(8)))],
)
def test_spellings(value, numbers):
    assert read({"rollout": value}).rollout == numbers


def test_gpus_that_have_no_role_are_said():
    assert read({"actor": "0-3", "rollout": "0-3"}).describe().endswith("env 0-3; 4-7 idle")


def test_uneven_numbers_are_dealt_as_evenly_as_can_be():
    assert dealt(range(5), 2) == [range(2), range(2, 5)]
    assert dealt((7, 8), 5) == [[7], [7], [7], [8], [8]]
    assert read({"actor": "0-2", "rollout": "3-7"}).batch_transfers() == {3: (0,), 4: (0,), 5: (1,), 6: (1,), 7: (2,)}
    assert read({"actor": "0-4", "rollout": "5-6"}).batch_transfers() == {5: (0, 1), 6: (2, 3, 4)}
    assert read({"rollout": "0-4"}).batch_transfers() == {0: (0,), 1: (1, 5), 2: (2,), 3: (3, 6), 4: (4, 7)}
    assert [read({"rollout": "0-1", "env": "2-6"}).env_gpus(rank) for rank in (0, 1)] == [(2, 3), (4, 5, 6)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": ""}, "placement.rollout is empty; type placement.rollout=0-3, one number, or all"),
        ({"env": None}, "placement.env is empty; type placement.env=0-3, one number, or all, or same"),
        ({"rollout": []}, "placement.rollout is empty; type placement.rollout=0-3, one number, or all"),
        (
            {"rollout": "same"},
            "placement.rollout=same: 'same' is no number and no range; type placement.rollout=0-3 or all",
        ),
        ({"rollout": "4-"}, "placement.rollout=4-: '4-' is no number and no range; type placement.rollout=0-3 or all"),
        ({"rollout": 1.5}, "placement.rollout=1.5: '1.5' is no number and no range; type placement.rollout=0-3 or all"),
        ({"rollout": -1}, "placement.rollout=-1: '-1' is no number and no range; type placement.rollout=0-3 or all"),
        ({"rollout": {"a": 1}}, "is no number and no range"),
        ({"rollout": "7-4"}, "placement.rollout=7-4: 7-4 descends; type placement.rollout=4-7"),
        ({"rollout": "4-7,0-1"}, "placement.rollout=4-7,0-1: numbers ascend; type placement.rollout=[0-1,4-7]"),
        ({"rollout": "0-3,2-5"}, "placement.rollout=0-3,2-5: 2-3 is there twice; type placement.rollout=0-5"),
        (
            {"rollout": "4-11"},
            "placement.rollout=4-11: there is no 11, but 8 GPUs, 0 to 7; type placement.rollout=4-7, or",
        ),
        (
            {"env": 8},
            "placement.env=8: there is no 8, but 8 GPUs, 0 to 7; type placement.env=7, or start more processes",
        ),
        (
            {"actor": "0-5", "rollout": "4-7"},
            "placement: of rollout 4-7 4-5 are actors and 6-7 are not; have all among them (placement.actor=0-7 or "
            "placement.rollout=4-5) or all apart (placement.rollout=6-7)",
        ),
        (
            {"actor": "0-3", "rollout": "all"},
            "placement: of rollout 0-7 0-3 are actors and 4-7 are not; have all among them (placement.actor=0-7 or "
            "placement.rollout=0-3) or all apart (placement.rollout=4-7)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match="placement") as refused:
        read(settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_simulators_are_on_the_node_of_their_rollout():
    with pytest.raises(ValueError, match="env 0 has no rollout on its node") as refused:
        read({"env": "0,4", "rollout": "4-7"}, 8, 4)
    assert "rollout 4" not in str(refused.value)
    with pytest.raises(ValueError, match="rollout 4-7 has no env on its node"):
        read({"env": "0-3"}, 8, 4)


def test_processes_are_as_many_on_each_node():
    with pytest.raises(ValueError, match="6 processes cannot be 4 on each node"):
        read({}, 6, 4)


# ---- 24 processes that are not there

WORLDS = [  # the guides' on nodes of 8, and as large as three nodes allow
    *((settings, 8 * nodes, 8) for _, settings, nodes, described in GUIDES if described is not None),
    (TWO_NODES, 16, 16),
    (SHARED, 24, 8),
    ("env: 0-3,8-11,16-19\nrollout: 4-7,12-15,20-23\nactor: 0-23", 24, 8),
    ("env: 0-3\nrollout: 4-7\nactor: 8-23", 24, 8),
    ("env: 8-15\nrollout: 8-15\nactor: 0-7,16-23", 24, 8),
    ("rollout: 0-7\nactor: 8-23", 24, 8),
]


@pytest.fixture(params=(0, 9, 20))
def fake(request):
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=24)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(("settings", "processes", "per_node"), WORLDS)
def test_meshes_roles_and_transfers_of_24_processes(fake, settings, processes, per_node):
    placement = read(settings, processes, per_node)
    for shards in (1, 2, "all"):
        size = len(placement.actors) if shards == "all" else shards
        rows = torch.tensor(placement.actors).reshape(-1, size).tolist()
        mesh = DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("replicas", "shards"))
        assert mesh.mesh.tolist() == rows
        trains = fake in placement.actors
        found = mesh.get_coordinate()
        assert (found is not None) == trains
        if trains:
            assert rows[found[0]][found[1]] == fake
            assert mesh["shards"].size() == len(rows[0])
    rollouts = DeviceMesh("cpu", torch.tensor(placement.rollouts), mesh_dim_names=("rollout",))
    assert (rollouts.get_coordinate() is not None) == (fake in placement.rollouts)
    # Every rank has a part, rank 0 trains, and the guide's numbers are found again.
    assert {*placement.actors, *placement.rollouts} == set(range(len(placement.members)))
    assert 0 in placement.actors
    assert {placement.members[rank] for rank in placement.rollouts} == set(placement.rollout)
    # Rows of every rollout reach actors, every actor gets some, and loads are even.
    transfers = placement.batch_transfers()
    assert sorted(transfers) == list(placement.rollouts)
    load = dict.fromkeys(placement.actors, 0.0)
    for ranks in transfers.values():
        for rank in ranks:
            load[rank] += 1 / len(ranks)
    assert len(set(load.values())) == 1
    # Every env GPU draws for some rollout of its node, about as many for each.
    drawn = [
        placement.members[rank] // per_node * per_node + gpu
        for rank in placement.rollouts
        for gpu in placement.env_gpus(rank)
    ]
    assert sorted(set(drawn)) == list(placement.env)
    counts = [drawn.count(number) for number in placement.env]
    assert max(counts) - min(counts) <= 1
