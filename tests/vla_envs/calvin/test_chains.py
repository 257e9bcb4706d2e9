"""CALVIN without its simulator: conditions, chains, initial states, names and options."""

import collections

import numpy as np
import pytest

from vla_envs import evaluation_episodes, make_env, make_spec
from vla_envs.calvin import chains, states
from vla_envs.calvin.scenes import CABINET_SHIFT, TABLE_SHIFT
from vla_envs.calvin.spec import all_sentences


def is_chain(condition, names):
    """Tell whether five tasks are possible one after the other in one way each, and no two are of a category."""
    for name in names:
        after = chains.outcomes(condition, name)
        if len(after) != 1:
            return False
        condition = after[0]
    return len(names) == chains.LENGTH == len({chains.tasks()[name] for name in names})


def test_there_are_192_conditions_and_34_tasks():
    assert len(chains.conditions()) == 192
    assert len(chains.tasks()) == 34
    assert max(chains.tasks().values()) == 11
    assert set(all_sentences()["validation"]) == set(all_sentences()["training"]) == set(chains.tasks())


def test_the_published_chains_are_chains_and_the_published_procedure_draws_the_first_ones():
    published = chains.published_chains()
    assert len(published) == chains.PUBLISHED
    assert len({(tuple(condition.items()), names) for condition, names in published}) == chains.PUBLISHED
    assert all(is_chain(*chain) for chain in published)
    ours = {tuple(condition.items()) for condition in chains.conditions()}  # their order decides how blocks lie
    assert {tuple(condition.items()) for condition, _ in published} <= ours
    # calvin_agent's procedure for condition 0 with seed 0: five different tasks, drawn until they are a chain.
    condition, random = chains.conditions()[0], np.random.RandomState(0)
    while not is_chain(condition, drawn := tuple(random.choice(list(chains.tasks()), 5, replace=False))):
        pass
    assert any(dict(start) == dict(condition) and names == drawn for start, names in published)


def test_drawn_chains_are_as_likely_as_published_ones():
    drawn = [chains.draw_chain(0, number) for number in range(1000)]
    assert all(is_chain(*chain) for chain in drawn)
    assert drawn[:3] == [chains.draw_chain(0, number) for number in range(3)]
    count = collections.Counter(name for _, names in drawn for name in names)
    published = collections.Counter(name for _, names in chains.published_chains() for name in names)
    for name in chains.tasks():  # four standard deviations of the difference of two draws of 1000
        spread = 4 * (published[name] + count[name] + 1) ** 0.5
        assert abs(count[name] - published[name]) < spread, name


def test_a_hash_of_the_publication():
    condition, _ = chains.published_chains()[0]
    assert states.fnv(str(condition.values())) == 2138410836  # pyhash.fnv1_32


def test_states_of_a_condition():
    for condition in chains.conditions():
        robot, scene = states.published_state(condition, "D")
        shifted, off_button = (states.published_state(condition, letter)[1] for letter in "CB")
        assert robot.shape == (15,)
        assert scene.shape == (24,)
        assert scene[0] == (0.28 if condition["slider"] == "left" else 0)
        for number, color in enumerate(("red", "blue", "pink")):
            moved = shifted[6 + 6 * number] - scene[6 + 6 * number]
            assert moved == pytest.approx(0.18 if "slider" in condition[f"{color}_block"] else 0)
            right = scene[6 + 6 * number] > 0.2  # of the two places on the table; in B the button is there
            moved = off_button[6 + 6 * number] - scene[6 + 6 * number]
            assert moved == pytest.approx(-0.03 if right else 0.18 if "slider" in condition[f"{color}_block"] else 0)
        assert np.array_equal(np.delete(off_button, [6, 12, 18]), np.delete(scene, [6, 12, 18]))
        assert np.array_equal(states.published_state(condition, "A")[1], scene)
    assert set(CABINET_SHIFT) == set(TABLE_SHIFT) == set("ABCD")


def test_every_task_has_states_in_which_it_is_possible_in_one_way():
    for task in chains.tasks():
        possible = states.starts(task)
        assert len(possible) >= 48
        assert all(len(chains.outcomes(condition, task)) == 1 for condition in possible)
    first, again, other = (states.start_of("open_drawer", "D", True, *seed) for seed in ((0, 1), (0, 1), (0, 2)))
    assert np.array_equal(first[2], again[2])
    assert not np.array_equal(first[2], other[2])


