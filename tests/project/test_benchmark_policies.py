"""benchmarks/policies.py at a size that takes seconds; how fast anything is belongs to a quiet machine."""

import json
import sys

import pytest
import torch
from paths import GOLDEN, ROOT

from vla_common import keys
from vla_policies.pi0.model import Pi0ModelConfig

ARGUMENTS = ["--size", "tiny", "--batch", "1", "--repetitions", "1", "--threads", "1"]


@pytest.fixture
def benchmark(monkeypatch):
    """The module; what it sets for the process is undone."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import policies

    threads = torch.get_num_threads()
    yield policies
    torch.set_num_threads(threads)
    del sys.modules["policies"]


def test_contenders_agree_and_ratios_are_shown(benchmark, capsys):
    result = benchmark.run(benchmark.parse(ARGUMENTS))
    benchmark.show(result)
    shown = capsys.readouterr().out
    assert json.loads(json.dumps(result)) == result  # what --output writes
    assert max(result["agreement"].values()) < 1e-5
    assert result["action_tokens"] == 56
    assert result["sequence_length"] == 1 + 256 + 23 + 56 + 1
    mine, *others = result["contenders"]
    assert [row["is_peer"] for row in (mine, *others)] == [False, True, True, False]
    for row in others:
        assert row["name"] in shown
        # Float32 logits of 32064 rows, at least at the 56 action positions, against 256 rows.
        assert row["head_MiB"] > 56 * 32064 * 4 / 2**20 > 5 * mine["head_MiB"]
        assert row["step_MiB"] > mine["step_MiB"]
    best = result["over_ours_of_the_better_peer"]
    for name, line in (("head_time", "time of the head"), ("head_memory", "memory"), ("step_time", "whole step")):
        assert any(line in text and f"{best[name]:.2f}" in text for text in shown.splitlines())


def test_what_pi0_costs_is_shown_and_its_real_size_is_the_published_one(benchmark, capsys):
    import flow

    result = flow.run(flow.parse([*ARGUMENTS, "--steps", "2", "--device", "cpu"]))
    flow.show(result)
    assert "times less time" in capsys.readouterr().out
    assert json.loads(json.dumps(result)) == result
    layout = json.loads((GOLDEN / "pi0_full_layout.json").read_text())
    assert flow.SIZES["published"] == Pi0ModelConfig.from_shapes(layout)


def test_a_contender_that_computes_something_else_is_noticed(benchmark):
    policy = benchmark.make_policy("tiny", "cpu", torch.float32, 0, False)
    tokens = benchmark.make_batch(policy, 1)[keys.ACTION_TOKENS]
    hidden = torch.randn(1, 60, 64, requires_grad=True)

    def one_position_late(policy, hidden, tokens):
        return benchmark.ours(policy, hidden.roll(-1, 1), tokens)

    contenders = [benchmark.Contender("ours", benchmark.ours), benchmark.Contender("late", one_position_late)]
    with pytest.raises(RuntimeError, match="do not compute the same"):
        benchmark.check_agreement(contenders, policy, hidden, tokens, 1e-5)
