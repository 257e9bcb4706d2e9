"""``gpu=24gb``: what it changes, and what it refuses; the table of all experiments is in test_memory.py."""

import pytest
from openvla_checkpoint import make_checkpoint
from paths import CONF
from running import recipe_here

from recipes.ppo import SETTINGS
from recipes.ppo_async import SETTINGS as ASYNC
from vla_algos.run.arguments import compose_settings
from vla_algos.run.config import read_config
from vla_algos.run.gpu import Fitting, fit_gpu
from vla_policies.memory import usable

PI0 = ["experiment=libero_ppo_openpi"]
ADAPTER = {"policy.lora_rank": 32, "policy.dtype": "bfloat16", "sharding.compute": None}


def settings_of(*typed, recipe="ppo", types=SETTINGS):
    return read_config(compose_settings(recipe, typed, CONF), types)


def test_nothing_is_changed_unless_it_is_asked_for():
    assert fit_gpu(settings_of(*PI0), 1, ()) == {}
    assert fit_gpu(settings_of(*PI0, "gpu=48gb"), 1, ()) == {"gpu": "48gb"}


def test_a_policy_that_is_made_new_fits(capsys):
    assert fit_gpu(settings_of("gpu=12gb"), 1, ()) == {"gpu": "12gb"}
    assert capsys.readouterr().out == "gpu=12gb: small is made new and small, nothing is changed\n"


def test_first_what_leaves_the_updates_as_they_are(capsys):
    changes = fit_gpu(settings_of(*PI0, "gpu=24gb"), 1, ())
    updates = {"update.micro_batch_size": 16, "policy.prefix_cache_gb": 0.0}
    assert changes == {"gpu": "24gb", **updates, "offload.optimizer": True, "pipeline.stages": 2}
    out = capsys.readouterr().out
    assert "  update.micro_batch_size        128 -> 16\n" in out
    assert out.endswith("the updates are the same, but for the rounding and the random numbers of other batches\n")


def test_what_was_chosen_is_kept_when_it_is_chosen_again():
    changes = fit_gpu(settings_of(*PI0, "gpu=24gb"), 1, ())
    typed = [f"{name}={str(value).lower()}" for name, value in changes.items()]
    again = settings_of(*PI0, *typed)
    assert fit_gpu(again, 1, ()) == {"gpu": "24gb"}


def test_an_adapter_only_if_it_must_be(capsys):
    changes = fit_gpu(settings_of(*PI0, "gpu=12gb"), 1, {"optim.lr"})
    assert changes.items() >= ADAPTER.items()
    assert "optim.lr" not in changes, "it was typed"
    assert "this is another experiment: an adapter is trained, in bfloat16" in capsys.readouterr().out
    assert Fitting(settings_of(*PI0), 1, {"policy.lora_rank"}).adapted is None
    large = settings_of("experiment=libero_10_ppo_openvlaoft", "gpu=24gb")
    assert "policy.lora_rank" in fit_gpu(large, 1, ())
    assert "policy.lora_rank" not in fit_gpu(large, 8, ()), "they share the model"


def test_what_is_typed_stays(capsys):
    typed = ("update.micro_batch_size", "offload.optimizer")
    changes = fit_gpu(settings_of(*PI0, "gpu=48gb", "update.micro_batch_size=128", "env.num_envs=256"), 1, typed)
    assert not changes.keys() & {*typed}
    assert "pipeline.stages" in changes, "enough without them"
    with pytest.raises(ValueError, match="gpu=24gb: pi0 does not fit"):
        fit_gpu(settings_of(*PI0, "gpu=24gb"), 1, {*typed, "pipeline.stages", "policy.dtype"})


def test_a_frozen_copy_counts():
    plain, held = (
        Fitting(settings_of(*PI0, f"loss.reference_kl_coeff={coeff}"), 1, ()).as_it_is.peaks({}) for coeff in (0, 0.1)
    )
    trained = sum(group.trained for group in Fitting(settings_of(*PI0), 1, ()).as_it_is.memory.groups)
    assert [after - before for before, after in zip(plain, held, strict=True)] == pytest.approx([4e-9 * trained] * 2)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["gpu=24"], r"gpu=24: must be what a GPU has, such as 12gb, 16gb, 24gb, 48gb or 80gb"),
        (["gpu=0gb"], "gpu=0gb: must be what a GPU has"),
        (["gpu=auto"], "gpu=auto: torch sees no GPU here; type the size of one, such as gpu=24gb"),
        (["gpu=auto", "launcher=slurm"], "gpu=auto: which GPU the job will have is not known here; type its size"),
        (
            ["experiment=libero_10_ppo_openvlaoft", "gpu=12gb"],
            "gpu=12gb: openvla_oft does not fit, .*; the smallest that would do is gpu=24gb",
        ),
        (
            ["experiment=libero_10_ppo_openvlaoft", "gpu=80gb", "policy.dtype=float32", "policy.lora_rank=null"],
            "gpu=80gb: openvla_oft does not fit, .*; take more GPUs, or larger ones",
        ),
    ],
)
def test_mistakes_are_one_line(typed, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    names = {each.partition("=")[0] for each in typed}
    with pytest.raises(ValueError, match=message):
        fit_gpu(settings_of(*PI0, *typed), 1, names)


def test_roles_are_refused():
    settings = settings_of("gpu=24gb", "placement.actor=0", recipe="ppo_async", types=ASYNC)
    with pytest.raises(
        ValueError, match="gpu=24gb: is for processes that both act and learn; leave out gpu, or placem"
    ):
        fit_gpu(settings, 2, ())


def test_a_recipe_takes_it_before_simulators_start(tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint")
    typed = ["policy=openvla_oft", f"policy.checkpoint={folder}", "policy.layout=official", "gpu=0.001gb"]
    with pytest.raises(ValueError, match=r"gpu=0\.001gb: openvla_oft does not fit"):
        recipe_here("ppo", tmp_path / "run", *typed)


def test_a_tenth_is_left():
    assert usable("24gb") == pytest.approx(21.6)
