"""Rotary positions: those of transformers' Llama and Gemma, bit by bit."""

import pytest
import torch

from vla_policies.nn.gemma import _THETA
from vla_policies.nn.llama import Llama, LlamaConfig
from vla_policies.nn.rotary import rotate, rotation

POSITIONS = torch.stack([torch.arange(1000), torch.randperm(1000)])


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
def test_angles_and_turning_equal_llamas(head_dim):
    from transformers import LlamaConfig as Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = Config(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim)
    check(LlamaRotaryEmbedding(config), apply_rotary_pos_emb, head_dim, LlamaConfig.rope_theta)


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
def test_angles_and_turning_equal_gemmas(head_dim):
    from transformers import GemmaConfig
    from transformers.models.gemma.modeling_gemma import GemmaRotaryEmbedding, apply_rotary_pos_emb

    config = GemmaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim)
    check(GemmaRotaryEmbedding(config), apply_rotary_pos_emb, head_dim, _THETA)


def check(reference, apply, head_dim, theta):
    ours = rotation(POSITIONS, head_dim, theta, torch.float32)
    theirs = reference(torch.zeros(1), POSITIONS)
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found.squeeze(1), expected)
    queries, keys = torch.randn(2, 2, 2, 1000, head_dim)
    for vectors, expected in zip((queries, keys), apply(queries, keys, *theirs), strict=True):
        assert torch.equal(rotate(vectors, ours), expected)


@torch.no_grad()
def test_hidden_states_of_a_long_sequence_equal_llamas():
    """A frequency that is one ulp off moves them by 1e-5 of their size: rounding grows with the position."""
    from transformers import LlamaConfig as Config
    from transformers import LlamaModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2, vocab_size=8)
    reference = LlamaModel(Config(**sizes, num_key_value_heads=2, rms_norm_eps=1e-6)).eval()
    for weight in reference.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.1)  # attention that looks at few positions
    ours = Llama(LlamaConfig(**sizes, num_key_value_heads=2))
    ours.load_state_dict({f"model.{key}": value for key, value in reference.state_dict().items()}, strict=False)
    embeddings, valid = torch.randn(1, 900, 256), torch.ones(1, 900, dtype=torch.bool)
    expected = reference(inputs_embeds=embeddings).last_hidden_state
    found = ours.hidden_states(embeddings, valid, torch.arange(900)[None], causal=True)
    assert (found - expected).norm() < 1e-6 * expected.norm()