def test_names_and_what_they_say():
    evaluation = make_spec("calvin/lh-mtlc")
    assert evaluation.trials == evaluation.initial_states == 1000
    assert evaluation.max_episode_steps == 5 * 360
    assert not any("mended" in text for text in evaluation.protocol_deviations)  # scene D is right as it is
    assert sum("contacts in a fixed order" in text for text in evaluation.protocol_deviations) == 1
    assert evaluation.chain_length == 5
    assert evaluation.protocol == "LH-MTLC: chains of 5 tasks, 360 steps for each, ended by the first failure"
    training = make_spec("calvin/ABC")
    assert training.chain_length == 5
    assert training.protocol == "training chain: 5 tasks in 480 steps, as RLinf has it; not LH-MTLC; drawn chains"
    assert make_spec("calvin/D", chains="published").protocol.endswith("; the published chains")
    assert make_spec("calvin/CBA").tasks[0].instructions == training.tasks[0].instructions  # the training ones
    assert len(make_spec("calvin/AB").tasks[0].instructions) == 34
    assert make_spec("calvin/A", scene="A") == make_spec("calvin/A")  # said twice
    off_the_button = [text for text in training.protocol_deviations if "off the button" in text]
    assert [text.partition(" mended")[0] for text in off_the_button] == ["scene B"]
    assert [task.name for task in training.tasks] == ["chains in A", "chains in B", "chains in C"]
    assert training.max_episode_steps == 480
    assert sum("mended" in text for text in training.protocol_deviations) == 3
    assert not any("mended" in text for text in make_spec("calvin/ABC", scene_fixes=False).protocol_deviations)
    assert len(training.tasks[0].instructions) > 300
    alone = make_spec("calvin/open_drawer+close_drawer", wrist_camera=False, image_size=64)
    assert [task.instruction for task in alone.tasks] == [
        "pull the handle to open the drawer",
        "push the handle to close the drawer",
    ]
    assert alone.wrist_image_shape is None
    assert alone.chain_length == 1
    assert "no protocol of the benchmark" in alone.protocol
    assert make_spec("calvin/D", chains="published").initial_states == 1000


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        ("open_drawr", {}, "did you mean open_drawer"),
        ("E", {}, "unknown CALVIN suite or task 'E'"),
        ("AA", {}, "unknown CALVIN suite or task 'AA'"),
        ("open_drawer+open_drawer", {}, "names a task twice"),
        ("D", {"scene": "A"}, "type calvin/A"),
        ("A", {"scene": "D"}, "scene=D: calvin/A says by its name where it is; type calvin/D"),
        ("lh-mtlc", {"chains": "drawn"}, "has its own"),
        ("lh-mtlc", {"max_episode_steps": 1801}, "360 steps for each of 5 tasks"),
        ("D", {"sentences": "both"}, "sentences=both: must be 'validation' or 'training'"),
        ("D", {"scene_fixes": "no"}, "must be a valid boolean"),
        ("D+open_drawer", {}, "joins scenes and tasks; type calvin/ABC for scenes, scene=A for tasks"),
        ("open_drawer", {"scene": "E"}, "scene=E: is not of A, B, C, D"),
        ("open_drawer", {"scene": "AAB"}, "scene=AAB: is not of A, B, C, D, or some of them"),
        ("lh-mtlc", {"scene": "AB"}, "runs in one scene; type scene=B"),
        ("open_drawer", {"chains": "published"}, "is for training in scenes such as calvin/D"),
        ("D", {"image_size": 0}, "image_size=0: must be greater than or equal to 16"),
        ("D", {"image_size": 100_000}, "image_size=100000: must be less than"),
        ("D", {"renderer": "eg"}, "did you mean egl"),
        ("D", {"pth": "x"}, "did you mean path"),
    ],
)
def test_what_cannot_be_is_one_line(suite, options, message):
    with pytest.raises(ValueError, match=message) as raised:
        make_spec(f"calvin/{suite}", **options)
    assert "\n" not in str(raised.value)


def test_what_is_paid_once_is_not_paid_as_a_change():
    for name in ("calvin/D", "calvin/lh-mtlc", "calvin/open_drawer"):
        with pytest.raises(ValueError, match=r"relative_reward=True: .* leave relative_reward out") as raised:
            make_env(name, 1, relative_reward=True)
        assert "\n" not in str(raised.value)


def test_there_are_1000_published_chains():
    with pytest.raises(ValueError, match=r"has 1000 initial states per task, got trials=1001"):
        evaluation_episodes(make_spec("calvin/lh-mtlc"), trials=1001)
